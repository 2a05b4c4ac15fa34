"""A likelihood that takes marginals of f and, beside them, what is computed from draws of the same f."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import lax
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods

Z = jnp.linspace(0.0, 5.0, 5)[:, None]
X = jnp.linspace(0.1, 4.9, 6)[:, None]
BASE = jnp.array([[2.5]])
y = jnp.sin(X[:, 0]) + 0.3
KEY = jax.random.PRNGKey(0)

normal = likelihoods.Gaussian


def scanned(values):
    return lax.scan(lambda sums, v: ((sums[0] + v[0], sums[1] + v[1]), sums), (0.0, 0.0), values)[1]


def delayed(values):
    """A loop that closes over two arrays. A step adds to a carry what another was before, so two steps tell what reaches it."""
    weight, shift = jnp.full(len(X), 0.5), jnp.full(len(X), 0.2)
    start = (jnp.zeros(len(X)), jnp.zeros(len(X)))
    return lax.scan(lambda c, v: ((c[0] + c[1], weight * v + shift), None), start, jnp.stack([values, values]))[0][0]


OWN = {
    "one entry of a draw": lambda f, g: normal(f(X) - f(BASE).sample()[0], 0.3),
    "a function of a draw": lambda f, g: normal(f(X), jnp.exp(f(X).sample())),
    "a truth of a draw": lambda f, g: normal(f(X) + jnp.where(f(BASE).sample() > 0, 1.0, 0.0), 0.3),
    "a draw row by row": lambda f, g: normal(f(X), jnp.exp(f(X).independent().sample())),
    "values at nodes": lambda f, g: normal(f(X), jnp.exp(f(X).at(jax.random.normal(KEY, (1, 6)))[0])),
    "inputs drawn row by row": lambda f, g: normal(f(f(X).independent().sample()[:, None]), 0.3),
    "a path": lambda f, g: normal(f(X) - f.sample_paths(numpyro.prng_key(), 1)(BASE)[0], 0.3),
    "a joint draw": lambda f, g: normal(f(X) - f.joint(BASE).sample(numpyro.prng_key())[0], 0.3),
    "moments given the run": lambda f, g: normal(f(X) - f.joint(BASE).mean, 0.3),
    "drawn inputs": lambda f, g: normal(f(f(X).sample()[:, None]), 0.3),
    "one of a stack": lambda f, g: likelihoods.HeteroskedasticGaussian(ogp.stack([f(X), g(X) + 2 * f(X).sample()])),
    "a call of jit": lambda f, g: normal(f(X) - jax.jit(lambda v: 2 * v)(f(BASE).sample())[0], 0.3),
    "a call of vmap": lambda f, g: normal(f(X) - jax.vmap(lambda x: f(x[None]).sample()[0])(X), 0.3),
    "one carry of a loop": lambda f, g: normal(f(X) - scanned((f(X).sample(), g(X).sample()))[0], 0.3),
    "a carry through another one": lambda f, g: normal(f(X) - delayed(f(X).sample()), 0.3),
    "a difference that is observed": lambda f, g: normal(f(X), 0.3),
    "marginals out of jit": lambda f, g: normal(jax.jit(lambda: f(X))(), jnp.exp(f(X).sample())),
    "marginals that draw row by row": lambda f, g: normal(f(X).independent(), jnp.exp(f(X).sample())),
    "marginals that draw row by row, and rows": lambda f, g: normal(f(X).independent(), jnp.exp(rows(f, X))),
    "marginals made by hand": lambda f, g: normal(twice(f(X)), jnp.exp(f(X).sample())),
    "marginals of a tree": lambda f, g: normal(jax.tree.map(jnp.negative, f(X)), jnp.exp(f(X).sample())),
}
OTHER = {
    "marginals of another, out of jit": lambda f, g: normal(jax.jit(lambda: f(X))(), jnp.exp(g(X).sample())),
    "marginals of another, made by hand": lambda f, g: normal(twice(g(X)), jnp.exp(f(X).sample())),
    "marginals alone": lambda f, g: normal(f(X), 0.3),
    "draws alone": lambda f, g: dist.Normal(f(X).sample() - f(BASE).sample()[0], 0.3),
    "a draw of another": lambda f, g: normal(f(X) - g(BASE).sample()[0], 0.3),
    "inputs drawn by another, row by row": lambda f, g: normal(g(f(X).independent().sample()[:, None]), 0.3),
    "one draw row by row": lambda f, g: (lambda v: dist.Normal(v, jnp.exp(v)))(f(X).independent().sample()),
    "inputs drawn by another": lambda f, g: normal(g(f(X).sample()[:, None]), 0.3),
    "another result of one call": lambda f, g: normal(
        f(X) - jax.jit(lambda a, b: (2 * a, 2 * b))(f(BASE).sample(), g(BASE).sample())[1][0], 0.3
    ),
    "another carry of one loop": lambda f, g: normal(f(X) - scanned((f(X).sample(), g(X).sample()))[1], 0.3),
}


TWICE = {
    "two draws": lambda f, g: dist.Normal(rows(f, X) * rows(f, X), 0.3),
    "at other inputs": lambda f, g: dist.Normal(rows(f, X), jnp.exp(rows(f, X + 0.1))),
    "inputs of its own": lambda f, g: dist.Normal(rows(f, rows(f, X)[:, None]), 0.3),
    "beside a joint draw": lambda f, g: dist.Normal(rows(f, X) - f(BASE).sample()[0], 0.3),
    "another shape": lambda f, g: dist.Normal(rows(f, X), 0.3 + jnp.abs((2.0 * f(X)).independent().draw(KEY))),
    "through marginals of another": lambda f, g: normal(g(rows(f, X)[:, None]) + rows(f, X), 0.3),
    "one output of two": lambda f, g: (lambda h: dist.Normal(rows(h[..., 0]) * rows(h)[:, 0], 0.3))(two()),
}
A = jnp.kron(jnp.eye(3), jnp.full((1, 2), 0.5))
SEVERAL = {
    "a matrix": lambda f, g: dist.Normal(jnp.repeat(A @ rows(f, X), 2), 0.3),
    "bins": lambda f, g: dist.Normal(jnp.repeat(rows(f, X).reshape(3, 2).mean(1), 2), 0.3),
    "a running sum": lambda f, g: dist.Normal(jnp.cumsum(rows(f, X)), 0.3),
    "a deviation from the mean": lambda f, g: (lambda v: dist.Normal(v - v.mean(), 0.3))(rows(f, X)),
    "order": lambda f, g: dist.Normal(jnp.sort(rows(f, X)), 0.3),
    "sums of groups": lambda f, g: dist.Normal(jax.ops.segment_sum(rows(f, X), jnp.arange(6) // 2, 6), 0.3),
    "inputs of another": lambda f, g: normal(g(jnp.cumsum(rows(f, X))[:, None]), 0.3),
    "several samples": lambda f, g: dist.Normal(f(X).independent().sample(None, (3,)).mean(0), 0.3),
    "values at nodes": lambda f, g: dist.Normal(jnp.repeat(A @ f(X).at(jax.random.normal(KEY, (1, 6)))[0], 2), 0.3),
    "outputs mixed": lambda f, g: dist.Normal((two() @ jnp.ones((2, 1))).independent().sample()[::-1].cumsum(), 0.3),
    "the prior of a latent site": lambda f, g: dist.Normal(
        numpyro.sample("z", dist.Normal(rows(f, X).mean(), 1.0)), 0.3 * jnp.ones(6)
    ),
}
ONCE = {
    "rows joined": lambda f, g: dist.Normal(jnp.concatenate([rows(f, X[:3]), rows(f, X[3:])]), 0.3),
    "rows joined to those of a joint draw": lambda f, g: dist.Normal(
        jnp.concatenate([rows(f, X[:3]), f(X[3:]).sample()]), 0.3
    ),
    "values at nodes": lambda f, g: dist.Normal(f(X).at(jax.random.normal(KEY, (1, 6)))[0], 0.3),
    "an average over nodes": lambda f, g: dist.Normal(jax.nn.sigmoid(f(X).at(jnp.ones((3, 1)))).mean(0), 0.3),
    "another order": lambda f, g: dist.Normal(rows(f, X)[jnp.array([3, 2, 1, 0, 5, 4])], 0.3),
    "one row for several y": lambda f, g: dist.Normal(rows(f, X)[jnp.arange(6) // 2], 0.3),
    "rows of one output by another's": lambda f, g: (lambda v: dist.Normal(v[:, 0] * v[:, 1], 0.3))(rows(two())),
    "a joint draw at inputs drawn row by row": lambda f, g: dist.Normal(g(rows(f, X)[:, None]).sample(), 0.3),
    "one draw, used twice": lambda f, g: (lambda v: dist.Normal(v, jnp.exp(v)))(rows(f, X)),
    "of two functions": lambda f, g: dist.Normal(rows(f, X) * rows(g, X), 0.3),
    "of two outputs": lambda f, g: (lambda h: dist.Normal(rows(h[..., 0]), jnp.exp(h.independent()[..., 1].sample())))(
        two()
    ),
    "a latent site": lambda f, g: normal(f(X) + numpyro.sample("z", dist.Normal(f(BASE).sample()[0], 1.0)), 0.3),
    "layers": lambda f, g: dist.Normal(rows(g, rows(f, X)[:, None]), 0.3),
    "a loop of one draw": lambda f, g: dist.Normal(jax.vmap(lambda x: rows(f, x[None])[0])(X), 0.3),
    "marginals of one output, a draw of another": lambda f, g: (lambda h: normal(h[..., 0], jnp.exp(h.sample()[:, 1])))(
        two()
    ),
    "a column of marginals, one of draws": lambda f, g: (lambda h: normal(h[..., 0], jnp.exp(h[..., 1].sample())))(
        two()
    ),
    "the same, row by row": lambda f, g: (lambda h: normal(h[..., 0] + 1, jnp.exp(rows(h[..., 1]))))(two()),
    "marginals that draw row by row": lambda f, g: (
        lambda h: normal(h[..., 0].independent(), jnp.exp(h[..., 1].sample()))
    )(two()),
    "one of a stack beside the other": lambda f, g: normal(ogp.stack([f(X), g(X)])[..., 0], jnp.exp(g(X).sample())),
}


def twice(m):
    return ogp.Marginals(2 * m.mean, 4 * m.explained, 4 * m.residual)


def rows(f, *X):
    return (f(*X) if X else f).independent().sample()


def two():
    return ogp.gp("h", kernels.RBF(1.0), Z, num_latents=2)(X)


def model(make, y=y):
    f, g = (ogp.gp(name, kernels.RBF(1.0), Z) for name in "fg")
    if make is OWN["a difference that is observed"]:
        y = y - f(BASE).sample()[0]
    likelihood = make(f, g)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihood, obs=y)


def in_factor(of):
    """A program without a site of y."""
    f = ogp.gp("f", kernels.RBF(1.0), Z)
    numpyro.factor("y", of(f))


def density(values):
    return dist.Normal(values, 0.3).log_prob(y).sum()


def expected(m, scale):
    """The log density of a likelihood, in a factor."""
    return normal(m, scale).log_prob(y).sum()


JOINTLY = {
    "a scale": lambda f: expected(f(X), jnp.exp(f(X).sample())),
    "a scale, row by row": lambda f: expected(f(X), jnp.exp(rows(f, X))),
    "row by row in a loop": lambda f: jax.vmap(lambda x, v, y: normal(f(x[None]), jnp.exp(v)).log_prob(y[None])[0])(
        X, f(X).sample(), y
    ).sum(),
    "a weight": lambda f: jnp.exp(f(BASE).sample()[0]) * expected(f(X), 0.3),
    "a mixture": lambda f: jnp.logaddexp(expected(f(X), 0.3), density(f(X).sample())),
    "the same output": lambda f: (lambda h: expected(h[..., 0], jnp.exp(h[..., 0].sample())))(two()),
}
APART = {
    "two likelihoods": lambda f: expected(f(X), 0.3) + expected(2 * f(X), 0.5),
    "a likelihood and a density of a draw": lambda f: expected(f(X), 0.3) + density(f(X).sample().mean()),
    "the same, row by row": lambda f: expected(f(X), 0.3) + density(rows(f, X)),
    "a mixture": lambda f: jnp.logaddexp(expected(f(X), 0.3), expected(f(X), 0.9)),
    "of another output": lambda f: (lambda h: expected(h[..., 0], jnp.exp(h[..., 1].sample())))(two()),
}


@pytest.mark.parametrize("of", JOINTLY.values(), ids=JOINTLY)
def test_densities_of_likelihoods_in_a_factor_that_need_draws_of_their_function(of):
    with pytest.raises(ValueError, match=r"`y` takes f\(X\) of `[fh]` and, beside it, what is computed from a draw"):
        numpyro.handlers.seed(ogp.AutoSparseGP(partial(in_factor, of)), 0)()


@pytest.mark.parametrize("of", APART.values(), ids=APART)
def test_densities_of_likelihoods_in_a_factor_beside_draws(of):
    assert "f.u0" in numpyro.handlers.seed(ogp.AutoSparseGP(partial(in_factor, of)), 0)()


def by_hand(make, analytic=True):
    for name in "fg":
        ogp.gp_posterior(name, 5, analytic=analytic)


def elbos(model, guide, num=4000):
    """Draws of the bound at the start of the guide, where q is the prior."""
    loss = jax.jit(jax.vmap(lambda key: -TraceMeanField_ELBO().loss(key, {}, model, guide)))
    return np.asarray(loss(jax.random.split(KEY, num)))


@pytest.mark.parametrize("make", OWN.values(), ids=OWN)
def test_refused(make):
    guide = ogp.AutoSparseGP(partial(model, make))
    with pytest.raises(
        ValueError, match=r"`y` takes f\(X\) of `f` and, beside it, what is computed from a draw of the same"
    ):
        numpyro.handlers.seed(guide, 0)()


@pytest.mark.parametrize("make", OTHER.values(), ids=OTHER)
def test_allowed(make):
    assert set(numpyro.handlers.seed(ogp.AutoSparseGP(partial(model, make)), 0)()) == {"f.u0", "g.u0"}


OF_TWO = r"`y` takes (several draws of `[fh]`.*v = f\(X\)\.independent\(\)|f\(X\) of `f` and, beside it)"
OUTPUTS = {
    "the same output": lambda h: normal(h[..., 0], jnp.exp(h.sample()[:, 0])),
    "a truth of the same output": lambda h: normal(h[..., 0], 1.0 + (h[..., 0].sample() > 0)),
    "the same output, row by row": lambda h: normal(h[..., 0], jnp.exp(rows(h[..., 0]))),
    "all outputs, row by row": lambda h: normal(h[..., 0], jnp.exp(rows(h)[:, 1])),
    "outputs that are mixed": lambda h: normal((h @ jnp.ones((2, 1)))[..., 0], jnp.exp(h.sample()[:, 1])),
}


@pytest.mark.parametrize("make", OUTPUTS.values(), ids=OUTPUTS)
def test_marginals_of_an_output_beside_draws_of_it(make):
    with pytest.raises(ValueError, match=r"`y` takes f\(X\) of `h` and, beside it"):
        numpyro.handlers.seed(ogp.AutoSparseGP(partial(model, lambda f, g: make(two()))), 0)()


OF_ROWS = (
    r"`[yz]` takes several rows of one draw of `[fh]` row by row.*Leave \.independent\(\) out: rows of f\(X\)\.sample"
)


@pytest.mark.parametrize("options", [{}, {"analytic": False}])
@pytest.mark.parametrize(
    ("make", "match"),
    [(make, OF_TWO) for make in TWICE.values()] + [(make, OF_ROWS) for make in SEVERAL.values()],
    ids=[*TWICE, *SEVERAL],
)
def test_draws_row_by_row_that_y_needs_jointly_are_refused(make, match, options):
    """Two draws are of two functions: a product had an ELBO of -10.9 where that of one function is -16.6. And rows of one draw
    are independent, which values of one function are not: averages over bins had -10.2 for -12.1."""
    guide = ogp.AutoSparseGP(partial(model, make), **options)
    with pytest.raises(ValueError, match=match):
        numpyro.handlers.seed(guide, 0)()


@pytest.mark.parametrize("make", ONCE.values(), ids=ONCE)
def test_other_draws_row_by_row_are_not(make):
    guide = ogp.AutoSparseGP(partial(model, make))
    assert {"f.u0", "g.u0"} <= set(numpyro.handlers.seed(guide, 0)())


@pytest.mark.parametrize("make", [SEVERAL["bins"], ONCE["rows joined"]])
def test_rows_of_float32(make):
    def program():
        f = ogp.gp("f", kernels.RBF(jnp.float32(1.0)), Z.astype(jnp.float32))
        at = lambda x: f(x.astype(jnp.float32))  # noqa: E731
        numpyro.sample("y", make(at, at).to_event(1), obs=y.astype(jnp.float32))

    guide = numpyro.handlers.seed(ogp.AutoSparseGP(program), 0)
    if make is ONCE["rows joined"]:
        assert set(guide()) == {"f.u0"}
    else:
        with pytest.raises(ValueError, match="`y` takes several rows of one draw of `f`"):
            guide()


def test_a_factor_may_be_a_sum_of_terms_of_one_draw_each():
    """Only what needs two of them jointly is no bound."""
    sums = ogp.AutoSparseGP(partial(in_factor, lambda f: density(rows(f, X)) + density(rows(f, X))))
    assert set(numpyro.handlers.seed(sums, 0)()) == {"f.u0"}
    for of, words in (
        (lambda f: density(rows(f, X) * rows(f, X)), "several draws of `f`"),
        (lambda f: density(rows(f, X).mean()), "several rows of one draw of `f`"),
    ):
        with pytest.raises(ValueError, match=f"`y` takes {words}"):
            numpyro.handlers.seed(ogp.AutoSparseGP(partial(in_factor, of)), 0)()


@pytest.mark.parametrize(
    "make", [TWICE["two draws"], SEVERAL["bins"], SEVERAL["a running sum"], OUTPUTS["the same output"]]
)
def test_within_jit_random_numbers_stand_for_the_data(make):
    """Rows of one draw were not compared there, and fitted without a word."""

    def run(y):
        make_of = make if make not in OUTPUTS.values() else lambda f, g: make(two())
        return numpyro.handlers.seed(ogp.AutoSparseGP(partial(model, make_of, y)), 0)()

    with pytest.raises(ValueError, match="`y` takes "):
        jax.jit(run)(y)


@pytest.mark.parametrize(
    "make", [ONCE["rows joined"], ONCE["one draw, used twice"], ONCE["a column of marginals, one of draws"]]
)
def test_within_jit_what_is_right_is_allowed(make):
    def run(y):
        return numpyro.handlers.seed(ogp.AutoSparseGP(partial(model, make, y)), 0)()

    assert {"f.u0", "g.u0"} <= set(jax.jit(run)(y))


def test_within_jit_integers_may_be_indices():
    """Nothing stands for them. So rows that are joined count as two draws, and rows of one draw are not compared."""

    def run(make, order):
        return numpyro.handlers.seed(ogp.AutoSparseGP(partial(model, lambda f, g: make(f, order))), 0)()

    def joined(f, order):
        return dist.Normal(jnp.concatenate([rows(f, X[:3]), rows(f, X[3:])])[order], 0.3)

    order = jnp.arange(6)
    with pytest.raises(ValueError, match="`y` takes several draws of `f`"):
        jax.jit(partial(run, joined))(order)
    assert {"f.u0", "g.u0"} == set(run(joined, order))
    assert {"f.u0", "g.u0"} == set(jax.jit(partial(run, lambda f, order: dist.Normal(rows(f, X)[order], 0.3)))(order))


@pytest.mark.parametrize("make", [OWN["one entry of a draw"], OWN["a draw row by row"]])
def test_marginals_given_the_inducing_variables_are_not_of_the_draw_either(make):
    """With analytic=False: they integrate over a residual that is independent of the draw's. -21.5 instead of -18.5."""
    with pytest.raises(ValueError, match=r"`y` takes f\(X\) of `f` and, beside it"):
        numpyro.handlers.seed(ogp.AutoSparseGP(partial(model, make), analytic=False), 0)()


