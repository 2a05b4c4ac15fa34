"""Families of q: each answer beside dense linear algebra, whether it is a family's own or follows from its spread."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
import pytest
from numpy.testing import assert_allclose
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import gaussians, kernels, likelihoods, online
from numpyro_orthgp.gaussians import Diagonal, Full, LowRank, Shifted, Value, Whitened
from tests import oracles, problems
from tests.made_up import Reflected

M = 5


def dense(q: Whitened) -> np.ndarray:
    """S, from the parameters alone."""
    if isinstance(q, Full):
        return np.asarray(q.scale_tril @ jnp.swapaxes(q.scale_tril, -1, -2))
    if isinstance(q, Diagonal):
        return np.asarray(q.scale**2)[..., None] * np.eye(M)
    if isinstance(q, Shifted):
        return np.broadcast_to(np.eye(M), (*q.loc.shape, M))
    if isinstance(q, LowRank):
        R = np.asarray(q.scale)[..., None] * np.eye(M) + np.asarray(q.left) @ np.swapaxes(q.right, -1, -2)
        return R @ np.swapaxes(R, -1, -2)
    u = np.asarray(q.direction / jnp.linalg.norm(q.direction, axis=-1, keepdims=True))
    H = np.eye(M) - 2 * u[..., :, None] * u[..., None, :]
    return H @ (np.asarray(q.scale**2)[..., None] * H)


def members(dtype: str = "float64", batch: tuple[int, ...] = ()) -> dict[str, Whitened]:
    rng = np.random.default_rng(0)

    def array(*shape, least=None):
        return jnp.asarray(
            rng.normal(size=batch + shape) if least is None else rng.uniform(least, 2, batch + shape), dtype
        )

    return {
        "full": Full(array(M), jnp.tril(array(M, M) / 4) + jnp.eye(M, dtype=dtype)),
        "diagonal": Diagonal(array(M), array(M, least=0.3)),
        "prior": Shifted(array(M)),
        "low_rank": LowRank(array(M), array(M, least=0.3), array(M, 2), array(M, 2)),
        "reflected": Reflected(array(M), array(M, least=0.3), array(M)),
    }


FAMILIES = list(members())


@pytest.mark.parametrize("batch", [(), (2,)], ids=["one", "several"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", FAMILIES)
def test_answers_are_those_of_the_dense_covariance(name, dtype, batch):
    q, rng = members(dtype, batch)[name], np.random.default_rng(1)
    S, m = dense(q).astype(float), np.asarray(q.loc, float)
    rtol = 1e-9 if dtype == "float64" else 1e-4
    A, A_single = rng.normal(size=(*batch, M, 3)).astype(dtype), rng.normal(size=(M, 3)).astype(dtype)
    for projections in (A, A_single):  # some kernels give all functions one projection
        W = q.spread(jnp.asarray(projections))
        expected = np.swapaxes(projections, -1, -2) @ S @ projections
        assert_allclose(jnp.swapaxes(W, -1, -2) @ W + np.zeros_like(expected), expected, rtol=rtol, atol=rtol)
    T = q.lower_root()
    assert_allclose(T @ jnp.swapaxes(T, -1, -2) + np.zeros_like(S), S, rtol=rtol, atol=rtol)
    assert (np.triu(T, 1) == 0).all()
    assert_allclose(q.variance() + np.zeros_like(m), np.diagonal(S, axis1=-2, axis2=-1), rtol=rtol)
    each = np.linalg.slogdet(S)[1] / 2
    assert_allclose(q.half_log_det() + np.zeros_like(each), each, rtol=rtol, atol=rtol)
    trace = np.trace(S, axis1=-2, axis2=-1) - M
    assert_allclose(q.excess_trace() + np.zeros_like(each), trace, rtol=rtol, atol=10 * rtol)
    assert_allclose(q.kl_from_prior(), np.sum((m**2).sum(-1) + trace) / 2 - each.sum(), rtol=rtol, atol=rtol)
    V = q.standardized(jnp.asarray(A))
    assert_allclose(
        jnp.swapaxes(V, -1, -2) @ V, np.swapaxes(A, -1, -2) @ np.linalg.solve(S, A), rtol=10 * rtol, atol=rtol
    )
    assert all(leaf.dtype == dtype for leaf in jax.tree.leaves((q.parameters(), q.kl_from_prior(), T, V)))


@pytest.mark.parametrize("batch", [(), (2,)], ids=["one", "several"])
@pytest.mark.parametrize("name", FAMILIES)
def test_density_draws_and_principal_axes(name, batch):
    q, value = members(batch=batch)[name], np.random.default_rng(2).normal(size=(4, *batch, M))
    S, centred = dense(q), value - np.asarray(q.loc)
    square = np.einsum("...i,...ij,...j->...", centred, np.linalg.inv(S), centred)
    each = -(square + np.linalg.slogdet(S)[1] + M * np.log(2 * np.pi)) / 2
    assert_allclose(q.log_density(jnp.asarray(value)), each.sum(-1) if batch else each, rtol=1e-9)
    draws = np.asarray(q.sample(jax.random.PRNGKey(0), (100_000,)))
    assert_allclose(draws.mean(0), q.loc, atol=0.03)
    centred = draws - np.asarray(q.loc)
    assert_allclose(np.einsum("n...i,n...j->...ij", centred, centred) / len(draws), S, atol=0.05 * S.max())
    V, turned = q.principal_axes()
    V = np.eye(M) if V is None else np.asarray(V)
    assert_allclose(np.swapaxes(V, -1, -2) @ V + np.zeros_like(S), np.eye(M) + np.zeros_like(S), atol=1e-12)
    back = V @ dense(turned) @ np.swapaxes(V, -1, -2)
    assert_allclose(back, S, rtol=1e-9, atol=1e-12)
    assert_allclose(np.einsum("...ij,...j->...i", V, np.asarray(turned.loc)), q.loc, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_rebuild_the_member(name):
    q = members()[name]
    again = q.given(**q.parameters())
    assert type(again) is type(q)
    assert_allclose(dense(again), dense(q), rtol=1e-12)
    assert tuple(q.parameters()) == type(q).parts() and type(q).parts()[0] == "loc"


@pytest.mark.parametrize("family", [Full, Diagonal, Shifted, LowRank, Reflected])
def test_starts_have_the_standard_deviation_that_was_asked_for(family):
    for dtype in ("float32", "float64"):
        q = family.start((2, M), jnp.asarray(0.3, dtype))
        expected = np.ones(M) if family is Shifted else np.full(M, 0.09)
        assert_allclose(np.diagonal(dense(q), axis1=-2, axis2=-1)[0], expected, rtol=0.02)
        assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(q))
        assert (np.asarray(q.loc) == 0).all()


def test_a_value_spreads_nothing():
    q = Value(jnp.arange(3.0))
    assert q.spread(jnp.eye(3)) is None and q.is_value
    assert (q.lower_root() == 0).all() and (q.variance() == 0).all() and q.kl_from_prior() == np.inf
    assert (q.sample(jax.random.PRNGKey(0), (4,)) == q.loc).all()


# ---------------------------------------------------------------- in a guide


def guide_and_params(X, y, covariance, sizes=(5, 4), **options):
    rng = np.random.default_rng(0)
    sets = problems.sets(rng, list(sizes))
    kwargs = {"inducing": sets, "likelihood": problems.gaussian(0.3), "jitter": 1e-8}
    guide = ogp.AutoSparseGP(problems.model, covariance=covariance, **options)
    svi = SVI(problems.model, guide, optax.adam(0.02), TraceMeanField_ELBO())
    return svi, kwargs, sets


@pytest.mark.parametrize(
    "covariance",
    ["low_rank", LowRank.of_rank(2), Reflected, ["low_rank", Reflected]],
    ids=["name", "rank", "own", "each"],
)
def test_bounds_and_posteriors_are_the_dense_ones(rng, covariance):
    X, y = (jnp.asarray(a) for a in problems.data(rng, 12))
    svi, kwargs, sets = guide_and_params(X, y, covariance)
    run = svi.run(jax.random.PRNGKey(0), 30, X, y, progress_bar=False, **kwargs)
    f = ogp.posterior(problems.model, svi.guide, run.params, X, y, **kwargs)["f"]
    k = problems.kernel_oracle("matern52", float(run.params["variance"]), np.asarray(run.params["lengthscale"]))
    jitter = np.array([b.jitter.max() for b in f.blocks])
    qs = [
        oracles.WhitenedSet(np.asarray(Z), np.asarray(q.loc), np.asarray(q.lower_root() @ q.lower_root().T))
        for Z, q in zip(sets, f.beliefs, strict=True)
    ]
    loss = svi.loss.loss(jax.random.PRNGKey(0), run.params, problems.model, svi.guide, X, y, **kwargs)
    assert_allclose(-loss, oracles.elbo_gaussian(k, qs, np.asarray(X), np.asarray(y), 0.3**2, jitter), rtol=1e-8)
    mean, cov = oracles.q_f(k, qs, np.asarray(X), jitter)
    assert_allclose(f(X).mean, mean, rtol=1e-7, atol=1e-9)
    assert_allclose(f.joint(X).covariance_matrix, cov, atol=1e-7)
    assert run.losses[-1] < run.losses[0]


def test_low_rank_of_full_rank_reaches_the_optimum(rng):
    """As many columns as variables make any root: the optimum for Gaussian noise, too."""
    X, y = (jnp.asarray(a) for a in problems.data(rng, 30))
    Z = jnp.asarray(np.linspace(-2, 2, 5)[:, None] * np.ones((1, X.shape[1])))

    def model():
        f = ogp.gp("f", kernels.RBF(1.0), Z)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X), 0.5), obs=y)

    best = ogp.CollapsedGP(kernels.RBF(1.0), X, Z, 0.5, bound="titsias2009").log_prob(y)
    svi = SVI(model, ogp.AutoSparseGP(model, covariance="low_rank"), optax.adam(0.03), TraceMeanField_ELBO())
    losses = svi.run(jax.random.PRNGKey(0), 3000, progress_bar=False).losses
    assert_allclose(-losses[-1], best, atol=1e-3)


def test_names_and_shapes_of_parameters(rng):
    X, y = (jnp.asarray(a) for a in problems.data(rng, 12))
    svi, kwargs, _ = guide_and_params(X, y, {"f": [LowRank.of_rank(3), "diagonal"]})
    params = svi.get_params(svi.init(jax.random.PRNGKey(0), X, y, **kwargs))
    assert {n: v.shape for n, v in params.items()} == {
        "variance": (), "lengthscale": (2,), "f.u0_loc": (5,), "f.u0_scale": (5,), "f.u0_left": (5, 3), "f.u0_right": (5, 3), 
        "f.u1_loc": (4,), "f.u1_scale": (4,),
    }  # fmt: skip


def test_errors(rng):
    X, y = (jnp.asarray(a) for a in problems.data(rng, 12))
    svi, kwargs, _ = guide_and_params(X, y, "low_rank", natural=True)
    with pytest.raises(
        ValueError, match=r"natural=True: natural steps are not known for the covariance 'low_rank' of `f.u0`"
    ):
        svi.init(jax.random.PRNGKey(0), X, y, **kwargs)
    with pytest.raises(ValueError, match=r"`rank` must be a positive integer; got 0"):
        LowRank.of_rank(0)
    with pytest.raises(ValueError, match=r"Unknown `covariance` 'lowrank'; known are .*'low_rank'"):
        ogp.AutoSparseGP(problems.model, covariance="lowrank")
    svi, kwargs, _ = guide_and_params(X, y, [1.0, "full"])
    with pytest.raises(ValueError, match=r"`covariance` must be the name of a family, one of 'full', .* got 1.0"):
        svi.init(jax.random.PRNGKey(0), X, y, **kwargs)
    assert set(gaussians.FAMILIES) == {"full", "diagonal", "prior", "low_rank"}


@dataclasses.dataclass(frozen=True)
class Unregistered(Diagonal):
    """Not a pytree."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Kronecker(Whitened):
    """S = L L' x R R': an option says of which sizes, and no parameter has a constraint."""

    left: jax.Array
    right: jax.Array
    name = "kronecker"

    @classmethod
    def start(cls, shape, scale, sizes):
        parts = [jnp.broadcast_to(jnp.sqrt(scale) * jnp.eye(n), (*shape[:-1], n, n)) for n in sizes]
        return cls(jnp.zeros(shape), *parts)

    def spread(self, A):
        L, R = self.left, self.right
        W = jnp.einsum("...ia,...jb,...ijn->...abn", L, R, A.reshape(*A.shape[:-2], L.shape[-1], R.shape[-1], -1))
        return W.reshape(*W.shape[:-3], -1, W.shape[-1])


