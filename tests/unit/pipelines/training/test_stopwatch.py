"""What a run computed, in seconds: blocks add up, also those that raise."""

import time

import pytest

from pipelines.training.progress import Progress
from pipelines.training.stopwatch import Laps, Stopwatch


def test_blocks_add_up_from_nothing() -> None:
    watch = Stopwatch()
    assert watch.seconds == 0.0
    with watch.running():
        time.sleep(0.02)
    first = watch.seconds
    assert 0.02 <= first < 0.9
    time.sleep(0.05)
    with pytest.raises(ValueError, match="broke"), watch.running():
        time.sleep(0.02)
        raise ValueError("broke")
    assert watch.seconds - first >= 0.02


def test_each_lap_begins_where_the_one_before_ended_and_is_told_in_thousandths() -> None:
    began = time.monotonic()
    laps = Laps()
    assert laps.seconds == {}
    time.sleep(0.03)
    laps.end("read")
    time.sleep(0.01)
    for name in range(40):
        laps.end(str(name))
    whole = time.monotonic() - began
    assert 0.03 <= laps.seconds["read"] < 0.9
    assert 0.01 <= laps.seconds["0"] < 0.9, "without what was read before"
    assert sum(laps.seconds.values()) <= whole + 42 * 0.0005
    assert all(seconds == round(seconds, 3) for seconds in laps.seconds.values())
    assert len(laps.seconds) == 41


def test_an_update_that_has_not_begun_has_taken_no_step() -> None:
    begun = Progress()
    assert (begun.next_step, begun.dtype) == (0, "")
    assert not any((begun.anchor, begun.kept, begun.start, begun.steps, begun.histogram, begun.lessons, begun.corrections))
