import gpytorch
import torch
from scipy.cluster.vq import kmeans2
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.stories.data import classes

X, y, X_test, y_test = (torch.as_tensor(a).float() for a in classes())
Z = torch.as_tensor(kmeans2(X.numpy(), 30, seed=0, minit="++")[0])


class Classifier(gpytorch.models.ApproximateGP):
    def __init__(self, Z):
        q = gpytorch.variational.CholeskyVariationalDistribution(len(Z))
        super().__init__(gpytorch.variational.VariationalStrategy(self, Z, q, learn_inducing_locations=True))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=2))

    def forward(self, X):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(X), self.covar_module(X))


model, likelihood = Classifier(Z), gpytorch.likelihoods.BernoulliLikelihood()
objective = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(y))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
loader = DataLoader(TensorDataset(X, y), batch_size=128, shuffle=True)
model.train(), likelihood.train()
for _ in range(125):
    for X_batch, y_batch in loader:
        optimizer.zero_grad()
        loss = -objective(model(X_batch), y_batch)
        loss.backward()
        optimizer.step()
model.eval(), likelihood.eval()
with torch.no_grad():
    p = likelihood(model(X_test)).mean
print(f"accuracy {((p > 0.5) == y_test.bool()).float().mean():.2f}")
