"""A stream that goes on costs what is new, and comes to what it comes to from its beginning."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.evaluation.statistics import betting, shiryaev_roberts
from pipelines.evaluation.statistics.betting import Wealth
from pipelines.evaluation.statistics.resumed import Resumed
from pipelines.evaluation.statistics.shiryaev_roberts import Detection, Detector
from pipelines.evaluation.statistics.units import Units, running_mean

PROCESS = betting.harm(margin=0.02, variance=0.24)


def stream(units: int, *, seed: int = 1, first: float | None = None) -> Units:
    draw = np.random.default_rng(seed)
    outcome = draw.random(units)
    if first is not None:
        outcome[0] = first
    return Units.observed(
        outcome=outcome, treated=draw.random(units) < 0.3, probability=0.3, baseline=np.clip(running_mean(outcome, prior=0.5), 0, 1)
    )  # fmt: skip


class Counted:
    """Follows a stream's wealth, and notes how many units it was given each time."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def __call__(self, wealth: Wealth, units: Units) -> Wealth:
        self.given.append(len(units))
        return betting.advance(PROCESS, wealth, units)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6))
def test_however_a_stream_is_cut_it_comes_to_the_same_and_each_unit_is_seen_once(more: list[int]) -> None:
    resumed, counted, whole = Resumed[Wealth](shortest=8), Counted(), stream(8 + sum(more))
    lengths = [8 + sum(more[: k + 1]) for k in range(len(more))]
    found = [resumed.ask("harm", whole.first(n), betting.start(PROCESS), counted) for n in lengths]
    assert found == [betting.advance(PROCESS, betting.start(PROCESS), whole.first(n)) for n in lengths]
    assert sum(counted.given) == lengths[-1]


@pytest.mark.parametrize("changed", ["outcome", "treated", "probability", "baseline"])
def test_a_stream_of_which_one_unit_differs_is_followed_from_its_beginning(changed: str) -> None:
    resumed, counted, known = Resumed[Wealth](shortest=8), Counted(), stream(50)
    resumed.ask("harm", known, betting.start(PROCESS), counted)
    columns = {name: getattr(known, name).copy() for name in ("outcome", "treated", "probability", "baseline")}
    columns[changed][20] = not columns[changed][20] if changed == "treated" else 0.123
    other = Units.observed(**columns)
    assert resumed.ask("harm", other, betting.start(PROCESS), counted) == betting.advance(PROCESS, betting.start(PROCESS), other)
    assert counted.given == [50, 50]


def test_another_question_a_shorter_stream_and_another_stream_know_nothing_of_it() -> None:
    resumed, counted = Resumed[Wealth](shortest=8), Counted()
    for question, units in (("harm", stream(50)), ("fall", stream(50)), ("harm", stream(50).first(40)), ("harm", stream(50, first=0.9))):
        resumed.ask(question, units, betting.start(PROCESS), counted)
    assert counted.given == [50, 50, 40, 50]


def test_only_the_newest_streams_are_remembered() -> None:
    resumed, counted = Resumed[Wealth](most=50, shortest=8), Counted()
    for seed in (1, 2, 3, 1, 3):
        resumed.ask("harm", stream(20, seed=seed), betting.start(PROCESS), counted)
    assert counted.given == [20, 20, 20, 20]  # the last was known


def test_a_stream_longer_than_all_that_is_remembered_is_followed_whole_each_time() -> None:
    resumed, counted = Resumed[Wealth](most=50, shortest=8), Counted()
    for _ in range(2):
        resumed.ask("harm", stream(60), betting.start(PROCESS), counted)
    assert counted.given == [60, 60]


def test_what_is_too_short_is_not_remembered() -> None:
    resumed, counted = Resumed[Wealth](shortest=8), Counted()
    for _ in range(2):
        resumed.ask("harm", stream(7), betting.start(PROCESS), counted)
    assert counted.given == [7, 7]


def test_paths_of_evidence_and_detections_go_on_bit_for_bit() -> None:
    whole = stream(5000)
    detector = Detector(process=PROCESS, units_per_look=300)
    for units in (1500, 1501, 4000, 5000):
        part = whole.first(units)
        assert np.array_equal(betting.log_e_path_so_far(PROCESS, part), betting.log_e_path(PROCESS, part))
        found: Detection = shiryaev_roberts.detect(detector, part)
        assert found == shiryaev_roberts.advance(detector, shiryaev_roberts.start(detector), part)


def test_nobody_changes_what_others_are_given() -> None:
    path = betting.log_e_path_so_far(PROCESS, stream(2000))
    with pytest.raises(ValueError, match="read-only"):
        path[0] = 1.0