def test_why_and_what_to_do_instead():
    """Twice the same model: by draws the loss is the expectation over q(f), and with the refused likelihood it is another."""
    wrong = partial(model, OWN["one entry of a draw"])
    right = partial(model, OTHER["draws alone"])
    by_average = partial(
        model,
        lambda f, g: normal(
            f(ogp.Average(jnp.stack([X, jnp.broadcast_to(BASE, X.shape)], 1), jnp.array([1.0, -1.0]))), 0.3
        ),
    )
    both = np.asarray(jnp.concatenate([X, BASE])[:, 0])
    K = np.exp(-((both[:, None] - both) ** 2) / 2)  # q is the prior, so f has its covariance
    variance = 1 + 1 - 2 * K[:-1, -1]
    expected = np.sum(-0.5 * (np.asarray(y) ** 2 + variance) / 0.09 - np.log(0.3 * np.sqrt(2 * np.pi)))
    guide = partial(by_hand, None)
    assert abs(elbos(by_average, lambda: guide(), 1)[0] - expected) < 1e-4 * abs(expected)
    for program, is_right in ((right, True), (wrong, False)):
        draws = elbos(program, lambda: guide())
        error = abs(draws.mean() - expected) / (draws.std() / np.sqrt(len(draws)))
        assert (error < 4.5) == is_right


