"""Benchmarks say so when a bound does not hold: their verdicts on figures made up for it."""

from typing import Any

import pytest

from tests.bench import cluster, corrections, cycle, demo, drill, learning, precision, products, upgrade
from tests.bench.faulty.checks import differences
from tests.learning.policy_iteration import is_allowed


def costs(**more: float) -> cycle.Costs:
    """Ten seconds: four of computing, three of answering, the rest overhead."""
    fields: dict[str, Any] = {"wall_s": 10.0, "compute_s": 4.0, "suites_s": 3.0, "stages_s": {"judge": 5.0}}
    return cycle.Costs(**{**fields, **more})


def test_judging_counts_as_overhead_but_for_answering_and_grading() -> None:
    """The step took 5 s, 3 of them answering: the other 2 were subtracted as well before."""
    found = cycle.summary([costs()])
    assert (found["overhead_s_p50"], found["overhead_with_suites_s_p50"]) == (3.0, 6.0)


def test_a_cycle_with_too_much_overhead_and_too_few_of_them_are_told() -> None:
    assert cycle.missed(cycle.summary([costs()]), 2) == ["1 cycles of 2", "overhead_s_p50 is 3.0, above 2.0"]
    assert cycle.missed(cycle.summary([costs(wall_s=8.5)]), 1) == []
    assert cycle.missed(cycle.summary([]), 0) == ["overhead_s_p50 is None, above 2.0"]


def test_answering_is_read_from_the_log_by_candidate() -> None:
    line = "t INFO loop event=suites_answered versions=aa,{} answers=96 seconds={}\n"
    assert cycle.suite_seconds(line.format("bb", "1.500") + "other\n" + line.format("bb", "0.250") + line.format("cc", "2.0")) == {
        "bb": 1.75, "cc": 2.0,
    }  # fmt: skip


def learned(**lag2: Any) -> dict[str, Any]:
    """A sweep within every bound."""
    good = {"liked": 0.99, "would_hold": 0.0, "is_trained_on": True}
    return {"labels_to_90pct": {"batch_mean": 480.0}, "lag": {"tis": {"0": good, "2": good | lag2}}, "noise": {"0.0": 0.99, "0.4": 0.9}}


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (learned(), []),
        (learned(liked=0.96), ["tis at lag 2 ends at 0.96, without lag at 0.99"]),
        (learned(would_hold=0.5), ["the default guards hold 50% of the updates at lag 2, which batching takes"]),
        (learned() | {"labels_to_90pct": {"batch_mean": None}}, ["batch_mean does not come 90 % of the way"]),
        (learned() | {"noise": {"0.0": 0.5, "0.4": 0.9}}, ["without noise 0.5 is reached"]),
        (learned() | {"noise": {"0.0": 0.9, "0.4": 0.3}}, ["with 40 % of noise 0.3 is reached, no more than at first"]),
    ],
)  # fmt: skip
def test_a_sweep_of_learning_that_misses_a_bound_says_which(found: dict[str, Any], told: list[str]) -> None:
    assert learning.missed(found) == told


def test_a_precision_that_is_too_far_off_and_one_that_cannot_be_are_told() -> None:
    def found(bf16: float, mxfp8: float, nvfp4: float, *, holds: bool = False) -> dict[str, dict[str, Any]]:
        figures = {"bf16": bf16, "mxfp8": mxfp8, "nvfp4": nvfp4}
        return {name: {"kl_per_token": kl, "guard_holds": holds} for name, kl in figures.items()}

    assert precision.missed(found(0.001, 0.04, 0.4)) == []
    assert precision.missed(found(0.001, 0.09, 0.4)) == ["mxfp8 is 0.09 nats per token from the trainer, above 0.08"]
    assert precision.missed(found(0.001, 0.05, 0.04)) == ["fewer bits came nearer: [0.001, 0.05, 0.04]"]
    assert precision.missed(found(0.001, 0.04, 0.4, holds=True)) == ["an update would hold turns that were served in bf16"]


@pytest.mark.parametrize(("share", "ratio", "allowed"), [(0.9, 1.0, True), (0.29, 1.0, False), (0.9, 2.1, False), (0.9, 0.49, False)])
def test_what_production_would_hold_is_told_by_its_default_guards(share: float, ratio: float, *, allowed: bool) -> None:
    assert is_allowed({"effective_share": share, "mean_ratio": ratio}) is allowed


GOOD_DAY: dict[str, Any] = {
    "rows": 2000, "expected_rows": 2000, "left_of_the_erased": 0, "segments_missing": 0, "forgot": [], "audit": "intact",
    "pointer_is": True, "weights_verified": True, "mlflow_versions": 1, "token_above": True, "timeline": 2, "trained": [800, 800],
    "trained_twice": 0, "total_s": 20.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({}, []),
        ({"left_of_the_erased": 100}, ["left_of_the_erased is 100 and not 0"]),
        ({"rows": 2900}, ["rows is 2900 and not 2000"]),
        ({"audit": "entry 3 was edited"}, ["audit is 'entry 3 was edited' and not 'intact'"]),
        ({"trained_twice": 3}, ["trained_twice is 3 and not 0"]),
        ({"timeline": 1, "token_above": False}, ["token_above is False and not True", "timeline is 1 and not 2"]),
        ({"total_s": 400.0}, ["total_s is 400.0, above 300"]),
    ],
)
def test_a_drill_that_does_not_come_back_whole_says_what_is_missing(found: dict[str, Any], told: list[str]) -> None:
    assert drill.missed(GOOD_DAY | found) == told


