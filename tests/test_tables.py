"""The script that runs tables of papers again: what it prints, what it does not run twice, and the papers' numbers."""

from __future__ import annotations

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import random
from numpyro.infer import SVI, TraceMeanField_ELBO
from scipy import stats

import numpyro_orthgp as ogp
from benchmarks import tables as script
from benchmarks.paper import runs
from benchmarks.paper.runs import Key
from benchmarks.paper.settings import BASES, LARGE, SETTINGS, guide_of, model
from benchmarks.paper.values import TABLES
from benchmarks.store import Store


@pytest.fixture
def folder(rng, tmp_path):
    """A set with the name of a real one."""
    X = 3 * rng.normal(size=(150, 2)) + 5
    np.savez(tmp_path / "kin40k.npz", X=X, y=np.sin(X[:, 0]) + X[:, 1] + 0.1 * rng.normal(size=150))
    return tmp_path


def arguments(folder, *words):
    return ["--data", str(folder), "--out", str(folder / "out"), "--num-inducing", "4", "--epochs", "3", *words]


def no_fit(*args, **kwargs):
    raise AssertionError("a fit that is done was run again")


# ---------------------------------------------------------------- the script


def test_table_is_printed_beside_the_paper_and_not_run_twice(folder, capsys, monkeypatch):
    small = arguments(folder, "--sets", "kin40k", "song", "--splits", "2", "--methods", "SVGP 1024")
    script.main([*small, "--tables", "shi2020:3"])
    out = capsys.readouterr().out
    assert "song: no file" in out
    assert "NOT THE PAPER'S RUN: 4 inducing points" in out and "3 of 100 epochs" in out and "2 of 5 splits" in out
    line = next(line for line in out.splitlines() if line.startswith("SVGP "))
    assert "0.0938 (0.0025)" in line and "*" in line
    rows = [json.loads(line) for line in (folder / "out" / "fits.jsonl").read_text().splitlines()]
    assert [(row["method"], row["points"], row["split"]) for row in rows] == [("SVGP", "4", 0), ("SVGP", "4", 1)]
    mean = np.mean([row["log_density"] for row in rows])
    assert f"{mean:.4f}*" in line and all(row["status"] == "finished" for row in rows)
    assert not list((folder / "out" / "checkpoints").iterdir())

    # The same fits serve the other tables of the setting.
    monkeypatch.setattr(ogp, "fit", no_fit)
    script.main([*small, "--tables", "shi2020:4", "titsias2025:4"])
    out = capsys.readouterr().out
    assert "0.1933 (0.0009)" in out and "0.195 (0.001)" in out
    assert out.count(f"{np.mean([row['rmse'] for row in rows]):.4f}*") == 2
    with pytest.raises(AssertionError, match="run again"):
        script.main([*small, "--tables", "shi2020:4", "--max-rows", "90"])
    assert jax.config.jax_enable_x64  # float32 was for the fits only


def test_methods_with_more_points_than_rows_are_left_out(folder, capsys, monkeypatch):
    monkeypatch.setattr(ogp, "fit", no_fit)
    few = ["--tables", "shi2020:3", "--methods", "ODVGP 1024+8096", "--max-rows", "20", "--splits", "1"]
    script.main(arguments(folder, *few))
    assert "left out: more points than rows" in capsys.readouterr().out


@pytest.mark.slow
def test_all_kinds_of_methods_run(folder, capsys):
    large = ["SVGP-new 1024", "ODVGP 1024+8096", "SOLVE-GP", "SOLVE-GP-new"]
    bases = ["COUPLED 300", "COUPLEDNAT 300", "ORTHNAT", "ORTH", "HYBRID", "DECOUPLED"]
    script.main(arguments(folder, "--splits", "1", "--methods", *large, *bases))
    assert "nan" not in capsys.readouterr().out
    rows = [json.loads(line) for line in (folder / "out" / "fits.jsonl").read_text().splitlines()]
    assert sorted(row["method"] for row in rows) == sorted(label.split()[0] for label in large + bases)
    assert all(row["status"] == "finished" and np.isfinite(row["log_density"]) for row in rows)


@pytest.mark.slow
def test_table_of_collapsed_bounds_is_that_of_its_own_script(folder, capsys, monkeypatch):
    (folder / "kin40k.npz").rename(folder / "pol.npz")
    words = arguments(folder, "--tables", "titsias2025:1", "--splits", "1")
    script.main(words)
    first = capsys.readouterr().out
    assert "0.821 (0.008)" in first and "exact-GP" in first
    assert len((folder / "out" / "medium_regression.jsonl").read_text().splitlines()) == 7
    monkeypatch.setattr(script.collapsed.script, "measure", no_fit)
    script.main(words)
    assert capsys.readouterr().out == first


