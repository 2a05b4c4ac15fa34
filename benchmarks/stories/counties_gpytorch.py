import gpytorch
import torch
from scipy.cluster.vq import kmeans2

from benchmarks.stories.data import counties

torch.set_default_dtype(torch.float64)
X, covariate, region, births, y = (torch.as_tensor(a) for a in counties())
half_normal, Normal = gpytorch.priors.HalfNormalPrior(0.5), torch.distributions.Normal
Z = torch.as_tensor(kmeans2(X.numpy(), 30, seed=0, minit="++")[0])


class Surface(gpytorch.models.ApproximateGP):
    def __init__(self):
        q = gpytorch.variational.CholeskyVariationalDistribution(len(Z))
        super().__init__(gpytorch.variational.VariationalStrategy(self, Z, q, learn_inducing_locations=False))
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5))
        self.covar_module.outputscale = 0.1

    def forward(self, X):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(X), self.covar_module(X))


class Poisson(gpytorch.likelihoods.Likelihood):
    def __init__(self):
        super().__init__()
        self.level = torch.nn.Parameter(torch.tensor(-6.0))
        self.slope = torch.nn.Parameter(torch.tensor(0.0))
        self.log_spread = torch.nn.Parameter(torch.tensor(0.3).log())
        self.effect = torch.nn.Parameter(torch.zeros(12))
        self.quadrature = gpytorch.utils.quadrature.GaussHermiteQuadrature1D()

    def forward(self, f):
        log_rate = f + self.level + self.slope * covariate + self.log_spread.exp() * self.effect[region]
        return torch.distributions.Poisson(births * log_rate.exp())

    def expected_log_prob(self, y, f):
        return self.quadrature(lambda values: self.forward(values).log_prob(y), f)

    def log_prior(self):
        points = Normal(-6, 1).log_prob(self.level) + Normal(0, 1).log_prob(self.slope)
        return points + half_normal.log_prob(self.log_spread.exp()) + Normal(0, 1).log_prob(self.effect).sum()


surface, likelihood = Surface(), Poisson()
kernel = surface.covar_module
lengthscale_prior = torch.distributions.InverseGamma(3.0, 3.0)
objective = gpytorch.mlls.VariationalELBO(likelihood, surface, num_data=len(y))
optimizer = torch.optim.Adam([*surface.parameters(), *likelihood.parameters()], lr=0.03)
surface.train(), likelihood.train()
for _ in range(3000):
    optimizer.zero_grad()
    log_prior = likelihood.log_prior() + half_normal.log_prob(kernel.outputscale.sqrt())
    log_prior = log_prior + lengthscale_prior.log_prob(kernel.base_kernel.lengthscale).sum()
    loss = -objective(surface(X), y) * len(y) - log_prior
    loss.backward()
    optimizer.step()
level, slope, spread = likelihood.level.item(), likelihood.slope.item(), likelihood.log_spread.exp().item()
print(f"level {level:.2f}, slope {slope:.2f}, spread {spread:.2f}")
