"""GPflow as its tutorials have it: the notebooks in ``doc/sphinx/notebooks`` of its source, commit 81fe1fb. Float64, its default.

Numbers, at most 5000 rows. ``getting_started/basic_usage``: GPR with SquaredExponential, Scipy (L-BFGS-B).
Numbers, more rows. ``advanced/gps_for_big_data``, "Stochastic Variational Inference for scalability with SVGP": SVGP with
    SquaredExponential, the first 50 rows as inducing points that are not learned, Adam, batches of 100, 20,000 iterations.
Two classes, at most 2000 rows. ``getting_started/classification_and_other_data_distributions``: VGP with SquaredExponential,
    Bernoulli, Scipy. It ends after 1000 iterations at most, as in the tutorial of more classes; else it may take many thousands.
Two classes, more rows. The tutorial of more numbers, with Bernoulli.
More classes, at most 2000 rows. ``advanced/multiclass_classification``: SVGP with Matern32 + White(0.01), MultiClass with
    RobustMax, every fifth row as an inducing point that is not learned, a diagonal covariance, Scipy, 1000 iterations at most.
More classes and rows. The kernel and likelihood of that one, trained as that of more numbers.

Counts are left out: no tutorial is of counts.
"""

import sys

import gpflow
import numpy as np
import tensorflow as tf
import tf_keras
from gpflow import kernels, likelihoods, models

MOST, MOST_LABELS = 5000, 2000
FEW, BATCH, STEPS = 50, 100, 20_000
MOST_ITERATIONS = 1000
BLOCK = 1000


def train_whole(model, loss):
    gpflow.optimizers.Scipy().minimize(loss, model.trainable_variables, options={"maxiter": MOST_ITERATIONS})


def train_batches(model, X, y):
    gpflow.set_trainable(model.inducing_variable, False)
    rows = iter(tf.data.Dataset.from_tensor_slices((X, y)).repeat().shuffle(len(y)).batch(BATCH))
    loss = model.training_loss_closure(rows, compile=True)
    optimizer = tf_keras.optimizers.Adam()

    @tf.function
    def step():
        optimizer.minimize(loss, model.trainable_variables)

    for _ in range(STEPS):
        step()


def one_function(X, y, likelihood):
    """SVGP of many rows."""
    model = models.SVGP(kernels.SquaredExponential(), likelihood, X[:FEW].copy(), num_data=len(y))
    train_batches(model, X, y)
    return model


def numbers(X, y):
    if len(y) > MOST:
        return one_function(X, y, likelihoods.Gaussian())
    model = models.GPR((X, y), kernel=kernels.SquaredExponential())
    train_whole(model, model.training_loss)
    return model


def two_classes(X, y):
    if len(y) > MOST_LABELS:
        return one_function(X, y, likelihoods.Bernoulli())
    model = models.VGP((X, y), kernel=kernels.SquaredExponential(), likelihood=likelihoods.Bernoulli())
    train_whole(model, model.training_loss)
    return model


def more_classes(X, y, num_classes):
    are_few = len(y) <= MOST_LABELS
    kernel = kernels.Matern32() + kernels.White(variance=0.01)
    gpflow.set_trainable(kernel.kernels[1].variance, False)
    model = models.SVGP(
        kernel=kernel,
        likelihood=likelihoods.MultiClass(num_classes, invlink=likelihoods.RobustMax(num_classes)),
        inducing_variable=(X[::5] if are_few else X[:FEW]).copy(),
        num_latent_gps=num_classes,
        whiten=True,
        q_diag=True,
        num_data=len(y),
    )
    if not are_few:
        train_batches(model, X, y)
        return model
    gpflow.set_trainable(model.inducing_variable, False)
    train_whole(model, model.training_loss_closure((X, y)))
    return model


def main(given, found):
    tf.random.set_seed(0)
    with np.load(given) as file:
        X, y, X_test = file["X"], file["y"].astype(float)[:, None], file["X_test"]
        num_classes = int(file["num_classes"]) if "num_classes" in file else None
    if num_classes is None:
        model = numbers(X, y)
    else:
        model = two_classes(X, y) if num_classes == 2 else more_classes(X, y, num_classes)
    parts = [model.predict_y(X_test[i : i + BLOCK]) for i in range(0, len(X_test), BLOCK)]
    mean, variance = (np.concatenate(part) for part in zip(*parts, strict=True))
    if num_classes is None:
        np.savez(found, mean=mean[:, 0], scale=np.sqrt(variance[:, 0]))
    else:
        np.savez(found, probabilities=np.column_stack([1 - mean, mean]) if num_classes == 2 else mean)


if __name__ == "__main__":
    main(*sys.argv[1:])
