"""GPyTorch as its tutorials have it: the notebooks in ``examples`` of its source, version 1.15.2. Float32, torch's default.

Numbers, at most 5000 rows. ``01_Exact_GPs/Simple_GP_Regression``: ExactGP with ConstantMean and ScaleKernel(RBFKernel()),
    Adam(0.1), 50 iterations; predictions with fast_pred_var.
Numbers, more rows. ``04_Variational_and_Approximate_GPs/SVGP_Regression_CUDA``, "Stochastic Variational GP Regression": the same
    mean and kernel, VariationalStrategy with the first 500 rows as inducing points that are learned,
    CholeskyVariationalDistribution, Adam(0.01), batches of 1024, 4 epochs.
Two classes, at most 2000 rows. ``04_Variational_and_Approximate_GPs/Non_Gaussian_Likelihoods``: all rows are inducing points,
    UnwhitenedVariationalStrategy, BernoulliLikelihood, Adam(0.1), 50 iterations.
Two classes, more rows. The tutorial of more numbers, with BernoulliLikelihood.
More classes, at most 5000 rows. ``01_Exact_GPs/GP_Regression_on_Classification_Labels``: an exact GP for each class,
    DirichletClassificationLikelihood with additional noise, Adam(0.1), 50 iterations, probabilities of 256 draws.
More classes and rows. No tutorial has this. It is the one of more numbers, with a GP for each class as in
    ``04_Variational_and_Approximate_GPs/SVGP_Multitask_GP_Regression`` and the SoftmaxLikelihood of
    ``06_PyTorch_NN_Integration_DKL/Deep_Kernel_Learning_DenseNet_CIFAR_Tutorial``: 8 draws in training and 16 for predictions. The
    functions are those of the classes and are not mixed.

Counts are left out: the one tutorial, ``07_Pyro_Integration/Cox_Process_Example``, is of events on a line.
"""

import sys

import gpytorch
import numpy as np
import torch
from gpytorch import kernels, likelihoods, means, mlls, variational
from gpytorch.distributions import MultivariateNormal

MOST, MOST_OF_TWO = 5000, 2000
BATCH = 1024


def add_prior(model, batch):
    """Mean and kernel of every tutorial, one for each entry of a batch."""
    model.mean_module = means.ConstantMean(batch_shape=batch)
    model.covar_module = kernels.ScaleKernel(kernels.RBFKernel(batch_shape=batch), batch_shape=batch)


class Exact(gpytorch.models.ExactGP):
    def __init__(self, X, y, likelihood, batch=()):
        super().__init__(X, y, likelihood)
        add_prior(self, torch.Size(batch))

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Approximate(gpytorch.models.ApproximateGP):
    def __init__(self, Z, strategy=variational.VariationalStrategy, learn=True, num_classes=None):
        batch = torch.Size(() if num_classes is None else (num_classes,))
        if num_classes is not None:
            Z = Z.repeat(num_classes, 1, 1)
        q = variational.CholeskyVariationalDistribution(Z.size(-2), batch_shape=batch)
        chosen = strategy(self, Z, q, learn_inducing_locations=learn)
        if num_classes is not None:
            chosen = variational.IndependentMultitaskVariationalStrategy(chosen, num_tasks=num_classes)
        super().__init__(chosen)
        add_prior(self, batch)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def train_whole(model, likelihood, mll, X, y):
    model.train(), likelihood.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(50):
        optimizer.zero_grad()
        loss = -mll(model(X), y).sum()
        loss.backward()
        optimizer.step()
    model.eval(), likelihood.eval()


def train_batches(model, likelihood, X, y):
    model.train(), likelihood.train()
    rows = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, y), batch_size=BATCH, shuffle=True)
    optimizer = torch.optim.Adam([{"params": model.parameters()}, {"params": likelihood.parameters()}], lr=0.01)
    mll = mlls.VariationalELBO(likelihood, model, num_data=y.size(0))
    for _ in range(4):
        for x_batch, y_batch in rows:
            optimizer.zero_grad()
            loss = -mll(model(x_batch), y_batch)
            loss.backward()
            optimizer.step()
    model.eval(), likelihood.eval()


def numbers(X, y, X_test):
    likelihood = likelihoods.GaussianLikelihood()
    if len(y) <= MOST:
        model = Exact(X, y, likelihood)
        train_whole(model, likelihood, mlls.ExactMarginalLogLikelihood(likelihood, model), X, y)
        parts = [X_test]
    else:
        model = Approximate(X[:500])
        train_batches(model, likelihood, X, y)
        parts = X_test.split(BATCH)
    with torch.no_grad(), gpytorch.settings.fast_pred_var():
        found = [likelihood(model(part)) for part in parts]
        return {
            "mean": torch.cat([p.mean for p in found]),
            "scale": torch.cat([p.variance for p in found]).sqrt(),
        }


def two_classes(X, y, X_test):
    likelihood = likelihoods.BernoulliLikelihood()
    if len(y) <= MOST_OF_TWO:
        model = Approximate(X, variational.UnwhitenedVariationalStrategy, learn=False)
        train_whole(model, likelihood, mlls.VariationalELBO(likelihood, model, y.numel()), X, y)
    else:
        model = Approximate(X[:500])
        train_batches(model, likelihood, X, y)
    with torch.no_grad():
        p = torch.cat([likelihood(model(part)).mean for part in X_test.split(BATCH)])
        return {"probabilities": torch.stack([1 - p, p], -1)}


def exact_classes(X, y, X_test, num_classes):
    likelihood = likelihoods.DirichletClassificationLikelihood(y, learn_additional_noise=True)
    targets = likelihood.transformed_targets
    model = Exact(X, targets, likelihood, (num_classes,))
    train_whole(model, likelihood, mlls.ExactMarginalLogLikelihood(likelihood, model), X, targets)
    with torch.no_grad(), gpytorch.settings.fast_pred_var():
        draws = model(X_test).sample(torch.Size((256,))).exp()
        return {"probabilities": (draws / draws.sum(-2, keepdim=True)).mean(0).T}


def many_classes(X, y, X_test, num_classes):
    likelihood = likelihoods.SoftmaxLikelihood(num_classes=num_classes, mixing_weights=False)
    model = Approximate(X[:500], num_classes=num_classes)
    with gpytorch.settings.num_likelihood_samples(8):
        train_batches(model, likelihood, X, y)
    with torch.no_grad(), gpytorch.settings.num_likelihood_samples(16):
        found = [likelihood(model(part)).probs.mean(0) for part in X_test.split(BATCH)]
        return {"probabilities": torch.cat(found)}


def main(given, found):
    torch.manual_seed(0)
    with np.load(given) as file:
        arrays = {name: torch.as_tensor(file[name]) for name in file}
    X, X_test = arrays["X"].float(), arrays["X_test"].float()
    if "num_classes" not in arrays:
        result = numbers(X, arrays["y"].float(), X_test)
    elif (num_classes := int(arrays["num_classes"])) == 2:
        result = two_classes(X, arrays["y"].float(), X_test)
    else:
        fit = exact_classes if len(X) <= MOST else many_classes
        result = fit(X, arrays["y"].long(), X_test, num_classes)
    np.savez(found, **{name: value.double().numpy() for name, value in result.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
