"""GPflow, in an environment of its own. The interface is that of ``ours``.

Variants: "graph" and "XLA" are ``tf.function`` without and with ``jit_compile``.
"""

from __future__ import annotations

from collections.abc import Callable

import gpflow
import tensorflow as tf

from benchmarks.peers.problem import LEARNING_RATE, NOISE, VARIANCE, Problem

Run = Callable[[int], float]


def device() -> str:
    """What it computes on, by name."""
    gpus = tf.config.list_physical_devices("GPU")
    return tf.config.experimental.get_device_details(gpus[0])["device_name"] if gpus else "cpu"


def configure(problem: Problem) -> None:
    gpflow.config.set_default_float(problem.dtype)
    gpflow.config.set_default_jitter(problem.jitter)


def svgp(problem: Problem) -> gpflow.models.SVGP:
    configure(problem)
    return gpflow.models.SVGP(
        gpflow.kernels.Matern32(variance=VARIANCE, lengthscales=problem.lengthscale),
        gpflow.likelihoods.Gaussian(variance=NOISE**2),
        inducing_variable=problem.Z,
        q_mu=problem.mean[:, None],
        q_sqrt=problem.root[None],
        whiten=True,
        num_data=problem.num_data,
    )


def repeat(step: Callable[[], tf.Tensor]) -> Run:
    def run(num: int) -> float:
        for _ in range(num):
            value = step()
        return float(value.numpy())

    return run


def step(problem: Problem, variant: str) -> Run:
    """A training step: loss, gradients of all variables, Keras's Adam, in one compiled function."""
    model, optimizer = svgp(problem), tf.optimizers.Adam(LEARNING_RATE)
    X, y = tf.constant(problem.X), tf.constant(problem.y[:, None])
    optimizer.build(model.trainable_variables)

    @tf.function(autograph=False, jit_compile=variant == "XLA")
    def update(X, y):
        with tf.GradientTape() as tape:
            loss = model.training_loss((X, y))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return -loss

    return repeat(lambda: update(X, y))


startup = restart = step


def collapsed(problem: Problem, variant: str) -> Run:
    """Value and gradient of SGPR's bound."""
    configure(problem)
    kernel = gpflow.kernels.RBF(variance=VARIANCE, lengthscales=problem.lengthscale)
    model = gpflow.models.SGPR((problem.X, problem.y[:, None]), kernel, problem.Z, noise_variance=NOISE**2)

    @tf.function(autograph=False, jit_compile=variant == "XLA")
    def gradient():
        with tf.GradientTape() as tape:
            value = model.maximum_log_likelihood_objective()
        return value, tape.gradient(value, model.trainable_variables)

    return repeat(lambda: gradient()[0])


def prediction(problem: Problem, variant: str) -> Run:
    """Means and variances by the posterior object, which caches what does not depend on the inputs."""
    posterior, X = svgp(problem).posterior(), tf.constant(problem.X)
    predict = tf.function(posterior.predict_f, autograph=False, jit_compile=variant == "XLA")

    def run(num: int) -> float:
        for _ in range(num):
            mean, variance = predict(X)
        return float((tf.reduce_mean(mean**2) + tf.reduce_mean(variance)).numpy())

    return run
