"""Arrays of other libraries, where an array is expected: the right numbers, or words."""

from __future__ import annotations

import array

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
import pytest
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from numpyro_orthgp.errors import check_floating
from numpyro_orthgp.foreign import as_numpy, as_outputs
from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.training.arrays import as_array

LARGE = np.array([[2**60 + 3], [5]])  # which JAX wraps around in 32 bits, to 3 and 5, and float64 rounds

HOLDERS = {
    "numpy": ("numpy", lambda a: a),
    "number": ("numpy", lambda a: a[0, 0]),
    "list": ("numpy", lambda a: a.tolist()),
    "list of numbers of NumPy": ("numpy", lambda a: [list(row) for row in a]),
    "list of arrays": ("numpy", list),
    "buffer": ("numpy", memoryview),
    "array of Python": ("numpy", lambda a: array.array("q", a[:, 0])),
    "pandas": ("pandas", lambda a: pytest.importorskip("pandas").DataFrame(a)),
    "nullable": ("pandas", lambda a: pytest.importorskip("pandas").Series(a[:, 0], dtype="Int64")),
    "polars": ("polars", lambda a: pytest.importorskip("polars").DataFrame(a)),
    "arrow": ("pyarrow", lambda a: pytest.importorskip("pyarrow").array(a[:, 0])),
    "xarray": ("xarray", lambda a: pytest.importorskip("xarray").DataArray(a)),
    "torch": ("torch", lambda a: pytest.importorskip("torch").tensor(a)),
}


@pytest.mark.parametrize("x64", [True, False])  # JAX wraps around what 32 bits do not hold
@pytest.mark.parametrize("holder", HOLDERS)
def test_large_integers_are_refused_whatever_holds_them(holder, x64):
    """They were wrapped around without a word, but for those of NumPy."""
    library, make = HOLDERS[holder]
    pytest.importorskip(library)
    small = np.array([[3], [5]])
    with jax.enable_x64(x64):
        with pytest.raises(
            ValueError, match=r"`X` is int64 and holds 1152921504606846979, which float\d\d would round"
        ):
            check_floating("X", make(LARGE))
        np.testing.assert_array_equal(np.ravel(check_floating("X", make(small))), np.ravel(np.asarray(make(small))))


def test_inputs_of_a_table_are_those_of_its_numbers():
    pd = pytest.importorskip("pandas")
    f = ogp.CollapsedGP(kernels.RBF(1.0), jnp.linspace(0.0, 4.0, 5)[:, None], jnp.array([[0.0], [2.0]]), 0.1).posterior(
        jnp.ones(5)
    )
    table = pd.DataFrame({"a": [1, 2, 3]})
    np.testing.assert_array_equal(f(table).mean, f(jnp.array([[1.0], [2.0], [3.0]])).mean)
    with pytest.raises(ValueError, match="`X` is int64 and holds 1152921504606846976"):
        f(pd.DataFrame({"a": [2**60, 2]}))


def test_floats_that_jax_does_not_have():
    for dtype in (">f4", ">f8", np.longdouble):
        np.testing.assert_array_equal(check_floating("X", np.array([1.5, 2.5], dtype)), [1.5, 2.5])


def test_counts_that_jax_would_wrap_around():
    most = np.array([2**64 - 1], np.uint64)
    assert as_outputs("obs", most, "").dtype == jnp.uint64
    with jax.enable_x64(False):
        zero = jnp.zeros(1)
        poisson = likelihoods.Poisson(Marginals(zero, zero + 1, zero))
        with pytest.raises(
            ValueError,
            match=r"`obs` is int64 and holds 4294967299, which JAX would wrap around in int32\. Take another",
        ):
            poisson.log_prob(np.array([2**32 + 3]))
        with pytest.raises(ValueError, match="`obs` is uint64 and holds 18446744073709551615"):
            as_outputs("obs", most, "")


class Masked:
    """As dask's arrays of masked ones: ``__array__`` drops the masks."""

    _meta = np.ma.masked_array(np.zeros(0))
    dtype = np.dtype(float)

    def __init__(self, array):
        self.array, self.shape, self.chunks = array, array.shape, tuple((n,) for n in array.shape)

    def __len__(self):
        return len(self.array)

    def __getitem__(self, rows):
        return Masked(self.array[rows])

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.array)

    def compute(self):
        return self.array


def masks():
    yield "as dask", Masked(np.ma.masked_array(np.arange(6.0), mask=[0, 1, 0, 0, 0, 0]))
    try:
        import dask.array
    except ImportError:
        return
    whole = dask.array.from_array(np.arange(6.0), chunks=3)
    yield "dask", dask.array.ma.masked_array(whole, mask=dask.array.from_array(np.arange(6) == 1, chunks=3))


@pytest.mark.parametrize("array", [pytest.param(a, id=name) for name, a in masks()])
def test_masks_of_lazy_arrays_are_seen(array):
    """Masked entries were read as the numbers beneath."""
    with pytest.raises(TypeError, match="`X` is a masked array with 1 entries missing"):
        check_floating("X", array)
    column = as_array("data[1]", array)
    with pytest.raises(TypeError, match=r"is masked, with 1 entries missing among 3 rows from 0 on\. Fill them in"):
        column[0:3]
    np.testing.assert_array_equal(column[3:6], [3.0, 4.0, 5.0])


