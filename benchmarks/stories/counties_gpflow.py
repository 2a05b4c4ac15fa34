import gpflow
import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp
from scipy.cluster.vq import kmeans2

from benchmarks.stories.data import counties

X, covariate, region, births, y = counties()
D = tfp.distributions
half_normal = D.HalfNormal(np.float64(0.5))


class Poisson(gpflow.likelihoods.ScalarLikelihood):
    """Births in the second column of Y."""

    def _scalar_log_prob(self, X, F, Y):
        return gpflow.logdensities.poisson(Y[..., :1], tf.exp(F) * Y[..., 1:])

    def _conditional_mean(self, X, F):
        return tf.exp(F)

    def _conditional_variance(self, X, F):
        return tf.exp(F)


class Effects(gpflow.functions.MeanFunction):
    """Level, slope and regions, in columns 2 and 3 of X."""

    def __init__(self):
        super().__init__()
        self.level = gpflow.Parameter(-6.0, prior=D.Normal(np.float64(-6), 1))
        self.slope = gpflow.Parameter(0.0, prior=D.Normal(np.float64(0), 1))
        self.spread = gpflow.Parameter(0.3, transform=gpflow.utilities.positive(), prior=half_normal)
        self.effect = gpflow.Parameter(np.zeros(12), prior=D.Normal(np.float64(0), 1))

    def __call__(self, X):
        effect = tf.gather(self.effect, tf.cast(X[:, 3], tf.int32))
        return (self.level + self.slope * X[:, 2] + self.spread * effect)[:, None]


kernel = gpflow.kernels.Matern32(variance=0.1, active_dims=[0, 1])
kernel.lengthscales.prior = D.InverseGamma(np.float64(3), 3)
kernel.variance.prior = half_normal
Z = np.concatenate([kmeans2(X, 30, seed=0, minit="++")[0], np.zeros((30, 2))], 1)
mean = Effects()
model = gpflow.models.SVGP(kernel, Poisson(), Z, mean_function=mean)
gpflow.set_trainable(model.inducing_variable, False)
data = np.column_stack([X, covariate, region]), np.column_stack([y, births])
optimizer = tf.keras.optimizers.Adam(0.03)
step = tf.function(lambda: optimizer.apply_gradients(gradients()))


def gradients():
    with tf.GradientTape() as tape:
        loss = model.training_loss(data)
    return zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)


for _ in range(3000):
    step()
print(f"level {mean.level.numpy():.2f}, slope {mean.slope.numpy():.2f}, spread {mean.spread.numpy():.2f}")
