"""Boxes that are open before somebody wants them: whoever sits down sits in one that lives, and none is left over."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from app.domain.errors import Refused
from app.domain.learning.boxes import Box, Boxes, BoxSpec
from app.sandbox.bubblewrap import USERS_FROM
from pipelines.rollouts.episode import AGENT
from pipelines.rollouts.grading import Grader, Verdict
from pipelines.rollouts.scratch import PREFIX, scratch
from pipelines.rollouts.seats import MOST_FOLDERS, Folders, Seats
from pipelines.rollouts.tasks import TaskData
from tests.architecture.sources import ROOT
from tests.integration.rollouts.practising import BOXES, LIBRARY

OTHER = replace(LIBRARY, key="other", files={"README": "another\n"})


@dataclass
class Counting:
    """Opens real boxes, and says of what."""

    inner: Boxes = BOXES
    opened: list[BoxSpec] = field(default_factory=list[BoxSpec])
    before: Callable[[], None] = lambda: None

    def open(self, spec: BoxSpec) -> Box:
        self.before()
        self.opened.append(spec)
        return self.inner.open(spec)

    @property
    def python(self) -> str:
        return self.inner.python

    def sweep(self) -> int:
        return self.inner.sweep()

    def describe(self) -> dict[str, object]:
        return self.inner.describe()


@pytest.fixture
def counting() -> Counting:
    return Counting()


@pytest.fixture
def seats(counting: Counting) -> Iterator[Seats]:
    made = Seats(counting, AGENT)
    yield made
    made.close()
    made.folders.remove()


def processes_of_our_boxes() -> list[str]:
    """Of this process alone: others may keep boxes on this machine too."""
    found: list[str] = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdigit() and (folder.stat().st_uid - USERS_FROM) // 256 == os.getpid():
                found.append(folder.name)
    return found


def prepared(seats: Seats, task: TaskData, count: int = 1) -> None:
    """Have a seat open, and wait until it is."""
    seats.prepare(task)
    until = time.monotonic() + 30
    while len(seats._waiting) < count and time.monotonic() < until:
        time.sleep(0.01)
    assert len(seats._waiting) == count


def test_who_comes_later_finds_a_box_open_and_the_same_files_as_everybody(seats: Seats, counting: Counting) -> None:
    prepared(seats, LIBRARY)
    seat = seats.take(LIBRARY)
    assert len(counting.opened) == 1, "it was taken, not opened"
    assert (
        seat.box.exec(["/bin/cat", "lib/numbers.py"], deadline_s=20, most_output_bytes=1000).stdout.decode()
        == LIBRARY.files["lib/numbers.py"]
    )
    second = seats.take(LIBRARY)
    assert [spec.workspace for spec in counting.opened] == [counting.opened[0].workspace] * 2, "laid out once"
    assert seat.socket.path != second.socket.path
    seat.box.put("lib/numbers.py", b"changed\n")
    assert dict(second.box.patch().files) == {}
    for one in (seat, second):
        one.leave()


def test_a_box_that_died_while_it_waited_is_given_to_nobody(seats: Seats, counting: Counting) -> None:
    prepared(seats, LIBRARY)
    waiting = seats._waiting[0]
    waiting.box.stop()
    seat = seats.take(LIBRARY)
    assert seat is not waiting
    assert seat.box.alive()
    assert not waiting.socket.path.exists()
    seat.leave()


def test_a_box_that_waited_too_long_is_given_to_nobody(seats: Seats) -> None:
    prepared(seats, LIBRARY)
    waiting = seats._waiting[0]
    waiting.opened_at -= 61.0
    seat = seats.take(LIBRARY)
    assert seat is not waiting
    assert not waiting.box.alive()
    seat.leave()


def test_a_box_lives_longer_than_its_task_whenever_it_was_opened(seats: Seats, counting: Counting) -> None:
    seats.take(LIBRARY).leave()
    assert counting.opened[0].lifetime_s == LIBRARY.deadline_s + 60.0 + 60.0, "its deadline, its end, and how long it may wait"


def test_the_box_of_a_grade_lives_longer_than_the_grade(counting: Counting) -> None:
    assert Grader(boxes=counting).grade(LIBRARY, LIBRARY.gold, seed=1).verdict is Verdict.PASSED
    assert counting.opened[0].lifetime_s == LIBRARY.grading_s + 30.0


def test_another_task_s_box_is_not_taken_and_makes_room(seats: Seats) -> None:
    prepared(seats, LIBRARY)
    first = seats._waiting[0]
    seat = seats.take(OTHER)
    assert seat is not first
    seats.prepare(OTHER)
    seats._wanted.join()
    assert [one.task.key for one in seats._waiting] == ["other"], "one in advance, and the oldest goes first"
    assert not first.box.alive()
    seat.leave()


def test_nothing_is_left_when_it_ends_and_nothing_is_begun_afterwards(seats: Seats, counting: Counting) -> None:
    prepared(seats, LIBRARY)
    seats.close()
    seats.prepare(LIBRARY)
    assert (seats._waiting, len(counting.opened)) == ([], 1)
    until = time.monotonic() + 20
    while processes_of_our_boxes() and time.monotonic() < until:
        time.sleep(0.02)
    assert processes_of_our_boxes() == []
    seats.take(LIBRARY).leave()


def test_what_cannot_be_opened_in_advance_is_refused_when_it_is_taken(seats: Seats, counting: Counting) -> None:
    def refuse() -> None:
        raise Refused("no boxes here")

    counting.before = refuse
    seats.prepare(LIBRARY)
    seats._wanted.join()
    with pytest.raises(Refused, match="no boxes here"):
        seats.take(LIBRARY)
    assert not list(scratch("look").parent.glob("socket-*")), "what was begun for it is gone"


def test_folders_that_nobody_uses_go_when_there_are_many(tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    used = folders.hold(LIBRARY)
    for number in range(MOST_FOLDERS + 3):
        task = replace(OTHER, key=str(number))
        folders.hold(task)
        folders.release(task)
    assert used.is_dir(), "somebody works in it"
    assert len(list(tmp_path.iterdir())) == MOST_FOLDERS
    folders.release(LIBRARY)
    folders.hold(replace(OTHER, key="last"))
    assert not used.exists()


def test_threads_that_begin_at_once_share_what_is_made_once(tmp_path: Path) -> None:
    program = (
        "from concurrent.futures import ThreadPoolExecutor as P; from pipelines.rollouts.scratch import scratch\n"
        "with P(16) as pool: print(len({path for path in pool.map(scratch, ['x'] * 64) if path.is_dir()}))"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = [subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
            for _ in range(5)]  # fmt: skip
    assert [one.stdout.strip() for one in done] == ["64"] * 5, done[-1].stderr


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    program = "import os; from pipelines.rollouts.scratch import scratch; print(scratch('grade'), flush=True); os.kill(os.getpid(), 9)"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}

    def run(text: str) -> str:
        done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    left = Path(run(program))
    assert left.is_dir()
    assert left.parent.name.startswith(PREFIX)
    (tmp_path / f"{PREFIX}{os.getpid()}").mkdir()
    (tmp_path / f"{PREFIX}notes").mkdir()
    assert Path(run("from pipelines.rollouts.scratch import scratch; print(scratch('grade'))")).parent.is_dir()
    assert not left.exists()
    assert (tmp_path / f"{PREFIX}{os.getpid()}").is_dir(), "its owner lives"
    assert (tmp_path / f"{PREFIX}notes").is_dir(), "it is nobody's of ours"
