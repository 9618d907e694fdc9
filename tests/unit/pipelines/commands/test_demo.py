"""How the demo sums up, what it says of its compression, and how it ends early or goes on."""

import threading
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner
from rich.console import Console

from app.domain.errors import BadConfig
from app.domain.learning.cycles import CycleStatus
from pipelines.commands.demo import _announce, _shares, _stay, _sum_up, _told, demo
from pipelines.commands.demonstration.outcome import Outcome
from pipelines.commands.demonstration.planning import Part
from pipelines.commands.demonstration.profiles import PROFILES, write_config
from pipelines.commands.demonstration.screen import Screen
from pipelines.commands.demonstration.story import Ended
from tests.unit.pipelines.commands.test_demonstration import cycle, sight
from tests.unit.pipelines.commands.test_stillness import label


def screen() -> tuple[Screen, StringIO]:
    file = StringIO()
    return Screen(title="", url="", console=Console(file=file, width=400)), file


def deployment(folder: Path, url: str = "") -> Any:
    settings = SimpleNamespace(config=write_config(PROFILES["tiny"], folder / "demo", slot_s=30), database_url=url, inbox_url=url)
    return SimpleNamespace(url="http://127.0.0.1:8400", logs=folder / "logs", settings=settings)


def test_the_summary_counts_answers_events_and_the_seconds_of_each_cycle_the_oldest_first() -> None:
    older, newer = (replace(cycle(CycleStatus.DONE, "judge"), timings={"train": seconds}) for seconds in (1.0, 2.0))
    seen = replace(sight(cycles=(newer, older)), labels=(label(), label()), waiting_turns=3, accepted_events=7)
    outcome = Outcome(model="tiny", seed=1)
    story: Any = SimpleNamespace(forecast=SimpleNamespace(took=[(Part.START, 4.0)]), last_sight=lambda: seen)
    _sum_up(story, outcome, time.monotonic() - 12.0)
    assert 12.0 <= outcome.wall_s < 30.0
    assert (outcome.answers, outcome.events, outcome.parts) == (5, 7, [(Part.START, 4.0)])
    assert outcome.stages_s == {"train": [1.0, 2.0]}
    blind = Outcome(model="tiny", seed=1)
    story.last_sight = lambda: None
    _sum_up(story, blind, time.monotonic())
    assert (blind.answers, blind.stages_s, blind.parts) == (0, {}, [(Part.START, 4.0)])


@pytest.mark.parametrize(
    ("ends", "trouble"), [(Ended("nothing has moved"), "nothing has moved"), (KeyboardInterrupt(), "it was interrupted"), (None, None)]
)
def test_a_story_that_ends_early_leaves_its_reason(
    tmp_path: Path, sqlite_url: str, ends: BaseException | None, trouble: str | None
) -> None:
    told: list[object] = []

    def tell(operations: object) -> None:
        told.append(operations)
        if ends is not None:
            raise ends

    outcome = Outcome(model="tiny", seed=1)
    _told(cast("Any", SimpleNamespace(tell=tell)), deployment(tmp_path, sqlite_url), outcome)
    assert (outcome.trouble, len(told)) == (trouble, 1)


def test_the_demo_says_where_to_look_and_what_is_compressed(tmp_path: Path) -> None:
    shown, file = screen()
    _announce(shown, deployment(tmp_path), PROFILES["tiny"])
    first, second = file.getvalue().splitlines()
    assert f"console: http://127.0.0.1:8400/console   logs: {tmp_path}/logs" in first
    assert "non-inferiority margins of 20% (production: 1.5 %)" in second
    assert _shares(deployment(tmp_path)) == (0.3, 0.5)


class Hasty(threading.Event):
    """Waits for nothing, and keeps how long it should have."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waited.append(timeout)
        return self.is_set()


class Played:
    """A supervisor whose processes crash once."""

    def __init__(self, *, loop: int | None) -> None:
        self.loop, self.started, self.looked = loop, list[str](), 0
        self.ended = Hasty()

    def pid(self, name: str) -> int | None:
        return self.loop

    def start(self, name: str) -> None:
        self.started.append(name)

    def check(self) -> list[str]:
        self.looked += 1
        if self.looked == 2:
            self.ended.set()
        return ["relay ended (exit code 3)"] if self.looked == 1 else []


@pytest.mark.parametrize(("loop", "started"), [(None, ["loop"]), (7, [])])
def test_who_stays_has_the_loop_running_and_hears_of_crashes_until_they_leave(loop: int | None, started: list[str]) -> None:
    shown, file = screen()
    played = Played(loop=loop)
    _stay(cast("Any", played), shown, played.ended)
    assert (played.started, played.looked, played.ended.waited) == (started, 2, [0.5] * 3)
    assert file.getvalue().count("relay ended (exit code 3)") == 1


@pytest.mark.parametrize(
    "words", [("--model", "large"), ("--port", "0"), ("--port", "65536"), ("--minutes", "0.4"), ("--seed", "x"), ("--picture", "/")]
)
def test_a_demo_of_what_there_is_not_is_no_command(words: tuple[str, str]) -> None:
    assert CliRunner().invoke(demo, words).exit_code == 2


@pytest.mark.parametrize("slot", ["soon", "4s"])
def test_a_slot_that_is_no_time_or_too_short_is_refused_before_anything_starts(tmp_path: Path, slot: str) -> None:
    ran = CliRunner().invoke(demo, ["--model", "tiny", "--slot", slot, "--data", str(tmp_path / "data")])
    assert isinstance(ran.exception, BadConfig)
    assert not (tmp_path / "data" / "ratchet.toml").exists()
