import gpflow
import numpy as np
import tensorflow as tf
from scipy.cluster.vq import kmeans2

from benchmarks.stories.data import classes

X, y, X_test, y_test = classes()
model = gpflow.models.SVGP(
    kernel=gpflow.kernels.SquaredExponential(lengthscales=np.ones(2)),
    likelihood=gpflow.likelihoods.Bernoulli(),
    inducing_variable=kmeans2(X, 30, seed=0, minit="++")[0],
    mean_function=gpflow.functions.Constant(0.0),
    num_data=len(X),
)
batches = tf.data.Dataset.from_tensor_slices((X, y[:, None])).repeat().shuffle(len(X), seed=0).batch(128)
loss = model.training_loss_closure(iter(batches), compile=True)
optimizer = tf.keras.optimizers.Adam(0.02)


@tf.function
def step():
    with tf.GradientTape() as tape:
        value = loss()
    gradients = tape.gradient(value, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


for _ in range(1000):
    step()
p = model.predict_y(X_test)[0].numpy()[:, 0]
print(f"accuracy {np.mean((p > 0.5) == y_test):.2f}")
