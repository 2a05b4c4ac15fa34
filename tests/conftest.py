"""Shared fixtures. The whole suite runs in float64; tests of float32 give float32 inputs and check the output's dtype."""

from __future__ import annotations

import gc
import os
from pathlib import Path

# The BLAS behind CPU Cholesky factors has threads of its own, which fight those of XLA: small problems run slower with.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import numpy as np
import pytest

jax.config.update("jax_enable_x64", True)

# Tracing makes millions of small objects that live on; looking for cycles among them takes an eighth of the time.
gc.set_threshold(200_000, 50, 100)

SHARED = Path(os.environ.get("NUMPYRO_ORTHGP_SHARED", Path(__file__).parents[2] / "shared"))


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


LONG = frozenset((Path(__file__).parent / "long.txt").read_text().splitlines())


def pytest_collection_modifyitems(config, items):
    if config.getoption("--slow"):
        return
    skip = pytest.mark.skip(reason="slow: run with --slow")
    long = [item for item in items if f"{item.path.name}::{item.name}" in LONG]
    config.hook.pytest_deselected(items=long)
    left = set(map(id, long))
    items[:] = [item for item in items if id(item) not in left]
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="module", autouse=True)
def bounded_memory():
    """Compiled programs of one module are of no use to another, and would fill gigabytes by the end of a run."""
    yield
    jax.clear_caches()


@pytest.fixture
def compilations(monkeypatch):
    """Names of the programs that XLA compiles from here on, in an empty store."""
    from numpyro_orthgp.math import kept

    names = []
    monkeypatch.setattr(kept, "_kept", type(kept._kept)())
    jax.clear_caches()

    def listen(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(kwargs.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def _folder(name: str) -> Path:
    folder = SHARED / name
    if not folder.is_dir():
        pytest.skip(f"needs the folder {name} of reference files")
    return folder


@pytest.fixture(scope="session")
def golden() -> Path:
    """Folder of reference values computed by other libraries; tests that need it skip when it is absent."""
    return _folder("golden")


@pytest.fixture(scope="session")
def data() -> Path:
    """Folder of real data sets; tests that need it skip when it is absent."""
    return _folder("data")
