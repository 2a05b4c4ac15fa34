"""Rooms: who may import whom; the public names; and what the library must never do."""

from __future__ import annotations

import ast
import functools
import itertools
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpyro
import optax
import pytest
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp
import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from tests import problems

PACKAGE = Path(numpyro_orthgp.__file__).parent

# From top to bottom: a room imports only from rooms above it (and from itself, if it is a folder).
ROOMS = [
    "types", "closures", "processes", "foreign", "errors", "math", "kernels", "inducing", "gaussians", "functions", "likelihoods",
    "collapsed", "primitives", "guides", "online", "training", "init", "diagnostics", "plots", "tabular", "sklearn", "__init__",
]  # fmt: skip

# What arrays-in-arrays-out rooms must not know.
FORBIDDEN = {"math": ("numpyro",), "kernels": ("numpyro",), "inducing": ("numpyro",), "init": ("numpyro",)}


def modules():
    return [(path.relative_to(PACKAGE).parts[0].removesuffix(".py"), path) for path in sorted(PACKAGE.rglob("*.py"))]


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text())


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_imports_point_upward_only():
    for room, path in modules():
        for name in imported(tree_of(path)):
            parts = name.split(".")
            if parts[0] != "numpyro_orthgp" or len(parts) < 2:
                assert parts[0] not in FORBIDDEN.get(room, ()), f"{path.name} imports {name}"
                continue
            assert ROOMS.index(parts[1]) < ROOMS.index(room) or parts[1] == room, f"{room} ({path.name}) imports {name}"


def test_the_docstring_of_the_package_is_its_map():
    """Every room is named there, in the order of the imports."""
    table = numpyro_orthgp.__doc__.partition("in reading order")[2].split("\n\n")[1]
    named = [room.strip() for line in table.splitlines() for room in line.strip().partition("   ")[0].split(",")]
    assert named == ROOMS[:-1]
    assert {room for room, _ in modules()} == set(ROOMS)


def test_no_import_of_our_own_inside_functions():
    for _, path in modules():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef):
                assert not any(name.startswith("numpyro_orthgp") for name in imported(node)), (
                    f"{path.name}: {node.name}"
                )


def test_global_settings_are_left_alone():
    for _, path in modules():
        text = path.read_text()
        text = text.replace('os.environ.get("XLA_FLAGS", "")', "")  # which is read, not set
        assert "config.update" not in text and "environ" not in text, path.name


def test_tests_that_are_left_to_make_slow_exist():
    """Those of `tests/long.txt`; renewed by `python -m tests.long`."""
    folder = Path(__file__).parent
    for file, tests in itertools.groupby(
        (folder / "long.txt").read_text().splitlines(), lambda n: n.partition("::")[0]
    ):
        text = (folder / file).read_text()
        for name in tests:
            assert f"def {name.partition('::')[2].partition('[')[0]}(" in text, name


def test_what_is_slow_to_import_waits_until_it_is_used():
    """A second of every process's start; `import scipy` imports its parts when they are asked for."""
    slow = ("scipy.stats", "scipy.optimize", "matplotlib", "arviz", "pandas", "sklearn", "h5py", "zarr", "pyarrow")
    code = f"import sys, numpyro_orthgp; print([name for name in {slow} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    assert run.stdout.strip() == "[]"


def test_jitter_has_one_home():
    for room, path in modules():
        literals = {n.value for n in ast.walk(tree_of(path)) if isinstance(n, ast.Constant)}
        if path.name != "linalg.py":
            assert not {1e-4, 1e-5, 1e-6, 1e-8, 1e-10} & literals, f"a jitter-like literal in {room}/{path.name}"


def test_files_and_functions_stay_small():
    for _, path in modules():
        text = path.read_text()
        assert text.count("\n") <= 350, f"{path.name} has more than 350 lines"
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef):
                body = (
                    node.end_lineno - node.body[ast.get_docstring(node) is not None and len(node.body) > 1].lineno + 1
                )
                assert body <= 45, f"{path.name}: {node.name} has {body} lines"


# Between f(X) and the bound: what they call, and can be taken for granted. `runs` and `sites` are for draws.
TAKEN_FOR_GRANTED = (
    "math/", "kernels/", "inducing/", "errors.py", "foreign.py", "types.py", "closures.py", "processes.py", "likelihoods/checks.py",
    "likelihoods/integrators.py", "likelihoods/prompted.py", "likelihoods/special.py", "functions/arithmetic.py",
    "functions/keys.py", "functions/runs.py", "functions/sites.py", "functions/callers.py",
)  # fmt: skip


