"""GPyTorch, in an environment of its own. The interface is that of ``ours``.

Variants: "default" leaves the settings alone but for Cholesky factors up to size 4096 (instead of conjugate gradients from 800 on);
"Cholesky" turns off all other iterative methods too; "one dtype" factors in the dtype of the data where the default is float64;
"one thread" instead of one per core, in which torch's threads do not wait for each other. On a GPU if torch finds one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import gpytorch
import torch
from gpytorch import settings

from benchmarks.peers.problem import LEARNING_RATE, NOISE, VARIANCE, Problem

Run = Callable[[int], float]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device() -> str:
    """What it computes on, by name."""
    return torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"


def chosen(problem: Problem, variant: str) -> ExitStack:
    """The settings of a variant, as a context."""
    if variant.endswith("one thread"):
        torch.set_num_threads(1)
    stack = ExitStack()
    stack.enter_context(settings.max_cholesky_size(4096))
    if variant.startswith("Cholesky"):
        stack.enter_context(settings.fast_computations(covar_root_decomposition=False, log_prob=False, solves=False))
    if "one dtype" in variant:
        dtype = torch.as_tensor(problem.X).dtype
        stack.enter_context(settings.linalg_dtypes(default=dtype))
    return stack


def matern(problem: Problem) -> gpytorch.kernels.Kernel:
    D = problem.X.shape[1]
    return gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5, ard_num_dims=D))


def set_hyperparameters(problem: Problem, kernel, likelihood) -> None:
    kernel.outputscale = VARIANCE
    kernel.base_kernel.lengthscale = torch.as_tensor(problem.lengthscale)
    likelihood.noise = NOISE**2


class SVGP(gpytorch.models.ApproximateGP):
    """Whitened, full covariance, inducing points learned."""

    def __init__(self, problem: Problem):
        q = gpytorch.variational.CholeskyVariationalDistribution(len(problem.Z))
        strategy = gpytorch.variational.VariationalStrategy(
            self, torch.as_tensor(problem.Z), q, learn_inducing_locations=True, jitter_val=problem.jitter
        )
        super().__init__(strategy)
        self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), matern(problem)
        strategy.variational_params_initialized.fill_(1)  # or the first call would put q at the prior
        with torch.no_grad():
            q.variational_mean.copy_(torch.as_tensor(problem.mean))
            q.chol_variational_covar.copy_(torch.as_tensor(problem.root))

    def forward(self, X):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(X), self.covar_module(X))


def svgp(problem: Problem) -> tuple[SVGP, gpytorch.likelihoods.GaussianLikelihood]:
    torch.set_default_dtype(torch.as_tensor(problem.X).dtype)
    model, likelihood = SVGP(problem), gpytorch.likelihoods.GaussianLikelihood()
    set_hyperparameters(problem, model.covar_module, likelihood)
    return model.to(DEVICE), likelihood.to(DEVICE)


def step(problem: Problem, variant: str) -> Run:
    """A training step: loss, gradients of all parameters, torch's Adam."""
    model, likelihood = svgp(problem)
    X, y = (torch.as_tensor(a, device=DEVICE) for a in (problem.X, problem.y))
    mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=problem.num_data)
    optimizer = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=LEARNING_RATE)
    model.train(), likelihood.train()

    def run(num: int) -> float:
        with chosen(problem, variant):
            for _ in range(num):
                optimizer.zero_grad()
                loss = -mll(model(X), y)
                loss.backward()
                optimizer.step()
        return -loss.item() * problem.num_data

    return run


startup = restart = step


class SGPR(gpytorch.models.ExactGP):
    """An exact GP whose kernel is that of the inducing points; the trace comes in as an added loss term."""

    def __init__(self, problem: Problem, likelihood):
        super().__init__(torch.as_tensor(problem.X), torch.as_tensor(problem.y), likelihood)
        self.mean_module = gpytorch.means.ZeroMean()
        self.base = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=problem.X.shape[1]))
        self.covar_module = gpytorch.kernels.InducingPointKernel(
            self.base, inducing_points=torch.as_tensor(problem.Z), likelihood=likelihood
        )

    def forward(self, X):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(X), self.covar_module(X))


def collapsed(problem: Problem, variant: str) -> Run:
    """Value and gradient of SGPR's bound, by Cholesky factors of M x M matrices; without jitter where it can.

    Not with the variant "Cholesky": told to use no fast computations GPyTorch factors the N x N covariance.
    """
    torch.set_default_dtype(torch.as_tensor(problem.X).dtype)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = SGPR(problem, likelihood)
    set_hyperparameters(problem, model.base, likelihood)
    model.to(DEVICE)  # the likelihood is a part of it
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    X, y = model.train_inputs[0], model.train_targets
    model.train(), likelihood.train()

    def run(num: int) -> float:
        with chosen(problem, variant):
            for _ in range(num):
                model.zero_grad()
                value = mll(model(X), y)
                value.backward()
        return value.item() * len(y)

    return run


def prediction(problem: Problem, variant: str) -> Run:
    """Means and variances in eval mode, which caches the Cholesky factor, without gradients."""
    model, _ = svgp(problem)
    X = torch.as_tensor(problem.X, device=DEVICE)
    model.eval()

    def run(num: int) -> float:
        with chosen(problem, variant), torch.no_grad():
            for _ in range(num):
                f = model(X)
                mean, variance = f.mean, f.variance
        return float((mean**2).mean() + variance.mean())

    return run