@pytest.mark.parametrize("num_latents", [None, 2])
def test_a_family_with_options(num_latents):
    """Its start needs arguments: a fit of one function starts from another; it failed where that asked for axes."""
    X = jnp.linspace(0.0, 1.0, 9)[:, None]

    def model():
        f = ogp.gp("f", kernels.RBF(0.3), X[:6], num_latents=num_latents)
        shape = f(X).shape
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X), 0.1).to_event(len(shape) - 1), obs=jnp.ones(shape))

    def svi(natural=False):
        guide = ogp.AutoSparseGP(model, covariance=partial(Kronecker.start, sizes=(2, 3)), natural=natural)
        return SVI(model, guide, optax.adam(0.05), TraceMeanField_ELBO())

    first = svi()
    run = first.run(jax.random.PRNGKey(0), 5, progress_bar=False)
    f = ogp.posterior(model, first.guide, run.params)["f"]
    if num_latents is not None:
        with pytest.raises(TypeError, match=r"Kronecker\.start\(shape, scale\) must work without .* default values"):
            online.start_from("f", f)
        return
    q, again = f.beliefs[0], svi()
    S = np.kron(*(np.asarray(T @ T.T) for T in (q.left, q.right)))
    assert_allclose(q.lower_root() @ q.lower_root().T, S, atol=1e-12)
    state = again.init(jax.random.PRNGKey(1), init_params=online.start_from("f", f))
    assert_allclose(again.evaluate(state), first.evaluate(run.state), rtol=1e-10)
    with pytest.raises(ValueError, match="natural steps are not known for the covariance 'kronecker'"):
        svi(natural=True).init(jax.random.PRNGKey(0))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Optional(Diagonal):
    """An option as a field."""

    width: int = dataclasses.field(default=2, metadata={"static": True})


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"covariance": 5}, ValueError, "must be the name of a family, .* got 5"),
        ({"covariance": Value}, ValueError, "must be the name of a family, .* got <class .*Value'>"),
        ({"covariance": lambda shape, scale: jnp.zeros(shape)}, TypeError, "must make members of a family for `f.u0`"),
        ({"covariance": Unregistered}, TypeError, "@jax.tree_util.register_dataclass above .* got Unregistered"),
        ({"covariance": Optional}, TypeError, r"`width` of Optional is 2 for .*=partial\(Optional\.start, width=2\)"),
        ({"covariance": ["full"]}, ValueError, "must be one name or one per set, 2 here; got 1"),
        (
            {"residual": lambda name, shape, dtype: jnp.full(shape, -0.5, dtype)},
            ValueError,
            "v of `f` must be positive",
        ),
    ],
)
def test_what_is_no_family_or_residual(options, error, says, rng):
    X, y = (jnp.asarray(a) for a in problems.data(rng, 12))
    svi, kwargs, _ = guide_and_params(X, y, **{"covariance": "full"} | options)
    with pytest.raises(error, match=says):
        svi.init(jax.random.PRNGKey(0), X, y, **kwargs)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Halved(Full):
    """A subclass of "full" that spreads otherwise: S / 4."""

    name = "halved"

    def spread(self, A):
        return super().spread(A) / 2

    def lower_root(self):
        return self.scale_tril / 2


def test_a_subclass_of_full_spreads_as_it_says(rng):
    """Also where there are many inputs for each point, and "full" has a rule of its own."""
    X, y = (jnp.asarray(a) for a in problems.data(rng, 60))
    svi, kwargs, sets = guide_and_params(X, y, Halved)
    params = svi.get_params(svi.init(jax.random.PRNGKey(0), X, y, **kwargs))
    k = problems.kernel_oracle("matern52", float(params["variance"]), np.asarray(params["lengthscale"]))
    qs = [oracles.WhitenedSet(np.asarray(Z), np.zeros(len(Z)), np.eye(len(Z)) / 4) for Z in sets]
    loss = svi.loss.loss(jax.random.PRNGKey(0), params, problems.model, svi.guide, X, y, **kwargs)
    jitter = 1e-8 * float(params["variance"])
    assert_allclose(-loss, oracles.elbo_gaussian(k, qs, np.asarray(X), np.asarray(y), 0.3**2, jitter), rtol=1e-8)
