"""Answers that wait on the disk for a database that is away: kept before they are said to be, sent once it is back, by whoever lives."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import Engine

from app.db.ingestion.inbox import SqlInbox
from app.db.ingestion.spool import Spool, SpooledInbox
from app.domain.errors import Overloaded, Unavailable
from app.domain.ports import Inbox, Receipt
from app.domain.telemetry.events import CloudEvent, EventType
from app.domain.telemetry.streams import DeadLetter
from tests.fakes.inbox import MemoryInbox

AT = datetime(2026, 11, 24, tzinfo=UTC)
PATIENCE_S = 30.0


def event(id_: str, data: bytes = b"{}") -> CloudEvent:
    return CloudEvent(id=id_, source="api", type=EventType.TURN, time=AT, key="e1", data=data)


class Letters:
    """What was put aside; `away`, it takes nothing."""

    def __init__(self) -> None:
        self.dead: list[DeadLetter] = []
        self.away = False
        self.asked = 0

    def bury(self, dead: Sequence[DeadLetter], *, now: datetime) -> None:
        self.asked += 1
        if self.away:
            raise Unavailable("the database of the dead letters does not answer")
        self.dead += dead

    @property
    def ids(self) -> list[str]:
        return [letter.headers["ce_id"] for letter in self.dead]


class Moody(MemoryInbox):
    """An inbox that may be away, or silent."""

    def __init__(self) -> None:
        super().__init__()
        self.mood = "well"
        self.asked_here = 0

    async def append(self, events: Sequence[CloudEvent]) -> list[Receipt]:
        self.asked_here += threading.current_thread() is threading.main_thread()
        if self.mood == "away":
            raise Unavailable("the database does not answer")
        if self.mood == "silent":
            await asyncio.sleep(3600)
        return await super().append(events)

    @property
    def ids(self) -> list[str]:
        return [id_ for _, id_ in self.events]


@contextmanager
def spooled(inbox: Inbox, folder: Path, *, letters: Letters | None = None, **options: float) -> Iterator[SpooledInbox]:
    bury = (letters or Letters()).bury
    opened = SpooledInbox(inbox, Spool(folder), bury=bury, **({"patience_s": 0.1, "retry_s": 0.02, "sending_s": 0.5} | options))
    try:
        yield opened
    finally:
        opened.close()


def until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_while_the_inbox_is_there_nothing_touches_the_disk(tmp_path: Path) -> None:
    inbox = Moody()
    with spooled(inbox, tmp_path) as door:
        assert asyncio.run(door.append([event("1")])) == [Receipt.ACCEPTED]
        assert asyncio.run(door.append([event("1")])) == [Receipt.DUPLICATE]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mood", ["away", "silent"])
def test_what_comes_while_it_is_away_is_kept_and_sent_in_order_when_it_is_back(tmp_path: Path, mood: str) -> None:
    inbox = Moody()
    inbox.mood = mood
    with spooled(inbox, tmp_path) as door:
        for number in range(5):
            assert asyncio.run(door.append([event(f"{number}a"), event(f"{number}b")])) == [Receipt.ACCEPTED] * 2
        assert door.held_bytes > 0
        assert inbox.ids == []
        asyncio.run(door.append([event("9")]))
        assert inbox.asked_here == 1, "nobody but the sender asks an inbox that is away"
        inbox.mood = "well"
        until(lambda: door.held_bytes == 0)
    assert inbox.ids == [*(f"{number}{half}" for number in range(5) for half in "ab"), "9"]
    assert list(tmp_path.iterdir()) == []


def test_an_event_that_reached_a_silent_inbox_after_all_is_there_once(tmp_path: Path) -> None:
    class Late(Moody):
        async def append(self, events: Sequence[CloudEvent]) -> list[Receipt]:
            told = await MemoryInbox.append(self, events)
            await super().append([])
            return told

    inbox = Late()
    inbox.mood = "silent"
    with spooled(inbox, tmp_path) as door:
        asyncio.run(door.append([event("1")]))
        assert inbox.ids == ["1"]
        inbox.mood = "well"
        until(lambda: door.held_bytes == 0)
    assert inbox.ids == ["1"]


def test_a_commit_later_than_the_sender_s_patience_is_the_end_of_the_outage(tmp_path: Path, sqlite_engine: Engine) -> None:
    inbox = SqlInbox(sqlite_engine, free_bytes=lambda: 1 << 40)
    with spooled(inbox, tmp_path, sending_s=0.2) as door:
        with sqlite_engine.begin():
            asyncio.run(door.append([event("1")]))
            time.sleep(0.5)
        assert inbox.append_blocking([event("2")], timeout_s=5) == [Receipt.ACCEPTED]
        until(lambda: door.held_bytes == 0)
    inbox.close()


def test_an_inbox_that_is_full_is_heard(tmp_path: Path) -> None:
    inbox = Moody()
    inbox.refusing = True
    with spooled(inbox, tmp_path) as door, pytest.raises(Overloaded, match="ratchet relay"):
        asyncio.run(door.append([event("1")]))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_refuses_and_keeps_what_it_has(tmp_path: Path) -> None:
    spool = Spool(tmp_path, max_bytes=2_000)
    spool.put([event("1", b"x" * 1_000)])
    with pytest.raises(Overloaded, match="wait for the database"):
        spool.put([event("2", b"x" * 1_000)])
    waiting = spool.oldest()
    assert waiting is not None
    assert [kept.id for kept in waiting[1]] == ["1"]
    spool.close()


@contextmanager
def disk_full(*, from_byte: int = 0) -> Iterator[None]:
    """No file grows beyond so many bytes: files can be made, and what is written into them is refused by the system."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (from_byte, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_takes_nothing_is_no_reason_to_refuse_once_the_inbox_is_back(tmp_path: Path) -> None:
    inbox = Moody()
    inbox.mood = "away"
    with spooled(inbox, tmp_path) as door, disk_full():
        for number in range(3):
            with pytest.raises(Unavailable, match="the disk takes nothing"):
                asyncio.run(door.append([event(f"{number}")]))
        inbox.mood = "well"
        assert asyncio.run(door.append([event("3")])) == [Receipt.ACCEPTED]
    assert inbox.ids == ["3"]