@pytest.mark.slow
def test_an_interrupted_fit_goes_on_to_the_same_bits(folder, monkeypatch):
    def interrupt(self, progress):
        if progress.step >= 2:
            raise KeyboardInterrupt

    words = arguments(folder, "--tables", "shi2020:3", "--methods", "SVGP 1024", "--splits", "1")
    with monkeypatch.context() as context, pytest.raises(SystemExit, match="goes on from"):
        context.setattr(runs.Clock, "__call__", interrupt)
        script.main(words)
    assert not (folder / "out" / "fits.jsonl").exists()
    script.main(words)
    undisturbed = [*words[:3], str(folder / "again"), *words[4:]]
    script.main(undisturbed)
    rows = [json.loads((folder / name / "fits.jsonl").read_text()) for name in ("out", "again")]
    assert rows[0]["log_density"] == rows[1]["log_density"] and rows[0]["bound"] == rows[1]["bound"]


# ---------------------------------------------------------------- what is asked for


def test_names_of_tables():
    assert script.chosen_tables(["shi2020:3,5", "titsias2025", "shi2020:3"]) == [
        "shi2020:3",
        "shi2020:5",
        "titsias2025:1",
        "titsias2025:2",
        "titsias2025:4",
    ]
    for wrong in ("shi2021", "shi2020:9", "shi2020:3,"):
        with pytest.raises(ValueError, match=r"no table .*; there are shi2020:3"):
            script.chosen_tables([wrong])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--data"),
        (["--data", ".", "--tables", "shi2020:7"], "no table shi2020:7"),
        (["--data", ".", "--methods", "SVGP", "SGP"], "no method SGP;"),
        (["--data", ".", "--sets", "kin50k"], "kin50k"),
        (["--data", ".", "--epochs", "0"], "at least 1"),
    ],
)
def test_what_there_is_not_is_refused(words, message, capsys):
    with pytest.raises(SystemExit):
        script.parse(words)
    assert message in capsys.readouterr().err


def test_defaults_are_the_papers_runs(capsys):
    args = script.parse(["--data", "."])
    for setting in ("large", "bases", "collapsed"):
        assert script.differences(args, setting, 7, 7) == []
    assert script.differences(args, "large", 6, 7) == ["6 of 7 rows to train"]
    script.main(["--list"])
    assert "SOLVE-GP-new 1024+1024" in capsys.readouterr().out


# ---------------------------------------------------------------- the papers


def test_tables_are_whole_and_their_methods_known():
    for key, table in TABLES.items():
        assert all(list(values) == table.columns for values in table.values.values())
        known = script.COLLAPSED_METHODS if table.setting == "collapsed" else script.all_methods()
        labels = [c.split()[0] for c in table.columns] if table.setting == "collapsed" else table.columns
        assert set(labels) <= set(known), key
    of_ours = [m.label for m in script.methods_of(TABLES["titsias2025:2"])]
    assert (
        of_ours[-1] == "SOLVE-GP-1x64 1024+1024" and "SOLVE-GP-new 1024+1024" in of_ours and "SVGP-new 2048" in of_ours
    )
    assert TABLES["shi2020:3"].values["houseelectric"]["SOLVE-GP 1024+1024"].mean == 1.3332
    assert TABLES["salimbeni2018:4"].values["kin40k"]["ORTH 300+700"] == (0.1776, None, 4)


def test_typed_numbers_add_up():
    """Means over sets that Salimbeni et al. print, Titsias's quotations of Shi et al., and Table 1 as the other script has it."""
    for number, means in (
        (3, [0.0442, 0.0588, 0.0752, 0.0814, 0.0981, 0.0923, 0.0472, -0.2131]),
        (4, [0.2980, 0.2958, 0.2907, 0.2898, 0.2824, 0.2836, 0.3608, 0.2977]),
    ):
        values = TABLES[f"salimbeni2018:{number}"].values.values()
        ours = np.mean([[value.mean for value in row.values()] for row in values], axis=0)
        np.testing.assert_allclose(ours, means, atol=2e-4)
    shi = TABLES["shi2020:3"].values
    quoted = [round(shi["keggdirected"][f"ODVGP 1024+{M}"].error, 3) for M in (1024, 8096)]
    assert quoted == [0.067, 0.063]
    for name, by_points in script.collapsed.script.PAPER.items():
        for M, methods in by_points.items():
            for method, value in methods.items():
                assert TABLES["titsias2025:1"].values[name][f"{method.replace(' ', '-')} {M}"].mean == value


@pytest.mark.parametrize(("N", "rows"), [(40_000, 25_600), (45_730, 29_267), (16_599, 10_623), (17_379, 11_122)])
def test_numbers_of_rows_are_the_papers(N, rows):
    assert runs.num_rows(LARGE, N, None) == rows
    assert runs.num_rows(LARGE, N, 100) == 100


