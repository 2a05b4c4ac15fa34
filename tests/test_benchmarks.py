"""The benchmarks' own contenders: each runs at toy size, and those that should agree on a value do."""

from __future__ import annotations

import math
import re
import sys

import jax.numpy as jnp
import pytest

from benchmarks import (
    accelerator,
    ahead_of_time,
    collectives,
    functionals,
    many_data_sets,
    many_functions,
    second_calls,
    sources,
    tables_on_disk,
)
from benchmarks.peers import floor, ours, plain, problem
from benchmarks.peers.__main__ import check
from benchmarks.peers.contenders import PEERS, PLAIN, TASKS, Contender, tolerance
from benchmarks.peers.timing import measure
from tests.pages import run_python

HERE = {"ours": ours, "plain": plain}  # whose libraries are installed
OURS = {task: [c for c in contenders if c.library in HERE] for task, contenders in TASKS.items()}


@pytest.fixture(scope="module")
def toy():
    return problem.make(*problem.load(None, 200), "float64", batch=20, num_inducing=6, second=5)


# Those of startup are those of step, and one of them compiles operation by operation; those of restart are those of startup.
@pytest.mark.parametrize(
    "task", [pytest.param(t, marks=pytest.mark.slow if t == "startup" else ()) for t in TASKS if t != "restart"]
)
def test_our_contenders_run_and_agree(task, toy):
    values = {c: getattr(HERE[c.library], task)(toy, c.variant)(1) for c in OURS[task]}
    expected = next(iter(values.values()))
    for contender, value in values.items():
        assert math.isfinite(value)
        if contender.same:
            assert value == pytest.approx(expected, rel=tolerance(contender, "float64"))


@pytest.mark.slow
def test_a_restart_finds_the_programs_of_the_process_before(toy, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "the user's"))
    problem.save(toy, tmp_path / "problem.npz")

    def start(task):
        return measure(sys.executable, PLAIN, task, tmp_path / "problem.npz", "float64", 1, 0.1)

    first = start("startup")
    assert not (tmp_path / "programs").exists()
    assert start("restart")["value"] == first["value"]
    assert any((tmp_path / "programs").iterdir())
    assert not (tmp_path / "the user's").exists()


def test_steps_begin_at_the_bound_written_in_numpy_and_raise_it(toy):
    run = ours.step(toy, "SVGP")
    start = run(1)
    assert start == pytest.approx(accelerator.exact_bound(toy), rel=1e-9)
    assert run(50) > start


def test_a_contender_with_another_value_stops_the_run():
    contenders = [OURS["step"][0], PLAIN]
    found = {c.name: [{"value": value}] for c, value in zip(contenders, (-100.0, -101.0), strict=True)}
    with pytest.raises(SystemExit, match="plain JAX"):
        check(contenders, found, "float64")
    check([Contender("ours", "SVGP"), contenders[1]._replace(same=False)], found, "float64")


def test_each_task_begins_with_ours_and_names_known_libraries():
    for contenders in TASKS.values():
        assert contenders[0].library == "ours"
        assert {c.library for c in contenders} <= {*HERE, "floor", *PEERS}
        assert len({c.name for c in contenders}) == len(contenders)


def test_floor_counts_two_operations_for_a_multiplication_and_an_addition(toy):
    assert floor.step_flops(3, 5) == 3 * (9 + 3 * 9 * 5)
    assert floor.floor_ms(2048, 2048, 1.0) == pytest.approx(3 * (1 / 3 + 3) / 2)
    assert math.isfinite(floor.step(toy, "")(1))


@pytest.mark.slow
def test_accelerator_runs_on_what_there_is():
    found = accelerator.main(["--quick"])
    assert found["errors"]["product, this library"] < 1e-5
    assert found["errors"]["bound, this library"] < 1e-4
    assert all(ms > 0 for dtype in ("float32", "float64") for ms in found[dtype].values())
    assert len(found["fits"]) == 2


@pytest.mark.slow
def test_a_table_on_disk_is_searched_in_part(capsys):
    fit = tables_on_disk.main(["--num-rows", "120000", "--time", "10"])
    assert len(fit.X) == 100_000 and fit.num_rows == 110_000 and fit.num_given > 100_000
    found = dict(re.findall(r"(test log density|mean and sd alone) (-?[\d.]+)", capsys.readouterr().out))
    assert float(found["test log density"]) > -0.5 > float(found["mean and sd alone"])


SMALL = ["--sizes", "8", "--pairs", "", "--batch-size", "20", "--num-data", "30"]


def test_no_product_is_rounded_by_programs_compiled_ahead_of_time():
    control, product, *programs = ahead_of_time.main([*SMALL, "--products", "8"])["float32"].values()
    assert (control.products, control.rounded, control.tf32) == (1, 1, None) and len(programs) == 2
    assert (product.products, product.rounded) == (1, 0)
    assert all(p.products > 2 and p.rounded == 0 and p.megabytes > 0 for p in programs)


