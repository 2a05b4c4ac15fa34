"""``python -m tests.long junit.xml [.coverage]``: writes ``tests/long.txt``, the tests that ``make test`` leaves to ``make slow``.

``make slow PYTEST=--junitxml=junit.xml`` measures. After ``make test`` instead, what is listed already stays listed. Of each
file three kinds of cases stay, in this order: the cheapest of each test, then those with a value of a parameter that no cheaper
case of the test has, then other combinations. A case stays if it is quick, or if the file has not taken long by then, see
``LIMITS``. So every file has some, and what is left out is a combination, a long case, or a long way through the whole library.

With coverage by test (``make test PYTEST="--cov=numpyro_orthgp --cov-context=test"``, which needs pytest-cov) also those cases stay
without which a line of the package would run in no test.
"""

from __future__ import annotations

import itertools
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

LIST = Path(__file__).parent / "long.txt"
# Seconds of a quick case, and of a file: for first cases, values and combinations.
LIMITS = (1.0, 15.0), (0.4, 6.0), (0.1, 4.0)
# Where the values are parts of the package, no other test may have them: here all cases count as first ones.
PARTS = {
    "test_kernels", "test_random_features", "test_families",
    "test_likelihoods", "test_likelihood_special", "test_distribution_laws",
}  # fmt: skip
# Of these one case always stays: they guard faults that say nothing, and no other test would see them.
GUARDS = {
    "test_residual_scales_of_what_wraps_a_gaussian", "test_a_factor_of_one_number_in_a_plate", "test_neutra",
    "test_hidden_outputs_under_guides_of_numpyro", "test_marginals_in_a_deterministic_site_are_no_values",
    "test_a_likelihood_that_integrates_by_draws_keeps_no_key_of_a_loop", "test_masked_entries_are_missing",
    "test_nothing_of_a_step_is_kept_where_jax_looks_for_leaks", "test_what_may_be_within_jit_and_derivatives",
    "test_many_trials_of_a_rare_event", "test_noise_is_at_least_that_of_rounding", "test_loss_is_the_bound_of_the_model",
    "test_columns_of_a_table_in_another_order", "test_gradients_against_finite_differences", "test_classes_of_three_functions",
    "test_labels_condition_to_the_variational_optimum", "test_the_loss_with_latent_nodes_is_above_the_evidence",
    "test_hidden_outputs_weigh_nothing", "test_what_is_said", "test_expectations_of_large_counts_in_float32",
    "test_derivatives_of_predictive_densities_far_from_the_data", "test_the_slope_of_an_exponential_that_is_far_below_one",
    "test_float32_with_many_points_of_a_smooth_kernel", "test_mixtures_in_loops", "test_starting_again_from_a_function",
    "test_one_output_with_a_mean_and_missing_values", "test_mean_only_points_are_kept", "test_collapsed_bounds_and_latent_inputs",
    "test_densities_of_likelihoods_in_a_factor_that_need_draws_of_their_function", "test_latents_of_new_rows",
    "test_draws_of_a_residual_that_importance_weights_do_not_see", "test_outputs_that_are_a_formula_of_the_columns",
    "test_bounds_lie_below_expectations_and_draws_about_them", "test_sites_in_branches_under_guides_of_numpyro",
    "test_vectors_whose_correlation_is_a_function", "test_robustmax_of_functions_of_any_width",
    "test_a_fit_goes_on_where_it_stopped",
}  # fmt: skip


def measured(path: str) -> dict[str, dict[str, list[tuple[float, str]]]]:
    """Seconds and name of each case, by file and test."""
    files: dict[str, dict[str, list[tuple[float, str]]]] = defaultdict(lambda: defaultdict(list))
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        if case.find("skipped") is None:
            name = case.get("name", "")
            file = case.get("classname", "").split(".")[-1]
            files[file][name.partition("[")[0]].append((float(case.get("time", 0)), name))
    return files


def kinds_of(cases: list[tuple[float, str]]) -> tuple[list[tuple[float, str]], ...]:
    """The cheapest case of a test, those with values that no cheaper one has, and the others."""
    kinds: tuple[list[tuple[float, str]], ...] = ([], [], [])
    seen: set[tuple[int, str]] = set()
    for case in sorted(cases):
        values = set(enumerate(case[1].partition("[")[2].removesuffix("]").split("-")))
        kinds[0 if not kinds[0] else 1 if values - seen else 2].append(case)
        seen |= values
    return kinds


def long_of(file: str, tests: dict[str, list[tuple[float, str]]]) -> list[str]:
    limits = (LIMITS[0],) * 3 if file in PARTS else LIMITS
    guards = {kinds_of(tests[test])[0][0][1] for test in GUARDS & tests.keys()}
    total, left = 0.0, []
    for (quick, of_a_file), kind in zip(limits, zip(*map(kinds_of, tests.values()), strict=True), strict=True):
        for seconds, name in sorted(itertools.chain.from_iterable(kind)):
            if name in guards or seconds <= quick or not total or total + seconds <= of_a_file:
                total += seconds
            else:
                left.append(f"{file}.py::{name}")
    return left


def contexts(path: str) -> dict[tuple[str, int], set[str]]:
    """The cases that run each line of the package, by its path and number. Of cases that share a program one runs its lines."""
    from coverage import CoverageData  # comes with pytest-cov

    data = CoverageData(path)
    data.read()
    return {
        (file, line): {name.split("|")[0].rpartition("tests/")[2] for name in names if "::" in name}
        for file in data.measured_files()
        for line, names in data.contexts_by_lineno(file).items()
    }


def without_which_lines_run_in_no_test(
    names: set[str], runs: dict[tuple[str, int], set[str]], seconds: dict[str, float]
) -> set[str]:
    """Of ``names``, few and quick ones that run all the lines which only these run."""
    lines: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for line, cases in runs.items():
        for case in cases if cases <= names else ():
            lines[case].add(line)
    left, chosen = set[tuple[str, int]]().union(*lines.values()), set()
    while left:
        best = max(sorted(lines), key=lambda case: len(lines[case] & left) / (seconds[case] + 0.1))
        chosen.add(best)
        left -= lines[best]
    return chosen


if __name__ == "__main__":
    files = measured(sys.argv[1])
    names = {name for file, tests in files.items() for name in long_of(file, tests)}
    if len(sys.argv) > 2:
        of_case = {
            f"{file}.py::{name}": s for file, tests in files.items() for cases in tests.values() for s, name in cases
        }
        names -= without_which_lines_run_in_no_test(names, contexts(sys.argv[2]), of_case)
    ran = {f"{file}.py::{name}" for file, tests in files.items() for cases in tests.values() for _, name in cases}
    names |= set(LIST.read_text().splitlines()) - ran
    LIST.write_text("".join(f"{name}\n" for name in sorted(names)))