class Tensor:
    """As torch's of bfloat16."""

    dtype = "torch.bfloat16"

    def detach(self):
        return self

    def __array__(self, dtype=None, copy=None):
        raise TypeError("Got unsupported ScalarType BFloat16")


@pytest.mark.parametrize(
    "read",
    [
        lambda x: check_floating("X", x),
        lambda x: as_array("X", x),
        lambda x: ogp.regression(x, np.arange(20.0), M=5),
        lambda x: ogp.online.from_blocks(kernels.RBF(1.0), np.zeros((1, 1)), 0.1, [(x, np.zeros(3))]),
    ],
)
def test_tensors_that_numpy_cannot_read_say_what_to_do(read):
    what = r"is a tensor of torch that NumPy cannot read: .*BFloat16 Pass tensor\.detach\(\)\.cpu\(\)\.float\(\)\.numpy\(\)"
    with pytest.raises(TypeError, match=what):
        read(Tensor())


def test_tensors_of_torch():
    torch = pytest.importorskip("torch")
    x = torch.arange(4.0)[:, None]
    for tensor in (x, x.double(), x.long(), x.half().float()):
        np.testing.assert_array_equal(check_floating("X", tensor), np.arange(4.0)[:, None])
    for tensor in (x.bfloat16(), x.clone().requires_grad_(), x.to_sparse()):
        with pytest.raises(TypeError, match="`X` is a tensor of torch that NumPy cannot read"):
            check_floating("X", tensor)
    points = torch.linspace(0, 1, 20)[:, None]
    assert ogp.init.kmeans(jnp.zeros(2, jnp.uint32), points, 3).shape == (3, 1)


def test_what_is_no_array_stays():
    for x in (1.5, [1.0, 2.0], None, jnp.ones(2)):
        assert as_numpy("X", x) is x


X = np.linspace(0.0, 1.0, 6)[:, None]


def _labels(y, seen=None):
    f = ogp.gp("f", kernels.RBF(0.5), X[::2])
    mask = None if seen is None else jnp.asarray(seen) > 0  # computed in the model
    with numpyro.plate("data", len(X)), numpyro.handlers.mask(mask=True if mask is None else mask):
        numpyro.sample("y", likelihoods.Bernoulli(f(X)), obs=y)


@pytest.mark.parametrize("of", [np.asarray, jnp.asarray, list])
@pytest.mark.parametrize("seen", [None, np.arange(len(X)) > 1])
def test_outputs_of_any_library_are_looked_at_in_plain_runs(of, seen):
    """`SVI.run` compiles the density. So the guide looks at y first: also where NumPy holds it, or a mask is computed."""
    y, wrong = np.arange(len(X)) % 2, np.where(np.arange(len(X)) % 2, 1, -1)
    svi = SVI(_labels, ogp.AutoSparseGP(_labels), optax.adam(0.01), TraceMeanField_ELBO())
    with pytest.raises(ValueError, match=r"`y` must lie in the support of Bernoulli .*got -1"):
        svi.init(jax.random.PRNGKey(0), of(wrong), seen)
    if seen is not None:
        svi.init(jax.random.PRNGKey(0), of(np.where(seen, y, -1)), seen)  # what is masked may be anything


def test_outputs_that_numpy_holds_need_no_second_look():
    """A look with values runs the model operation by operation."""
    runs = []
    for of in (jnp.asarray, np.asarray):
        calls = []

        def model(y, calls=calls):
            calls.append(y)
            _labels(y)

        svi = SVI(model, ogp.AutoSparseGP(model), optax.adam(0.01), TraceMeanField_ELBO())
        svi.init(jax.random.PRNGKey(0), of(np.arange(len(X)) % 2))
        runs.append(len(calls))
    assert runs[0] == runs[1]


LABELS = ["a", "b"]
DAYS = np.array(["2020-01-01", "2020-01-03"], "datetime64[ns]")


@pytest.mark.parametrize("y", [np.array(LABELS), np.array(LABELS, object), np.array([1.5, 2.5], object), DAYS])
def test_outputs_that_are_no_numbers_have_words_of_ours(y):
    """JAX has words of its own for what it stages, which name no array."""
    with pytest.raises(
        TypeError, match=r"`y` must hold numbers; got an array of .*np\.unique\(y, return_inverse=True\)"
    ):
        as_outputs("y", y, "")


def test_complex_outputs_have_words_of_ours():
    """They were those of float()."""
    for y in (np.ones(2) + 1j, jnp.ones(2) + 1j):
        with pytest.raises(TypeError, match=r"`y` must hold real numbers; got complex.*two outputs"):
            as_outputs("y", y, "")


def test_categories_and_days_in_tables_are_named():
    pd = pytest.importorskip("pandas")
    with pytest.raises(TypeError, match=r"`y` must hold numbers; got an array of (str|object)"):
        as_outputs("y", pd.Series(pd.Categorical(LABELS)), "")
    with pytest.raises(TypeError, match="Times need a start and a unit"):
        check_floating("X", pd.DataFrame({"day": DAYS}))
    days = pd.DataFrame({"day": DAYS}).to_numpy()
    assert check_floating("X", (days - days.min()) / np.timedelta64(1, "D")).tolist() == [[0.0], [2.0]]


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">i4"])
def test_bytes_in_the_other_order_are_the_same_numbers(dtype):
    y = np.array([1, 2, 300])
    assert as_outputs("y", y.astype(dtype), "").tolist() == y.tolist()