@pytest.mark.parametrize("num_inducing", [5, 40], ids=["few points", "many points"])
@pytest.mark.parametrize("likelihood, file", [("Gaussian", "gaussian.py"), ("StudentT", "continuous.py")])
def test_from_f_of_X_to_the_bound_in_six_files(num_inducing, likelihood, file):
    """As docs/design.md walks it."""
    X, entered = jnp.linspace(0.0, 1.0, 50)[:, None], set()

    def note(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            entered.add(path.relative_to(PACKAGE).as_posix())

    def model(y):
        f = ogp.gp("f", kernels.RBF(0.3), [X[:num_inducing], X[3::10]])
        arguments = (4.0, 0.1) if likelihood == "StudentT" else (0.1,)
        with numpyro.plate("data", len(X)):
            jax.clear_caches()  # or compiled parts would not be entered
            before = sys.getprofile()
            sys.setprofile(note)
            fn = getattr(likelihoods, likelihood)(f(X), *arguments)
            fn.log_prob(y)
            sys.setprofile(before)
            numpyro.sample("y", fn, obs=y)

    svi = SVI(model, ogp.AutoSparseGP(model, residual="tight"), optax.adam(0.1), TraceMeanField_ELBO())
    jax.eval_shape(lambda y: svi.init(jax.random.PRNGKey(0), y), jnp.sin(6 * X[:, 0]))
    walked = {path for path in entered if not path.startswith(TAKEN_FOR_GRANTED)}
    listed = {
        "functions/function.py", "functions/projection.py", "gaussians/family.py", "functions/marginals.py",
        "likelihoods/base.py", f"likelihoods/{file}",
    }  # fmt: skip
    assert {"functions/function.py", "functions/projection.py", "likelihoods/base.py"} <= walked <= listed and len(
        listed
    ) == 6
    walk = (PACKAGE.parent / "docs" / "design.md").read_text().partition("## The walk of f(X)")[2].partition("\n## ")[0]
    assert all(f"`{path}`" in walk for path in listed - {"likelihoods/continuous.py"})


def test_public_names():
    names = set(vars(numpyro_orthgp)) - {"sklearn"}  # which nothing imports but its own tests
    assert sorted(n for n in names if not n.startswith("_")) == sorted([
        "AutoSparseGP", "Average", "CollapsedGP", "DeepGP", "Derivative", "EarlyStopping", "FourierFeatures", "GPFunction",
        "GaussHermite", "InducingPatches", "InducingPoints", "InferredLatents", "Integral", "LatentInputs", "Likelihood",
        "Marginals", "MeanOnly", "MonteCarlo", "QuasiMonteCarlo", "SphericalHarmonics", "Tasks",
        "classification", "counts", "fit", "fit_lbfgs", "gp", "gp_posterior", "lazy_rows",
        "infer_latents", "init", "inputs_of", "kernels", "latent_inputs", "load",
        "latent_inputs_posterior", "likelihoods", "natural_gradient", "online", "orthogonal", "patchwise",
        "centred", "check", "concatenate", "khat", "patchwise_mean", "posterior", "regression", "stack",
        "to_arviz", "variance_shares", "with_neighbors",
        # submodules, visible because they are imported
        "closures", "collapsed", "diagnostics", "errors", "foreign", "functions", "gaussians", "guides", "inducing", "math",
        "plots", "primitives", "processes", "tabular", "training", "types",
    ])  # fmt: skip
    assert {
        "Bernoulli", "Beta", "Binomial", "Categorical", "Exponential", "Gamma", "Gaussian", "HeteroskedasticGaussian", "Laplace",
        "Likelihood", "LogNormal", "Mixture", "NegativeBinomial", "Ordinal", "Poisson", "Stacked", "StudentT", "Transformed",
        "Weibull", "ZeroInflated",
    } <= set(vars(likelihoods))  # fmt: skip
    assert {
        "RBF", "Matern12", "Matern32", "Matern52", "RationalQuadratic", "Periodic", "Linear", "Polynomial", "ArcCosine", "Constant",
        "White", "Coregion", "Convolutional",
    } <= set(vars(kernels))  # fmt: skip


@pytest.mark.parametrize(
    "public",
    [
        getattr(numpyro_orthgp, n)
        for n in (
            "gp",
            "gp_posterior",
            "posterior",
            "AutoSparseGP",
            "natural_gradient",
            "stack",
            "CollapsedGP",
            "latent_inputs",
            "latent_inputs_posterior",
            "orthogonal",
            "DeepGP",
            "patchwise",
            "patchwise_mean",
            "FourierFeatures",
            "SphericalHarmonics",
            "InducingPatches",
            "Average",
            "Derivative",
            "Integral",
            "Tasks",
            "inputs_of",
            "centred",
            "concatenate",
            "variance_shares",
            "fit",
            "fit_lbfgs",
            "lazy_rows",
            "EarlyStopping",
            "to_arviz",
            "khat",
        )
    ],
)
def test_public_docstrings_say_shapes_and_errors(public):
    assert public.__doc__ and ":param" in public.__doc__
    assert ":raises" in public.__doc__ or ":return" in public.__doc__


def all_equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from all_equations(inner)


@pytest.mark.parametrize("sizes, expected", [([5], 1), ([5, 4], 2), ([5, 4, 3], 3)])
def test_one_cholesky_factor_per_set(rng, sizes, expected):
    """Nothing is factorised twice, and no B x B matrix appears: both are costs that creep in silently."""
    X, y = (jnp.asarray(a) for a in problems.data(rng, 23))
    kwargs = {"inducing": problems.sets(rng, sizes), "likelihood": problems.gaussian(0.3), "jitter": None}
    svi = SVI(problems.model, ogp.AutoSparseGP(problems.model), optax.adam(0.1), TraceMeanField_ELBO())
    params = svi.get_params(svi.init(jax.random.PRNGKey(0), X, y, **kwargs))  # the guide looks at the model once, here

    def objective(params):
        return problems.loss(params, X, y, guide=svi.guide, **kwargs)

    for function in (objective, jax.grad(objective)):
        equations = list(all_equations(jax.make_jaxpr(function)(params).jaxpr))
        # All attempts, with more and more jitter, are one loop.
        assert sum(e.primitive.name == "cholesky" for e in equations) == expected
        assert not [e for e in equations for v in e.outvars if v.aval.shape[-2:] == (23, 23)]