@pytest.mark.parametrize("make", [TWICE["two draws"], SEVERAL["bins"], OWN["a function of a draw"]])
def test_check_says_so_of_guides_of_numpyro(make):
    program = partial(model, make)
    guide = AutoNormal(program)
    svi = SVI(program, guide, optax.adam(0.01), TraceMeanField_ELBO())
    report = ogp.check(program, guide, svi.get_params(svi.init(KEY)), num_samples=25)
    assert [found[:2] for found in report.own_draws] == [("y", "f")]
    assert "y takes" in str(report)


def test_check_says_so_of_guides_by_hand():
    def page(make, **options):
        program, guide = partial(model, make), partial(by_hand, make, **options)
        params = {f"{n}.u0_{p}": v for n in "fg" for p, v in (("loc", jnp.zeros(5)), ("scale_tril", jnp.eye(5)))}
        return ogp.check(program, guide, params, num_samples=25)

    report = page(OWN["a function of a draw"])
    assert [found[:2] for found in report.own_draws] == [("y", "f")]
    assert "y takes f(X) of f and, beside it, what is computed from a draw" in " ".join(str(report).split())
    assert page(OTHER["a draw of another"]).own_draws == ()
    # There likelihoods integrate over the residual alone, but as if it were independent of that of the draw.
    assert [found[:2] for found in page(OWN["a function of a draw"], analytic=False).own_draws] == [("y", "f")]


def test_models_that_need_values_are_not_looked_at_again():
    def concrete():
        f = ogp.gp("f", kernels.RBF(1.0), Z)
        if float(f(BASE).sample()[0]) < 1e9:
            numpyro.sample("y", normal(f(X), jnp.exp(f(BASE).sample())), obs=y)

    assert set(numpyro.handlers.seed(ogp.AutoSparseGP(concrete), 0)()) == {"f.u0"}
