"""What a metric measures on a turn and of a person, and what the champion was like before a canary; each figure by hand."""

from typing import Any

import pytest

from app.domain.release.sessions import Session
from pipelines.evaluation.config import GatesConfig, Good, MetricClass, MetricConfig, Missing
from pipelines.evaluation.counting.measures import counted_missing, is_fault, measured, number, of_unit, raw_value
from pipelines.evaluation.counting.references import Reference, bounded, references_of, thresholds_of
from tests.fakes.sessions import session


def metric(source: str, **changes: Any) -> MetricConfig:
    return MetricConfig(**{"name": "m", "source": source, "kind": MetricClass.BEHAVIOUR, "margin": None} | changes)


@pytest.mark.parametrize(
    ("source", "changes", "value"),
    [
        ("fault", {}, 0.0), ("fault", {"served": False}, 1.0), ("fault", {"finish_reason": "error"}, 1.0),
        ("fault", {"finish_reason": "timeout"}, 1.0),
        ("fault", {"finish_reason": "aborted"}, 0.0), ("reward", {}, 0.2), ("reward", {"labelled": False}, None),
        ("reward", {"served": False}, None),
        ("excluded", {"excluded": True}, 1.0), ("excluded", {}, 0.0), ("abandoned", {"signals": {}}, 1.0), ("abandoned", {}, 0.0),
        ("acts", {"completion": "```x```"}, 1.0), ("acts", {"completion": "so"}, 0.0),
        ("acts", {"completion": "", "tool_verdicts": ("ok",)}, 1.0),
        ("asks", {"completion": "Which one? "}, 1.0), ("asks", {"completion": "Which one? That."}, 0.0),
        ("asks", {"completion": "```x``` ok?"}, 0.0),
        ("refuses", {"completion": "I can't help with that"}, 1.0), ("refuses", {"completion": "x" * 180 + " I can't help"}, 1.0),
        ("refuses", {"completion": "x" * 190 + " I can't help"}, 0.0), ("refuses", {"completion": "It refuses"}, 0.0), ("length", {}, 40.0),
        ("term:length", {"terms": {"length": -0.5}}, -0.5), ("term:length", {"terms": {}}, None), ("term:length", {"terms": None}, None),
        ("observation:stars", {"signals": {"stars": 4}}, 4.0), ("observation:stars", {"signals": {}}, None),
        ("has:undo", {"signals": {"undo": True}}, 1.0), ("has:undo", {"signals": {"undo": False}}, 0.0),
        ("has:undo", {"signals": {"undo": ""}}, 1.0),
        ("has:undo", {"signals": {}}, 0.0), ("has:undo", {"labelled": False}, None),
    ],
)  # fmt: skip
def test_what_a_source_says_of_a_turn(source: str, changes: dict[str, Any], value: float | None) -> None:
    assert raw_value(metric(source), session(1, **changes)) == value


def test_a_price_is_in_tokens_of_the_answer() -> None:
    priced = session(1, prompt_tokens=100, completion_tokens=40)
    assert raw_value(metric("price", prompt_price=0.25), priced) == 65.0
    assert raw_value(metric("price"), session(1, served=False)) is None


def test_an_observation_is_a_number_a_flag_or_what_is_left_of_an_edit() -> None:
    assert [number(value) for value in (True, 3, 0.5, {"four_gram": 0.75})] == [1.0, 3.0, 0.5, 0.75]
    assert [number(value) for value in ("so", None, [1], {"horizon_s": 3}, {"four_gram": "x"})] == [None] * 5


@pytest.mark.parametrize(
    ("changes", "raw", "value"),
    [
        ({"low": -1.0}, 0.0, 0.5), ({"low": -1.0}, 0.5, 0.75), ({"low": -1.0}, 9.0, 1.0), ({"low": -1.0}, -9.0, 0.0),
        ({"high": 4.0}, 1.0, 0.25),
        ({"high": 4.0, "good": Good.DOWN}, 1.0, 0.75), ({"threshold": 0.5}, 0.5, 1.0), ({"threshold": 0.5}, 0.49, 0.0),
        ({"threshold": 0.5, "good": Good.DOWN}, 0.5, 0.0),
    ],
)  # fmt: skip
def test_a_value_is_brought_to_its_range_and_good_is_up(changes: dict[str, Any], raw: float, value: float) -> None:
    assert measured(metric("observation:x", **changes), session(1, signals={"x": raw}), {}) == pytest.approx(value)


def test_a_metric_that_refers_to_the_champion_needs_its_threshold() -> None:
    relative, quantile = metric("total_time", relative=True, good=Good.DOWN), metric("observation:x", quantile=0.9)
    took = session(1, total_s=3.0, signals={"x": 3.0})
    assert measured(relative, took, {}) is None
    assert measured(relative, took, {"m": 1.0}) == pytest.approx(0.25)  # 3/(3 + 1), good is down
    assert measured(relative, session(1, total_s=0.0), {"m": 1.0}) == 1.0
    assert measured(quantile, took, {}) is None
    assert [measured(quantile, took, {"m": bound}) for bound in (3.0, 3.1)] == [1.0, 0.0]