def test_programs_for_an_absent_gpu_have_no_tf32():
    pytest.importorskip("jax_plugins.xla_cuda12")
    lines = run_python(["-m", "benchmarks.ahead_of_time", "--target", "h100", *SMALL]).splitlines()[-3:]
    tf32 = [int(line.split()[-1]) for line in lines]
    assert lines[0].startswith(ahead_of_time.CONTROL) and tf32[0] > 0 and tf32[1:] == [0, 0]


def test_a_product_that_may_be_rounded_ends_the_script(monkeypatch):
    monkeypatch.setattr(ahead_of_time, "compiled", lambda *_: ahead_of_time.Program(0.1, 1.0, 3, 2, 0, None))
    with pytest.raises(SystemExit, match=r"SVGP \(8\): 2 products may be rounded"):
        ahead_of_time.main(SMALL)


def test_sources_give_rows(tmp_path):
    for package in ("h5py", "zarr", "pyarrow", "grain"):
        pytest.importorskip(package)
    found = sources.main(
        ["--rows", "2000", "--read", "600", "--batch-size", "40", "--num-inducing", "4", "--folder", str(tmp_path)]
    )
    assert len(found) == 1 + len(sources.KINDS) and all(speeds[-1] > 0 for speeds in found.values())
    assert list(tmp_path.iterdir()) == []


HLO = """
HloModule jit_f, is_scheduled=true

%body (p.1: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %p.1 = (s32[], f32[8,4]{1,0}) parameter(0)
  %x.1 = f32[8,4]{1,0} get-tuple-element(%p.1), index=1
  %w.1 = f32[4,4]{1,0} constant({...})
  %dot.1 = f32[8,4]{1,0} dot(%x.1, %w.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %sum.1 = f32[8,4]{1,0} all-reduce(%dot.1), channel_id=1, to_apply=%add
  ROOT %t.1 = (s32[], f32[8,4]{1,0}) tuple(%x.1, %sum.1)
}

ENTRY %main (a.1: f32[8,4]) -> f32[] {
  %a.1 = f32[8,4]{1,0} parameter(0)
  %loop = (s32[], f32[8,4]{1,0}) while(%a.1), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %both = (f32[5]{0}, f64[2]{0}) all-reduce(%b, %c), channel_id=2, to_apply=%add
  %factor = (f32[4,4]{0,1}, s32[]) custom-call(%a.1), custom_call_target="lapack_spotrf_ffi"
  ROOT %all = f32[] all-gather-start(%both)
}
"""


def test_collectives_are_counted_where_loops_repeat_them():
    calls, size, flop = collectives.counted(HLO)
    assert calls == {"all-reduce": 4, "all-gather": 1, "lapack": 1}
    assert (size, flop) == (3 * 8 * 4 * 4 + 5 * 4 + 2 * 8 + 4, 3 * 2 * 8 * 4 * 4)


@pytest.mark.slow
def test_collectives_of_compiled_programs(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    options = ["--devices", "1", "2", "--sizes", "16", "--batches", "64", "--rows", "256"]
    out = run_python(["-m", "benchmarks.collectives", *options])
    step = next(line for line in out.splitlines() if line.startswith("| SVGP 16, B = 64 | 2 |"))
    # The gradient by q, and little besides.
    assert "all-reduce" in step and 16 * 16 * 4 <= 1e6 * float(step.split("|")[4]) < 3 * 16 * 16 * 4
    assert "| training.Local, B = 64 | 2 | 1 all-reduce |" in out and "epoch, min" in out


def test_second_calls_compile_nothing():
    found = second_calls.main(["--num-inducing", "7", "--steps", "3"])
    again = ("the fit goes on", "with 3000 rows", "a new SVI with another rate", "posterior, second call", "f(X) again")
    assert found["fit of 2500 rows"][0] > 0
    assert all(found[name][0] == 0 for name in again), found
    assert found["the same, without priors"][0] < 40, found  # 44 where the guide's first look at the model compiles


def test_many_functions_are_timed():
    ((P, M, ms, over, _),) = many_functions.main(["--functions", "3", "--sizes", "5", "--batch-size", "20"])
    assert (P, M) == (3, 5) and ms > 0 and over > 0


def test_rows_with_nodes_cost_so_many_operations_for_each_inducing_point():
    """O(B M): no more for each of them where there are twice as many of both."""
    for name in functionals.kinds(jnp.zeros((1, 2), jnp.float32), 3):
        few, many = (functionals.operations(*functionals.case(name, 20 * n, 30 * n, 3)) for n in (1, 2))
        assert few < many <= 1.01 * 4 * few


def test_many_data_sets_by_one_program_are_those_one_by_one(capsys):
    seconds = many_data_sets.main(
        ["--sets", "3", "--rows", "12", "--num-inducing", "4", "--steps", "20", "--plain", "1"]
    )
    apart = [float(line.split("within ")[1].split()[0]) for line in capsys.readouterr().out.splitlines()]
    assert len(seconds) == len(apart) == 4 and max(apart) < 0.05
