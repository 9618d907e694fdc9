"""When a draft head is trained beside the loop, and that what trains it ends in time. The children are real processes."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pytest

from app.domain.errors import LeaseLost
from pipelines.commands.running.drafting import REST_S, Drafting
from tests.architecture.sources import ROOT

FOR_EVER = "import time; time.sleep(600)"


@dataclass
class World:
    """A deployment of one or two policies, and what was trained in it."""

    folder: Path
    script: str = "open({trained!r}, 'a').write({policy!r} + '\\n')"
    policies: tuple[str, ...] = ("composer",)
    records: set[str] = field(default_factory=set[str])
    answers: int = 100
    busy: Callable[[], bool] = lambda: False
    is_free: bool = True
    renew: Callable[[], None] = lambda: None
    terms: int = 0

    @property
    def trained(self) -> list[str]:
        """For whom a child ran to its end, in order."""
        path = self.folder / "trained"
        return path.read_text().split() if path.exists() else []

    def drafting(self) -> Drafting:
        """Over this world."""
        return Drafting(
            policies=self.policies, champion=lambda policy: f"champion-of-{policy}", has_record=lambda digest: digest in self.records,
            answers=lambda policy, digest: self.answers, after_answers=50, is_busy=lambda: self.busy(), term=self._term,
            command=lambda policy: [sys.executable, "-c", self.script.format(trained=str(self.folder / "trained"), policy=policy)],
            look_every_s=0.02,
        )  # fmt: skip

    @contextmanager
    def _term(self) -> Iterator[Callable[[], None] | None]:
        self.terms += 1
        yield (lambda: self.renew()) if self.is_free else None


@pytest.fixture
def world(tmp_path: Path) -> World:
    """One policy whose champion answered often and has no head."""
    return World(tmp_path)


def once(world: World) -> None:
    """One round, untold to stop."""
    world.drafting().once(threading.Event())


def test_each_champion_without_a_head_is_trained_for_in_turn(world: World) -> None:
    world.policies = ("composer", "tab", "chat")
    world.records.add("champion-of-tab")
    once(world)
    assert world.trained == ["composer", "chat"]
    assert world.terms == 2


@pytest.mark.parametrize(("answers", "trained"), [(49, []), (50, ["composer"])])
def test_a_champion_has_answered_often_enough_at_the_number_that_was_set(world: World, answers: int, trained: list[str]) -> None:
    world.answers = answers
    once(world)
    assert world.trained == trained


def test_nothing_is_trained_while_a_cycle_runs_or_another_process_trains(world: World) -> None:
    world.busy = lambda: True
    once(world)
    assert world.terms == 0
    world.busy, world.is_free = lambda: False, False
    once(world)
    assert world.terms == 1
    assert world.trained == []


def test_what_another_process_trained_meanwhile_is_not_trained_again(world: World) -> None:
    asked = iter([False, True])
    replace(world.drafting(), has_record=lambda digest: next(asked)).once(threading.Event())
    assert world.trained == []


def told_to_write_its_number(world: World) -> Path:
    """A child that says who it is and goes on for ever."""
    world.script = f"import os; open({str(world.folder / 'pid')!r} + '.new', 'w').write(str(os.getpid())); " + (
        f"os.rename({str(world.folder / 'pid')!r} + '.new', {str(world.folder / 'pid')!r}); {FOR_EVER}"
    )
    return world.folder / "pid"


def is_gone(pid: int) -> bool:
    """Whether no such process runs."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_cycle_that_begins_ends_the_training_and_it_begins_anew_afterwards(world: World, caplog: pytest.LogCaptureFixture) -> None:
    number = told_to_write_its_number(world)
    world.busy = number.exists
    with caplog.at_level(logging.INFO):
        once(world)
    assert is_gone(int(number.read_text()))
    assert "event=draft_head_waits" in caplog.text
    number.unlink()
    world.script = World.script
    once(world)
    assert world.trained == ["composer"]


def test_a_process_that_is_told_to_stop_takes_its_training_along(world: World) -> None:
    number, stop = told_to_write_its_number(world), threading.Event()
    world.policies = ("composer", "tab")
    thread = threading.Thread(target=world.drafting().once, args=(stop,))
    thread.start()
    while not number.exists():
        time.sleep(0.01)
    stop.set()
    thread.join()
    assert is_gone(int(number.read_text()))
    assert world.terms == 1, "nothing is begun for the next policy"


def test_a_process_that_lost_its_right_ends_its_training_and_says_so(world: World) -> None:
    number = told_to_write_its_number(world)

    def lost() -> None:
        if number.exists():
            raise LeaseLost("taken over")

    world.renew = lost
    with pytest.raises(LeaseLost):
        once(world)
    assert is_gone(int(number.read_text()))


def test_a_training_that_breaks_says_why_and_rests_an_hour(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.script = "raise SystemExit('first line\\nno memory left')"
    drafting = world.drafting()
    drafting.once(threading.Event())
    assert "event=draft_head_failed policy=composer digest=champion-of- error=no memory left" in caplog.text
    rest = drafting.rests["champion-of-composer"] - time.monotonic()
    assert REST_S - 60 < rest <= REST_S
    drafting.once(threading.Event())
    assert world.terms == 1, "it rests"
    drafting.rests["champion-of-composer"] = time.monotonic()
    world.script = "raise SystemExit(3)"
    caplog.clear()
    drafting.once(threading.Event())
    assert world.terms == 2
    assert "error=exit code 3" in caplog.text


def test_whatever_else_wants_a_processor_has_it_first(world: World) -> None:
    world.script = "import os; open({trained!r}, 'w').write(str(os.nice(0)) + {policy!r}[:0])"
    once(world)
    assert world.trained == ["19"]


def test_a_training_dies_with_a_process_that_is_killed(world: World) -> None:
    number = told_to_write_its_number(world)
    parent = (
        "import sys, tempfile\nfrom pipelines.commands.running.drafting import running\n"
        f"with tempfile.TemporaryFile() as told, running([sys.executable, '-c', {world.script!r}], environment={{}}, told=told) as child:\n"
        "    child.wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}) as running:
        while not number.exists():
            assert running.poll() is None
            time.sleep(0.02)
        running.send_signal(signal.SIGKILL)
    until = time.monotonic() + 30
    while not is_gone(int(number.read_text())):
        assert time.monotonic() < until
        time.sleep(0.02)