def test_a_person_is_the_mean_of_their_turns_or_how_many_were_bad() -> None:
    by_turns = metric("fault", by_turns=True)
    assert of_unit(metric("fault"), [1.0, 0.0, 0.0, 1.0], {}) == 0.5
    assert of_unit(by_turns, [1.0, 0.0, 0.5], {}) == 0.0  # one and a half of one
    assert of_unit(by_turns, [1.0, 0.0, 0.5], {"m": 3.0}) == 0.5
    assert of_unit(metric("fault", by_turns=True, turns_cap=6), [0.0, 0.0, 0.0], {"m": 3.0}) == 0.5
    assert of_unit(by_turns, [0.0] * 9, {"m": 3.0}) == 0.0
    assert [of_unit(metric("fault", missing=missing), [], {}) for missing in (Missing.BEST, Missing.WORST)] == [1.0, 0.0]
    assert counted_missing(metric("fault", missing=Missing.BEST)) == 1.0


def test_a_client_that_went_away_is_no_fault() -> None:
    assert not is_fault(session(1, finish_reason="aborted"))
    assert is_fault(session(1, finish_reason="error"))
    assert is_fault(session(1, served=False))


def reference(of: MetricConfig, history: list[Session]) -> Reference:
    return references_of(GatesConfig(metrics=(of,)), history)["m"]


def test_below_thirty_people_the_prior_is_the_better_guess() -> None:
    told = [session(n, signals={"x": 1.0}) for n in range(30)]
    of = metric("observation:x", prior=0.2)
    guessed = reference(of, told[:29])
    assert (guessed.mean, guessed.variance, guessed.units) == (0.2, pytest.approx(0.16), 0)
    assert reference(metric("observation:x", prior=0.2, good=Good.DOWN), []).mean == pytest.approx(0.8)
    assert reference(metric("observation:x"), []) == Reference(mean=0.5, variance=0.25)
    assert reference(metric("observation:x", prior=0.001), []).variance == 0.0025
    assert reference(of, told) == Reference(mean=1.0, variance=0.0025, units=30)


def test_a_champion_is_its_people_and_not_its_turns() -> None:
    """Ten people of three turns, of which one is good; twenty with one good turn each: (10/3 + 20)/30."""
    many = [session(100 * n + k, actor=f"p{n}", signals={"x": float(k == 0)}) for n in range(10) for k in range(3)]
    once = [session(5000 + n, signals={"x": 1.0}) for n in range(20)]
    unlabelled = [session(9000 + n, labelled=False, signals={"x": 0.0}) for n in range(20)]
    found = reference(metric("observation:x"), many + once + unlabelled)
    mean = (10 / 3 + 20) / 30
    assert (found.units, found.known) == (30, 1.0)
    assert found.mean == pytest.approx(mean)
    assert found.variance == pytest.approx((10 * (1 / 3 - mean) ** 2 + 20 * (1 - mean) ** 2) / 30)


def test_what_was_not_said_counts_and_how_often_is_known() -> None:
    silent = [session(n, signals={}) for n in range(10)] + [session(100 + n, signals={"x": 1.0}) for n in range(30)]
    worst = reference(metric("observation:x"), silent)
    assert (worst.mean, worst.known, worst.units) == (0.75, 0.75, 40)
    assert reference(metric("observation:x", missing=Missing.BEST), silent).mean == 1.0


def test_counted_by_turns_the_cap_is_what_ninety_nine_in_a_hundred_have_and_people_count_by_window() -> None:
    of = metric("fault", by_turns=True, good=Good.DOWN, window_s=100.0)
    once = [session(n, actor=f"p{n}", exposed_at=session(0).exposed_at) for n in range(40)]
    alone = reference(of, once)
    assert (alone.threshold, alone.mean, alone.variance, alone.units) == (1.0, 1.0, 0.0001, 40)
    busy = [session(n, actor="busy", exposed_at=session(0).exposed_at) for n in range(100, 104)]
    assert reference(of, once + busy).threshold == 4.0
    later = [session(1000 + n, actor=f"p{n}") for n in range(40)]
    assert reference(of, once + later).units == 80, "a person in two windows is two units"


def test_a_referred_metric_has_the_quantile_or_the_median_of_the_champions_values() -> None:
    told = [session(n, completion_tokens=n + 1, total_s=float(n + 1)) for n in range(101)]
    assert reference(metric("length"), told).threshold == pytest.approx(96.0)
    assert reference(metric("length", quantile=0.5), told).threshold == pytest.approx(51.0)
    assert reference(metric("total_time", relative=True), told).threshold == pytest.approx(51.0)
    assert reference(metric("length"), told[:29]).threshold is None
    still = [session(n, total_s=0.0) for n in range(40)]
    assert reference(metric("total_time", relative=True), still).threshold is None, "nothing is a fifth more than nothing"
    assert thresholds_of({"a": Reference(mean=0.5, variance=0.1, threshold=3.0), "b": Reference(mean=0.5, variance=0.1)}) == {"a": 3.0}


@pytest.mark.parametrize(
    ("reference", "share", "good", "margin"),
    [
        (Reference(mean=0.2, variance=0.1, units=30), 0.25, Good.UP, 0.05),
        (Reference(mean=0.8, variance=0.1, units=30), 0.25, Good.UP, 0.1),
        (Reference(mean=0.2, variance=0.1, units=30), 0.0, Good.UP, 0.1), (Reference(mean=0.2, variance=0.1, units=0), 0.25, Good.UP, 0.1),
        (Reference(mean=0.2, variance=0.1, units=30), 0.25, Good.DOWN, 0.1),
        (Reference(mean=0.0, variance=0.1, units=30), 0.25, Good.UP, 0.0001),
    ],
)  # fmt: skip
def test_a_margin_is_at_most_a_share_of_what_was_measured(reference: Reference, share: float, good: Good, margin: float) -> None:
    assert bounded(GatesConfig(margin_share_max=share), metric("reward", good=good), 0.1, reference) == pytest.approx(margin)
