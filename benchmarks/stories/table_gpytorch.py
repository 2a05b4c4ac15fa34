import gpytorch
import torch

from benchmarks.stories.data import table

X, y, X_test, y_test = (torch.as_tensor(a).float() for a in table())
loc, scale, y_loc, y_scale = X.mean(0), X.std(0), y.mean(), y.std()
X, X_test, y = (X - loc) / scale, (X_test - loc) / scale, (y - y_loc) / y_scale


class SGPR(gpytorch.models.ExactGP):
    def __init__(self, X, y, likelihood):
        super().__init__(X, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        base = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5, ard_num_dims=3))
        self.covar_module = gpytorch.kernels.InducingPointKernel(base, X[::10].clone(), likelihood)

    def forward(self, X):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(X), self.covar_module(X))


likelihood = gpytorch.likelihoods.GaussianLikelihood()
model = SGPR(X, y, likelihood)
objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
model.train(), likelihood.train()
for _ in range(200):
    optimizer.zero_grad()
    loss = -objective(model(X), y)
    loss.backward()
    optimizer.step()
model.eval(), likelihood.eval()
with torch.no_grad():
    predicted = likelihood(model(X_test))
mean, sd = predicted.mean * y_scale + y_loc, predicted.stddev * y_scale
inside = ((mean - 1.96 * sd < y_test) & (y_test < mean + 1.96 * sd)).float().mean()
print(f"rmse {(mean - y_test).square().mean().sqrt():.3f}, inside {inside:.2f}")