def test_steps_and_points_are_the_papers_and_shrink_in_proportion():
    assert LARGE.num_steps(25_600, 100) == 2500 and BASES.num_steps(36_000, 100) == 20_000
    assert LARGE.num_steps(500, 3) == 3 and BASES.num_steps(10, 1) == 200
    odvgp = next(m for m in LARGE.methods if m.points == "1024+8096")
    assert odvgp.scaled(1024) == odvgp
    assert odvgp.scaled(64).sizes == (64, 506) and odvgp.scaled(64).columns == 64


# ---------------------------------------------------------------- one fit


def test_split_is_standardized_and_test_rows_stay(rng):
    X, y = rng.normal(size=(500, 3)) + 7, 5 * rng.normal(size=500)
    X[:, 1] = 4.0  # a constant column is only centred
    whole, part = (runs.split(X, y, LARGE, 0, rows, "float32") for rows in (320, 50))
    assert len(whole.y) == 320 and len(part.y) == 50 and whole.X.dtype == np.float32
    np.testing.assert_allclose(whole.X.std(0), [1, 0, 1], atol=1e-5)
    np.testing.assert_allclose([whole.y.mean(), whole.y.std()], [0, 1], atol=1e-5)
    np.testing.assert_array_equal(whole.X_test, part.X_test)
    np.testing.assert_array_equal(whole.X[:50], part.X)
    assert not {*map(tuple, whole.X)} & {*map(tuple, whole.X_test)}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_points_are_rows_of_the_right_number_and_differ(rng, setting):
    X = jnp.asarray(rng.normal(size=(60, 2)))
    sets = setting.start(random.PRNGKey(0), X, (5, 20))
    assert [len(Z) for Z in sets] == [5, 20]
    assert len({*map(tuple, np.concatenate(sets).tolist())}) == 25


def test_scores_before_training_are_those_of_the_prior(rng, monkeypatch):
    method = LARGE.methods[0].scaled(4)
    data = runs.Data(*(rng.normal(size=s) for s in ((20, 2), 20, (23, 2), 23)))
    constants = {"N": 20, "setting": LARGE, "method": method, "points": [jnp.asarray(data.X[:4])]}
    svi = SVI(model, guide_of(method), optax.adam(0.01), TraceMeanField_ELBO())
    params = svi.get_params(svi.init(random.PRNGKey(0), data.X, data.y, **constants))
    monkeypatch.setattr(runs, "ROWS_AT_ONCE", 5)  # blocks that do not divide the rows
    found = runs.scores(svi, params, data, constants)
    expected = stats.norm(0, np.hypot(0.69, 0.51)).logpdf(data.y_test).mean()
    np.testing.assert_allclose(found["log_density"], expected, rtol=1e-6)
    np.testing.assert_allclose(found["rmse"], np.sqrt(np.mean(data.y_test**2)), rtol=1e-6)
    assert found["noise"] == pytest.approx(0.51)


def test_clock_leaves_out_the_call_that_compiles(monkeypatch):
    times = iter([10.0, 11.0, 13.0])
    monkeypatch.setattr(runs.time, "perf_counter", lambda: next(times))
    clock = runs.Clock()
    assert clock.median is None
    for step in (1, 3, 11):
        clock(SimpleNamespace(step=step))
    assert clock.seconds == [0.5, 0.25] and clock.median == 0.375


def test_store_reads_what_it_wrote_and_survives_a_cut_line(tmp_path, capsys):
    path = tmp_path / "out" / "fits.jsonl"
    keys = [Key("large", "kin40k", "SVGP", "4", split, 3, 90, "float32") for split in range(3)]
    store = Store(path, Key)
    for key in keys[:2]:
        store.add(key, {"rmse": 0.5 + key.split})
    path.write_text(path.read_text()[:-9])
    again = Store(path, Key)
    assert "damaged" in capsys.readouterr().out
    assert again.get(keys[0]) == {"rmse": 0.5} and again.get(keys[1]) is None
    again.add(keys[2], {"rmse": 0.1})
    assert Store(path, Key).rows == {keys[0]: {"rmse": 0.5}, keys[2]: {"rmse": 0.1}}


def test_a_fit_that_fails_at_once_is_a_row_of_nan(rng, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise FloatingPointError("The loss of step 1 is nan")

    monkeypatch.setattr(ogp, "fit", fail)
    method = LARGE.methods[0].scaled(4)
    data = runs.Data(*(rng.normal(size=s) for s in ((20, 2), 20, (5, 2), 5)))
    row = runs.fit(Key("large", "x", "SVGP", "4", 0, 1, 20, "float64"), data, LARGE, method, tmp_path / "c.npz")
    assert row["status"] == "diverged" and np.isnan(row["rmse"])
    line = script.Line("SVGP 1024", "4", [row], "rmse", None, None)
    assert "(1 of 1 diverged)" in script.text(line, False)