def test_the_best_objective_needs_the_fewest_labels_and_of_equals_ends_highest() -> None:
    found = {"a": {"labels": 320, "last": 0.5}, "b": {"labels": 340, "last": 0.6}, "c": {"labels": 500, "last": 0.9}}
    assert corrections.best_of(found) == "b"  # within a batch of the fewest


@pytest.mark.parametrize(
    ("ours", "told"),
    [
        ({"liked_last": 0.5, "interval": [0.4, 0.6]}, 0),
        ({"liked_last": 0.18, "interval": [0.12, 0.24]}, 2),
        ({"liked_last": 0.3, "interval": [0.05, 0.55]}, 1),
        ({"liked_last": 0.3, "interval": [0.25, 0.35]}, 1),
    ],
)  # fmt: skip
def test_a_product_that_does_not_learn_or_learns_less_than_plain_reinforce_is_told(ours: dict[str, Any], told: int) -> None:
    plain = {"liked_first": 0.1, "liked_last": 0.45, "interval": [0.4, 0.5]}
    assert len(products.missed({"shop": {"ours": {"liked_first": 0.1} | ours, "reinforce": plain}})) == told


@pytest.mark.parametrize(
    ("row", "found", "exit_code", "told"),
    [
        ("quiet", {}, 0, []),
        ("busy", {"wall_s": 900.0, "first_promotion_s": 800.0}, 0, []),
        ("quiet", {"wall_s": 240.5}, 0, ["240.5 s, 240 are allowed on a quiet machine"]),
        ("quiet", {"first_promotion_s": 121.0}, 0, ["the first promotion after 121.0 s, 120 are allowed"]),
        ("busy", {}, 1, ["exit code 1"]),
        ("busy", {"failures": ["the gain is not shown"]}, 1, ["the gain is not shown"]),
    ],
)  # fmt: skip
def test_a_demo_that_failed_or_took_too_long_is_told(row: str, found: dict[str, Any], exit_code: int, told: list[str]) -> None:
    """The bench once printed its figures and ended well whatever they were."""
    assert demo._bounds(row, {"failures": [], "wall_s": 200.0, "first_promotion_s": 100.0} | found, exit_code) == told


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({}, []),
        ({"errors": 1, "lost": 2, "doubled": 3, "slots_lost": 4}, ["errors", "lost", "doubled", "slots_lost"]),
        ({"p99_ratio": 1.6}, ["p99_ratio"]),
        ({"p99_ratio": None}, ["p99_ratio"]),
        ({"p99_ratio": 1.6, "p99_judged": False}, []),
        ({"unlabelled": 1}, ["1"]),
    ],
)  # fmt: skip
def test_an_upgrade_that_loses_doubles_fails_or_slows_is_told(found: dict[str, Any], told: list[str]) -> None:
    good = {"errors": 0, "lost": 0, "doubled": 0, "slots_lost": 0, "unlabelled": 0, "p99_ratio": 1.4, "p99_judged": True}
    assert [line.split()[0] for line in upgrade.missed(good | found)] == told


def machines(**more: Any) -> dict[str, Any]:
    """What was found on two machines, within every bound."""
    good: dict[str, Any] = {
        "nodes": 2, "workers": 2, "equal_to_one_node": True, "killed": 9, "resumed": True, "said": "a worker was lost", "steps_lost": 1,
        "failover_s": 40.0, "nodes_afterwards": ["10.0.0.2", "10.0.0.4"], "replaced_by": "10.0.0.4", "inherited": "inherited",
        "refused": "…: name object storage, such as …", "actors_of_the_refused": 0, "read_from_each_other": [], "bytes_through_storage": 1,
    }  # fmt: skip
    return good | more


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"nodes": 1}, "2 workers are on 1 machines, not two on two"),
        ({"equal_to_one_node": False}, "two machines made other weights than two workers on one"),
        ({"killed": 0}, "nothing was killed"),
        ({"resumed": False}, "the resumed update made other weights than the one that nobody disturbed"),
        ({"said": "RuntimeError: gloo"}, "the loss was told as 'RuntimeError: gloo'"),
        ({"steps_lost": None}, "steps_lost is None, 2 is the bound"),
        ({"steps_lost": 3}, "steps_lost is 3, 2 is the bound"),
        ({"failover_s": None}, "failover_s is None, 180 is the bound"),
        ({"failover_s": 181.0}, "failover_s is 181.0, 180 is the bound"),
        ({"nodes_afterwards": ["10.0.0.2"]}, "the resumed update ran on ['10.0.0.2']"),
        ({"inherited": "missing"}, "the next update's optimizer is missing, inherited is the bound"),
        ({"refused": ""}, "without object storage it said ''"),
        ({"actors_of_the_refused": 2}, "2 workers were started without object storage"),
        ({"read_from_each_other": ["x"]}, "the driver's files were seen by a worker: ['x']"),
        ({"bytes_through_storage": 0}, "nothing went through storage"),
    ],
)
def test_two_machines_that_lose_or_change_something_are_told(wrong: dict[str, Any], sentence: str) -> None:
    assert cluster.missed(machines()) == []
    assert cluster.missed(machines(**wrong)) == [sentence]


def test_labels_under_faults_are_alike_but_for_the_sign_of_a_zero() -> None:
    assert differences(['["t", -0.0, -0.05, [-0.0]]'], ['["t", 0.0, -0.05, [0.0]]']) == 0
    assert differences(['["t", -0.05]'], ['["t", 0.05]']) == 2
    assert differences(['["t", -0.0103]'], ['["t", 0.0103]']) == 2
    assert differences(['["t", 1.0]', '["t", 1.0]'], ['["t", 1.0]']) == 1, "one is there twice"
