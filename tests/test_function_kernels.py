"""Kernels, likelihoods and means that are Python functions of parameters: what they close over goes through transformations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpy.testing import assert_allclose
from numpyro.infer import MCMC, NUTS, SVI, Predictive, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import init, kernels, likelihoods
from numpyro_orthgp.closures import Closure

X = jnp.linspace(0.0, 3.0, 12)[:, None]
y = jnp.sin(2 * X[:, 0])
Z = X[::3]
KEY = jax.random.PRNGKey(0)


class Owner:
    """No pytree, with a method that is a kernel."""

    def matrix(self, base, A, B=None):
        return base(A) if B is None else base(A, B)


class Holder:
    """No pytree, and it holds the kernel, in an object that holds it in turn. It keeps what it saw last."""

    def __init__(self, base):
        self.count, self.last, self.part = 3, None, Slotted(base, self)

    def __call__(self, A, B=None):
        self.last = A
        return self.part.matrix(A, B)


@dataclass(slots=True)
class Slotted:
    base: Callable
    owner: object

    def matrix(self, A, B=None):
        assert self.owner.part is self and self.owner.count == 3
        return self.base(A) if B is None else self.base(A, B)


def plain(base):
    return lambda A, B=None: base(A) if B is None else base(A, B)


def of_dict(base):
    parts = {"base": [base, 2.0]}
    return lambda A, B=None: parts["base"][0](A) if B is None else parts["base"][0](A, B)


def of_default(base):
    def kernel(A, B=None, base=base):
        return base(A) if B is None else base(A, B)

    return kernel


def nested(base):
    inner = plain(base)

    def diagonal(A):
        return inner(A)

    return lambda A, B=None: diagonal(A) if B is None else inner(A, B)


def recursive(base):
    def kernel(A, B=None):
        if B is None:
            return jax.vmap(lambda a: kernel(a[None], a[None])[0, 0])(A)
        return base(A, B)

    return kernel


def of_a_number(base):
    """Closes over the array itself, which is no pytree of arrays but one of them."""
    variance, one = base(X[:1])[0], kernels.RBF(0.8)
    return lambda A, B=None: variance * one(A) if B is None else variance * one(A, B)


def local_class(base):
    """Its methods close over the kernel, or find it in the class."""
    parts = {"base": base}

    class Above:
        def __call__(self, A, B=None):
            assert self.owned == 3
            return parts["base"](A) if B is None else self.both(A, B)

        @property
        def both(self):
            return parts["base"]

    class Kernel(Above):
        def __init__(self):
            self.owned = 3

        def __call__(self, A, B=None):
            return super().__call__(A, B) if A is None else self.one(A, B)

        @staticmethod
        def one(A, B):
            return Kernel.all_of(A) if B is None else parts["base"](A, B)

        @classmethod
        def all_of(cls, A):
            return cls.kept(A)

        kept = staticmethod(lambda A: parts["base"](A))

    assert isinstance(Kernel(), Above)
    return Kernel


def class_attribute(base):
    class Kernel:
        kept = [base]

        def __call__(self, A, B=None):
            return self.kept[0](A) if B is None else self.kept[0](A, B)

    return Kernel()


def of_itself(base):
    """Its method closes over the object that it belongs to."""

    class Kernel:
        def __call__(self, A, B=None):
            return kernel.base(A) if B is None else kernel.base(A, B)

        def __len__(self):
            return 0

    kernel = Kernel()
    kernel.base, kernel.size = base, 3
    return kernel


def cached(base):
    once = lru_cache(lambda: base)
    return lambda A, B=None: once()(A) if B is None else once()(A, B)


def of_namespace(base):
    parts = SimpleNamespace(base=base, other=3)
    return lambda A, B=None: parts.base(A) if B is None else parts.base(A, B)


def of_any_keys(base):
    parts = {1: base, "other": 2}
    return lambda A, B=None: parts[1](A) if B is None else parts[1](A, B)


KERNELS = {
    "closure": plain,
    "object of a local class": lambda base: local_class(base)(),
    "static method of a local class": lambda base: partial(lambda of, A, B=None: of.one(A, B), local_class(base)),
    "attribute of a local class": class_attribute,
    "object that its method closes over": of_itself,
    "cached": cached,
    "in a namespace": of_namespace,
    "in a dict without order": of_any_keys,
    "jitted": lambda base: jax.jit(plain(base)),
    "jitted partial": lambda base: jax.jit(partial(Owner().matrix, base)),
    "vmapped": lambda base: lambda A, B=None: base(A) if B is None else jax.vmap(lambda a: base(a[None], B)[0])(A),
    "in containers": of_dict,
    "default argument": of_default,
    "nested": nested,
    "recursive": recursive,
    "in a sum": lambda base: kernels.Constant(0.0) + plain(base),
    "partial": lambda base: partial(Owner().matrix, base),
    "object": Holder,
    "method of an object": lambda base: Holder(base).part.matrix,
    "object in a sum": lambda base: Holder(base) + kernels.Constant(0.0),
    "method": lambda base: partial(lambda k, A, B=None: k(A) if B is None else k(A, B), base),
}


def model(X, y=None, *, wrap=None):
    base = numpyro.param("v", 1.3) * kernels.RBF(numpyro.param("l", 0.8))
    f = ogp.gp("f", base if wrap is None else wrap(base), Z)
    with numpyro.plate("d", len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X), 0.3), obs=y)


PARAMS = {
    "v": jnp.asarray(0.9),
    "l": jnp.asarray(0.7),
    "f.u0_loc": jnp.asarray([0.3, -0.5, 1.0, 0.2]),
    "f.u0_scale_tril": 0.5 * jnp.eye(4),
}


@pytest.mark.parametrize("wrap", KERNELS.values(), ids=KERNELS)
def test_a_function_is_what_the_kernel_itself_is(wrap):
    """Posterior out of `jit`, its gradient for the parameters, and a stack of functions by `vmap`."""

    def posterior(p, wrap):
        return ogp.posterior(model, ogp.AutoSparseGP(partial(model, wrap=wrap)), p, X, y, wrap=wrap)["f"]

    def total(p, wrap):
        m = posterior(p, wrap)(X + 0.1)
        return jnp.sum(m.mean + jnp.sin(m.variance))

    f, g = (jax.jit(partial(posterior, wrap=w))(PARAMS) for w in (wrap, None))
    assert_allclose(f(X + 0.1).variance, g(X + 0.1).variance, rtol=1e-9)
    assert_allclose(jax.jit(lambda f: f(X).mean)(f), g(X).mean, rtol=1e-9)
    ours, plainly = (jax.jit(jax.grad(partial(total, wrap=w)))(PARAMS) for w in (wrap, None))
    for name in PARAMS:
        assert_allclose(ours[name], plainly[name], rtol=1e-7, atol=1e-10)
    scales = jnp.asarray([0.5, 1.0])
    many = jax.jit(jax.vmap(lambda l: posterior(PARAMS | {"l": l}, wrap)))(scales)
    variances = jax.vmap(lambda f: f(X).variance)(many)
    for i, l in enumerate(scales):
        assert_allclose(variances[i], posterior(PARAMS | {"l": l}, None)(X).variance, rtol=1e-9)


def test_structures_are_compared_by_code_and_contents():
    a, b = (Closure(plain(kernels.RBF(jnp.asarray(l)))) for l in (0.5, 0.7))
    assert jax.tree.structure(a) == jax.tree.structure(b) and hash(jax.tree.structure(a)) == hash(jax.tree.structure(b))
    count = []

    @jax.jit
    def evaluate(k):
        count.append(k)
        return k(X, X)

    assert_allclose(evaluate(a), kernels.RBF(0.5)(X, X))
    assert_allclose(evaluate(b), kernels.RBF(0.7)(X, X))
    assert len(count) == 1

    def scaled(c):
        return lambda A, B: c * kernels.RBF(0.5)(A, B)

    for c, d in ((2, 3), (1, 1.0), (True, 1), (np.ones(2), np.ones(2)), ({1}, {1})):
        assert jax.tree.structure(Closure(scaled(c))) != jax.tree.structure(Closure(scaled(d)))
    fixed = np.ones(2)
    assert jax.tree.structure(Closure(scaled(fixed))) == jax.tree.structure(Closure(scaled(fixed)))
    assert jax.tree.structure(Closure(scaled(2))) == jax.tree.structure(Closure(scaled(2)))
    assert jax.tree.structure(Closure(plain(1))) != jax.tree.structure(Closure(of_default(1)))


def test_rebuilt_functions_are_functions():
    """Keyword defaults, attributes, an empty cell, a bound method and mutual recursion survive."""

    one = jnp.asarray(1.0)

    def even(n, *, step=one):
        return True if n == 0 else odd(n - step, step=step)

    def odd(n, *, step=one):
        return False if n == 0 else even(n - step, step=step)

    even.note = "kept"
    rebuilt = jax.tree.map(lambda leaf: leaf, Closure(even))
    assert rebuilt(4) and not rebuilt(3) and rebuilt.function.note == "kept" and rebuilt.function is not even
    assert len(jax.tree.leaves(rebuilt)) == 2

    # A jitted function without arrays stays the same object, with the programs that it has compiled.
    twice = jax.jit(lambda x: 2 * x)
    assert jax.tree.map(lambda leaf: leaf, Closure(lambda x: twice(x))).function.__closure__[0].cell_contents is twice

    def later():
        return undefined

    again = jax.tree.map(lambda leaf: leaf, Closure(later))
    undefined = 5
    with pytest.raises(NameError):
        again()
    assert later() == undefined


def test_what_is_no_data_stays():
    """Masks and sizes that are known, dictionaries whose keys have no order."""
    mask, size = jnp.arange(12) < 5, jnp.asarray(3)
    mixed = {"x": 2.0, 1: "z"}

    def kernel(A, B=None):
        rows = jnp.zeros(int(size)).sum() + mixed["x"] * A[:, 0][mask[: len(A)]].sum()
        return rows * kernels.RBF(1.0)(A, A if B is None else B)

    k = Closure(kernel)
    assert_allclose(jax.jit(lambda k: k(X, X))(k), kernel(X, X), rtol=1e-12)


KEPT = {}


def test_an_array_that_is_not_found():
    def make(l):
        KEPT["base"] = kernels.RBF(l)
        return Closure(lambda A, B=None: KEPT["base"](A, B))

    k = jax.jit(make)(0.7)
    with pytest.raises(TypeError, match=r"uses an array of a JAX program that has ended.*close over the array itself"):
        k(X, X)
    with pytest.raises(
        TypeError, match="A kernel, a mean or a likelihood uses an array of a JAX program that has ended"
    ):
        init.greedy_variance(k, X, 2)


def test_objects_hold_what_they_are_copied_with():
    """Without traced arrays an object is itself. What it kept of an ended program is no array of it."""
    holder = Holder(kernels.RBF(jnp.asarray(0.7)))
    rebuilt = jax.tree.map(lambda leaf: leaf, Closure(holder))
    assert rebuilt.function is holder and not jax.tree.leaves(rebuilt)
    jax.jit(holder)(X)  # which leaves a tracer in `last`
    assert jax.tree.map(lambda leaf: leaf, Closure(holder)).function is holder

    class Kernel(kernels.Kernel):
        """An object among the leaves of a field."""

        parts: dict

        def matrix(self, A, B):
            return self.parts["k"](A, B)

        def diagonal(self, A):
            return self.parts["k"](A)

    many = jax.vmap(lambda l: Kernel({"k": Holder(kernels.RBF(l)), "size": l}))(jnp.asarray([0.5, 0.7]))
    assert_allclose(jax.vmap(lambda k: k(X, X))(many)[1], kernels.RBF(0.7)(X, X))


def likelihood_model(X, y=None):
    noise = numpyro.param("noise", 0.4)
    f = ogp.gp("f", plain(kernels.RBF(numpyro.param("l", 0.8))), Z)
    with numpyro.plate("d", len(X)):
        numpyro.sample("y", ogp.Likelihood(f(X), lambda f: dist.Normal(f, noise)), obs=y)


def test_everything_that_looks_at_a_fit():
    """`check`, `khat`, `to_arviz`, `Predictive`, `fit`, NUTS of a model whose kernel and likelihood are functions of parameters."""
    guide = ogp.AutoSparseGP(likelihood_model)
    svi = SVI(likelihood_model, guide, optax.adam(0.01), TraceMeanField_ELBO())
    params = ogp.fit(svi, jax.random.PRNGKey(0), (X, y), num_steps=5, progress_bar=False).params
    report = ogp.check(likelihood_model, guide, params, X, y, num_samples=30)
    assert report.functions["f"].sets[0].num == 4
    assert np.isfinite(ogp.khat(likelihood_model, guide, params, X, y, num_samples=30).ess)
    data = ogp.to_arviz(likelihood_model, guide, params, X, y, num_samples=30)
    assert data["log_likelihood"]["y"].shape == (1, 30, 12)
    draws = Predictive(likelihood_model, guide=guide, params=params, num_samples=3)(jax.random.PRNGKey(1), X)
    assert draws["y"].shape == (3, 12)
    mcmc = MCMC(
        NUTS(numpyro.handlers.substitute(likelihood_model, params)), num_warmup=5, num_samples=5, progress_bar=False
    )
    mcmc.run(jax.random.PRNGKey(0), X, y)
    assert np.isfinite(mcmc.get_samples()["f.u0"]).all()


@pytest.mark.parametrize(
    "kernel", [of_a_number, lambda base: jax.jit(of_a_number(base)), Holder], ids=["function", "jitted", "object"]
)
def test_check_of_a_kernel_that_closes_over_one_array(kernel):
    """The structure of a rebuilt function is that which it was built by, whatever is in the place of the array."""
    wrapped = partial(model, wrap=kernel)
    guide = ogp.AutoSparseGP(wrapped)
    assert ogp.check(wrapped, guide, PARAMS, X, y, num_samples=25).functions["f"].sets[0].num == 4
    if kernel is Holder:  # whose known arrays are no leaves
        return
    tree = jax.tree.structure(Closure(kernel(kernels.RBF(0.8))))
    for leaf in (1, None, "x", jax.ShapeDtypeStruct((), float), object()):
        leaves = [leaf] * tree.num_leaves
        assert jax.tree.structure(jax.tree.unflatten(tree, leaves), is_leaf=lambda at: at is None) == tree


def test_a_module_with_functions_among_its_leaves():
    """An equinox module is a pytree, but some of its leaves are no arrays: an activation, or a name."""

    @jax.tree_util.register_dataclass
    @dataclass
    class Module:
        l: jax.Array
        activation: Callable
        name: str

        def __call__(self, A, B=None):
            return plain(kernels.RBF(self.l))(self.activation(A), None if B is None else self.activation(B))

    wrapped = partial(model, wrap=lambda base: Module(base(X[:1])[0], jnp.tanh, "RBF"))
    f = jax.jit(lambda p: ogp.posterior(wrapped, ogp.AutoSparseGP(wrapped), p, X, y)["f"])(PARAMS)
    expected = partial(
        model,
        wrap=lambda base: (
            lambda A, B=None: plain(kernels.RBF(base(X[:1])[0]))(jnp.tanh(A), None if B is None else jnp.tanh(B))
        ),
    )
    assert_allclose(f(X).mean, ogp.posterior(expected, ogp.AutoSparseGP(expected), PARAMS, X, y)["f"](X).mean)


@pytest.mark.parametrize(
    "kernel, error, match",
    [
        (lambda A, B=None: kernels.RBF(0.8)(A, A if B is None else B), ValueError, r"got \(4, 4\) for n = 4"),
        (
            lambda A, B: kernels.RBF(0.8)(A, B),
            TypeError,
            r"`kernel\(X\)`, of one matrix .*missing 1 required positional",
        ),
        (lambda A, B=None: jnp.ones((len(A), 1)) if B is None else kernels.RBF(0.8)(A, B), ValueError, "for n = 4"),
        (lambda A, B=None: jnp.ones(len(A)) if B is None else 2.0 * kernels.RBF(0.8)(A, B), ValueError, "got 1 for 2"),
    ],
    ids=["matrix", "two inputs only", "column", "factor"],
)
@pytest.mark.parametrize("num_latents", [None, 4])
def test_variances_that_are_none(kernel, error, match, num_latents):
    """Other libraries take k(X) for k(X, X). With as many functions as rows it would be the variances of each."""
    with numpyro.handlers.seed(rng_seed=0), pytest.raises(error, match=match):
        ogp.gp("f", kernel, Z, num_latents=num_latents)


class Rates(kernels.Kernel):
    """Rates for each function, without axes that broadcast."""

    rate: jax.Array

    def matrix(self, X1, X2):
        return self.rate * kernels.RBF(0.8)(X1, X2)

    def diagonal(self, X):
        return self.rate * jnp.ones(X.shape[:-1])


class RatesWithAxes(Rates):
    def matrix(self, X1, X2):
        return kernels.per_latent("rate", self.rate, X1) * kernels.RBF(0.8)(X1, X2)

    def diagonal(self, X):
        return kernels.per_latent("rate", self.rate, X, axes=1) * jnp.ones(X.shape[:-1])


def step(A, B=None):
    return jnp.ones(len(A)) if B is None else jnp.where(jnp.abs(A - B.T) < 1.0, 1.0, 0.0)


@pytest.mark.parametrize(
    "kernel, match",
    [
        (step, "without negative eigenvalues; got -0.618 beside variances of 1"),
        (
            2.0 * Rates(jnp.arange(1.0, 5.0)),
            r"must be symmetric; got .* for the inducing variables .*kernels.per_latent",
        ),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32])
def test_kernels_that_are_no_covariances_are_refused(kernel, match, dtype):
    """The first made every prediction NaN; the second, as many rates as inducing points, wrong numbers in silence."""
    points = jnp.linspace(0.0, 2.0, 4, dtype=dtype)[:, None]
    with numpyro.handlers.seed(rng_seed=0), pytest.raises(ValueError, match=match):
        ogp.gp("f", kernel, points)
    with pytest.raises(ValueError, match=match):
        ogp.CollapsedGP(kernel, points, points, 0.1).log_prob(points[:, 0])


def test_rates_with_axes_are_those_of_each_function():
    with numpyro.handlers.seed(rng_seed=0):
        both = ogp.gp("f", RatesWithAxes(jnp.array([0.5, 2.0])), Z)(X)
    with numpyro.handlers.seed(rng_seed=0):
        second = ogp.gp("f", 2.0 * kernels.RBF(0.8), Z)(X)
    assert both.shape == (12, 2)
    assert_allclose(both.residual_variance[:, 1], second.residual_variance, rtol=1e-8)


def test_variances_may_be_one_number():
    """`check`, `online.condition`, `with_neighbors` and `init.greedy_variance` ended in AttributeErrors."""

    def of_one_number(A, B=None):
        return 1.0 if B is None else kernels.RBF(0.8)(A, B)

    f, expected = (ogp.CollapsedGP(k, X, Z, 0.1).posterior(y) for k in (of_one_number, kernels.RBF(0.8)))
    assert f.kernel(X).shape == (len(X),) and f.kernel(X).dtype == X.dtype
    assert_allclose((of_one_number + kernels.RBF(0.3))(X), 2.0)
    assert_allclose(*(init.greedy_variance(kernel, X, 3) for kernel in (of_one_number, kernels.RBF(0.8))))
    both = [ogp.online.condition(g, X[:2] + 0.05, y[:2], 0.1)(X).variance for g in (f, expected)]
    assert_allclose(*both, rtol=1e-4, atol=1e-6)


def test_variances_may_have_white_noise():
    with numpyro.handlers.seed(rng_seed=0):
        f = ogp.gp("f", lambda A, B=None: 1.5 if B is None else kernels.RBF(0.8)(A, B), Z)
    assert_allclose(f(Z).residual_variance, 0.5, atol=1e-5)


@pytest.mark.parametrize(
    "inside, what",
    [
        (lambda f, values: numpyro.sample("a", dist.Normal(0.0, 1.0)), "declares `a`"),
        (lambda f, values: numpyro.deterministic("b", values), "declares `b`"),
        (lambda f, values: numpyro.param("c", 0.1), "declares `c`"),  # the loss would keep its starting value
        (lambda f, values: f(X).sample(), "asks for a random key"),
    ],
)
def test_sites_and_draws_within_a_function_are_refused(inside, what):
    """It runs any number of times, in loops of JAX: keys and values leaked from there."""

    def likely(X, y):
        f = ogp.gp("f", kernels.RBF(0.8), Z)
        with numpyro.plate("d", len(X)):
            numpyro.sample("y", ogp.Likelihood(f(X), lambda v: dist.Normal(v + inside(f, v), 0.3)), obs=y)

    with pytest.raises(ValueError, match=f"{what}. It is called any number of times"):
        SVI(likely, ogp.AutoSparseGP(likely), optax.adam(0.01), TraceMeanField_ELBO()).run(KEY, 2, X, y)


class Declares(kernels.Kernel):
    """Declares its lengthscale where it is called."""

    def matrix(self, X1, X2):
        return kernels.RBF(numpyro.sample("a", dist.LogNormal(0.0, 1.0)))(X1, X2)

    def diagonal(self, X):
        return jnp.ones(X.shape[:-1])


class DeclaresParam(Declares):
    def matrix(self, X1, X2):
        return kernels.RBF(numpyro.param("a", 1.0))(X1, X2)


class DeclaringFeature:
    num, dtype = 3, jnp.dtype("float64")

    def covariance(self, kernel, other):
        return numpyro.sample("a", dist.LogNormal(0.0, 1.0)) * jnp.eye(3)

    def covariance_with_inputs(self, kernel, X):
        return jnp.zeros((3, len(X)))


class DeclaringLikelihood(likelihoods.ExpectedLikelihood):
    def conditional(self, f):
        return dist.Normal(f, numpyro.sample("a", dist.LogNormal(0.0, 1.0)))


@pytest.mark.parametrize(
    "kernel, inducing, likely, who",
    [
        (
            lambda A, B=None: kernels.RBF(numpyro.param("a", 1.0))(*(A,) if B is None else (A, B)),
            Z,
            likelihoods.Exponential,
            "<lambda>",
        ),
        (Declares(), Z, likelihoods.Exponential, "Declares"),
        (DeclaresParam(), Z, likelihoods.Exponential, "DeclaresParam"),
        (kernels.RBF(0.8), DeclaringFeature(), likelihoods.Exponential, "DeclaringFeature"),
        (kernels.RBF(0.8), Z, DeclaringLikelihood, "DeclaringLikelihood"),
    ],
)
def test_sites_within_kernels_features_and_likelihoods_are_refused(kernel, inducing, likely, who):
    """Sites leaked as tracers. Parameters had their starting values in `posterior`, which predicted something else than the fit."""

    def model(X, y):
        f = ogp.gp("f", kernel, inducing)
        with numpyro.plate("d", len(X)):
            numpyro.sample("y", likely(f(X)), obs=y)

    with pytest.raises(ValueError, match=f"(?s){who}.* declares `a`. It is called any number of times, also outside"):
        SVI(model, ogp.AutoSparseGP(model), optax.adam(0.01), TraceMeanField_ELBO()).run(KEY, 2, X, y**2)


def test_mean_functions_of_a_deep_gp():
    def build(slope):
        with numpyro.handlers.seed(rng_seed=0):
            f = ogp.gp("f", kernels.RBF(1.0), Z)
            g = ogp.gp("g", kernels.RBF(1.0), Z)
        return ogp.DeepGP([f, g], means=[lambda X: slope * X])

    deep = jax.jit(build)(jnp.asarray(2.0))
    assert_allclose(deep.means[0](X), 2.0 * X)
    key = jax.random.PRNGKey(0)
    assert_allclose(
        jax.jit(lambda d: d(X, rng_key=key).mean)(deep), build(jnp.asarray(2.0))(X, rng_key=key).mean, rtol=1e-9
    )