def test_a_disk_that_takes_nothing_is_left_no_files_and_none_stay_open(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    opened = len(os.listdir("/proc/self/fd"))
    with disk_full():
        for _ in range(3):
            with pytest.raises(Unavailable, match="the disk takes nothing"):
                spool.put([event("1")])
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == opened
    spool.close()


def test_a_disk_that_filled_up_keeps_whole_events_only_and_what_comes_later_is_sent_too(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.put([event("1")])
    with disk_full(from_byte=spool.held_bytes + 100):
        with pytest.raises(Unavailable, match="the disk takes nothing"):
            spool.put([event("2", b"x" * 1_000)])
        waiting = spool.oldest()
        assert waiting is not None
        assert [kept.id for kept in waiting[1]] == ["1"]
        half_written = waiting[0].stat().st_size - spool.held_bytes
        spool.done(waiting[0])
    spool.put([event("3")])
    waiting = spool.oldest()
    assert waiting is not None
    assert [kept.id for kept in waiting[1]] == ["3"]
    spool.done(waiting[0])
    assert list(tmp_path.iterdir()) == []
    assert half_written == 0
    spool.close()


def test_of_a_long_outage_a_few_megabytes_at_a_time_are_read_into_memory(tmp_path: Path) -> None:
    spool, ids = Spool(tmp_path), list[list[str]]()
    for number in range(10):
        spool.put([event(f"{number}", b"x" * 2 * 1024**2)])
    while (waiting := spool.oldest()) is not None:
        ids.append([kept.id for kept in waiting[1]])
        spool.done(waiting[0])
    assert ids == [["0", "1", "2", "3"], ["4", "5", "6", "7"], ["8", "9"]]
    spool.close()


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_what_a_power_cut_left_half_written_is_no_event(tmp_path: Path, cut: int) -> None:
    first = Spool(tmp_path)
    first.put([event("1"), event("2")])
    first.put([event("3")])
    first.close()
    (file,) = tmp_path.iterdir()
    os.truncate(file, file.stat().st_size - cut)
    second = Spool(tmp_path)
    second.adopt()
    waiting = second.oldest()
    assert waiting is not None
    assert [kept.id for kept in waiting[1]] == ["1", "2"]
    second.close()


def test_a_byte_that_changed_on_the_disk_is_seen(tmp_path: Path) -> None:
    first = Spool(tmp_path)
    first.put([event("1")])
    first.put([event("2", b"0123456789")])
    first.close()
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b"0123456789", b"0123456780"))
    second = Spool(tmp_path)
    second.adopt()
    waiting = second.oldest()
    assert waiting is not None
    assert [kept.id for kept in waiting[1]] == ["1"]
    second.close()


DIES = """
import os, signal, sys
from pathlib import Path
from app.db.ingestion.spool import Spool
from tests.unit.app.db.test_spool import event
spool = Spool(Path(sys.argv[1]))
spool.put([event("1"), event("2")])
print("kept", flush=True)
if sys.argv[2] == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
sys.stdin.read()
"""


def another(folder: Path, end: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", DIES, str(folder), end]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, cwd=Path(__file__).parents[4])


def test_what_a_killed_process_kept_is_sent_by_the_next_one(tmp_path: Path) -> None:
    with another(tmp_path, "dies") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "kept\n"
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
    inbox = Moody()
    with spooled(inbox, tmp_path):
        until(lambda: inbox.ids == ["1", "2"])
    assert list(tmp_path.iterdir()) == []


def test_what_a_living_process_keeps_is_its_own(tmp_path: Path) -> None:
    with another(tmp_path, "lives") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "kept\n"
        mine = Spool(tmp_path)
        mine.adopt()
        assert mine.oldest() is None
        process.kill()
        process.wait()
        mine.adopt()
        waiting = mine.oldest()
        assert waiting is not None
        assert [kept.id for kept in waiting[1]] == ["1", "2"]
        mine.close()


def test_who_ends_sends_what_it_can(tmp_path: Path) -> None:
    inbox = Moody()
    inbox.mood = "away"
    door = SpooledInbox(inbox, Spool(tmp_path), bury=Letters().bury, patience_s=0.1, retry_s=0.02, sending_s=0.5)
    asyncio.run(door.append([event("1")]))
    inbox.mood = "well"
    door.close(patience_s=PATIENCE_S)
    assert inbox.ids == ["1"]
