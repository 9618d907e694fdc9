"""A run ends when what it waits for stands still, however busy everything else is, and never by a clock."""

from dataclasses import replace

import pytest

from app.domain.learning.cycles import CycleStatus
from app.domain.release.releases import ReleaseState
from app.domain.views.operations import LabelRow
from app.domain.views.rows import ProgressRow
from pipelines.commands.demonstration.stillness import Stillness
from tests.unit.pipelines.commands.test_demonstration import NOW, cycle, release, sight

LONGEST = 100.0


def label() -> LabelRow:
    return LabelRow(
        version="v", segment="", tier="", reward=0.0, exclusion=None, persistence=None, follow_up=None, success=None, tokens=None,
        finished_at=NOW, arm="champion",
    )  # fmt: skip


def work(task: str, done: float) -> ProgressRow:
    return ProgressRow(task=task, done=done, total=12, detail={}, updated_at=NOW)


def watching() -> Stillness:
    found = Stillness(longest_s=LONGEST)
    found.begin(0.0)
    return found


def test_labels_are_progress_while_the_loop_waits_for_them() -> None:
    still = watching()
    for second in range(0, 1000, 50):
        assert still.seen(replace(sight(), labels=tuple(label() for _ in range(second))), now=second) is None
    assert still.seen(replace(sight(), labels=tuple(label() for _ in range(950))), now=1060.0) == pytest.approx(110.0)


def test_labels_are_no_progress_of_an_update_that_hangs() -> None:
    still, running = watching(), sight(cycles=(cycle(CycleStatus.RUNNING, "batch"),))
    assert still.seen(running, now=1.0) is None
    assert still.seen(replace(running, labels=(label(), label())), now=LONGEST + 2) == pytest.approx(LONGEST + 1)


def test_a_micro_batch_is_progress() -> None:
    still, running = watching(), sight(cycles=(cycle(CycleStatus.RUNNING, "batch"),))
    for done in range(20):
        assert still.seen(replace(running, progress=(work("training", done),)), now=done * 90.0) is None


def test_a_canary_whose_units_only_the_holdback_counts_stands_still() -> None:
    still, canary = watching(), sight(releases=(release(ReleaseState.CANARY, stage=1),))
    assert still.seen(replace(canary, progress=(work("holdback", 1),)), now=0.0) is None
    assert still.seen(replace(canary, progress=(work("holdback", 2),)), now=LONGEST + 1) == pytest.approx(LONGEST + 1)


def test_a_new_wait_begins_anew() -> None:
    still = watching()
    still.seen(sight(), now=0.0)
    still.begin(90.0)
    assert still.seen(sight(), now=150.0) is None
