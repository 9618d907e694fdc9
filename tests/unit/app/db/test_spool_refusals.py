"""What the inbox refuses for ever does not stop what waits behind it: it is put aside among the dead letters, and nothing else is."""

import asyncio
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from app.db.ingestion.spool import Spool, SpooledInbox
from app.domain.errors import BadRequest, Overloaded, OwnFault, Unavailable
from app.domain.ports import Receipt
from app.domain.telemetry.events import CloudEvent
from tests.unit.app.db.test_spool import Letters, Moody, event, spooled, until


class Strict(Moody):
    """An inbox that raises an error wherever an event of these ids is among what it is given."""

    def __init__(self, error: Callable[[], Exception], *ids: str) -> None:
        super().__init__()
        self.error, self.refused_ids = error, set(ids)
        self.refusals: Counter[str] = Counter()

    async def append(self, events: Sequence[CloudEvent]) -> list[Receipt]:
        bad = [event.id for event in events if event.id in self.refused_ids]
        if self.mood == "well" and bad:
            self.refusals.update(bad)
            raise self.error()
        return await super().append(events)


def kept_while_away(inbox: Moody, door: SpooledInbox, ids: Sequence[str]) -> None:
    inbox.mood = "away"
    for id_ in ids:
        assert asyncio.run(door.append([event(id_, b'{"said":"' + id_.encode() + b'"}')])) == [Receipt.ACCEPTED]
    inbox.mood = "well"


@pytest.mark.parametrize(
    ("error", "reason"),
    [(lambda: BadRequest("key is too long"), "key is too long"), (lambda: TypeError("no bytes"), "TypeError: no bytes")],
    ids=["refused", "unexpected"],
)
def test_what_the_inbox_refuses_for_ever_is_put_aside_and_the_rest_goes_on(
    tmp_path: Path, error: Callable[[], Exception], reason: str
) -> None:
    inbox, letters = Strict(error, "3", "4"), Letters()
    with spooled(inbox, tmp_path, letters=letters) as door:
        kept_while_away(inbox, door, [f"{number}" for number in range(10)])
        until(lambda: door.held_bytes == 0)
        assert asyncio.run(door.append([event("later")])) == [Receipt.ACCEPTED]
    assert inbox.ids == ["0", "1", "2", "5", "6", "7", "8", "9", "later"]
    assert letters.ids == ["3", "4"]
    assert [(letter.payload, letter.reason) for letter in letters.dead] == [(b'{"said":"3"}', reason), (b'{"said":"4"}', reason)]
    assert {letter.topic for letter in letters.dead} == {"spool"}
    assert len({letter.offset for letter in letters.dead}) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error",
    [
        lambda: Unavailable("away"), lambda: Overloaded("full", retry_after_s=1.0), lambda: OwnFault("another schema"),
        lambda: TimeoutError("late"), lambda: OSError(28, "no space left"), MemoryError,
    ],
    ids=["away", "full", "schema", "late", "disk", "memory"],
)  # fmt: skip
def test_what_may_be_taken_later_waits_and_nothing_is_put_aside(tmp_path: Path, error: Callable[[], Exception]) -> None:
    inbox, letters = Strict(error, "1"), Letters()
    with spooled(inbox, tmp_path, letters=letters) as door:
        kept_while_away(inbox, door, ["0", "1", "2"])
        until(lambda: inbox.refusals["1"] > 5)
        assert door.held_bytes > 0
        inbox.refused_ids.clear()
        until(lambda: door.held_bytes == 0)
    assert sorted(inbox.ids) == ["0", "1", "2"]
    assert letters.dead == []


def test_a_failure_that_nobody_expected_and_that_passes_puts_nothing_aside(tmp_path: Path) -> None:
    inbox, letters = Strict(lambda: RuntimeError("once"), "1"), Letters()

    def once() -> Exception:
        inbox.refused_ids.clear()
        return RuntimeError("once")

    inbox.error = once
    with spooled(inbox, tmp_path, letters=letters) as door:
        kept_while_away(inbox, door, ["1"])
        until(lambda: door.held_bytes == 0)
    assert (inbox.ids, letters.dead) == (["1"], [])


def test_where_every_event_fails_as_nobody_expected_the_fault_is_ours_and_everything_waits(tmp_path: Path) -> None:
    ids = [f"{number}" for number in range(20)]
    before = Spool(tmp_path)
    before.put([event(id_) for id_ in ids])
    before.close()
    inbox, letters = Strict(lambda: TypeError("a bug"), *ids), Letters()
    with spooled(inbox, tmp_path, letters=letters) as door:
        until(lambda: inbox.refusals["19"] > 20)
        assert letters.dead == []
        inbox.refused_ids.clear()
        until(lambda: door.held_bytes == 0)
    assert sorted(inbox.ids, key=int) == ids, "in whatever order: the cause may go in the middle of an attempt"


def test_what_cannot_be_put_aside_yet_stays_where_it_is(tmp_path: Path) -> None:
    inbox, letters = Strict(lambda: TypeError("a bug"), "1"), Letters()
    letters.away = True
    with spooled(inbox, tmp_path, letters=letters) as door:
        kept_while_away(inbox, door, ["0", "1", "2"])
        until(lambda: letters.asked > 10)
        assert door.held_bytes > 0
        letters.away = False
        until(lambda: door.held_bytes == 0)
    assert (inbox.ids, letters.ids) == (["0", "2"], ["1"])


def test_the_same_event_is_put_aside_at_the_same_place_and_another_at_another(tmp_path: Path) -> None:
    inbox, letters = Strict(lambda: BadRequest("no"), "1", "2"), Letters()
    with spooled(inbox, tmp_path, letters=letters) as door:
        for ids in (["1"], ["1"], ["2"]):
            kept_while_away(inbox, door, ids)
            until(lambda: door.held_bytes == 0)
    assert letters.ids == ["1", "1", "2"]
    assert [letter.offset == letters.dead[0].offset for letter in letters.dead] == [True, True, False]
    assert all(0 <= letter.offset < 2**53 for letter in letters.dead)


def test_what_is_whole_and_no_event_of_this_version_is_put_aside_as_it_lies(tmp_path: Path) -> None:
    other = msgspec.msgpack.encode({"id": "x", "source": "of another version"})
    first = Spool(tmp_path)
    first.put([event("1"), event("2")])
    first.close()
    (file,) = tmp_path.iterdir()
    file.write_bytes(struct.pack("<II", len(other), zlib.crc32(other)) + other + file.read_bytes())
    inbox, letters = Moody(), Letters()
    with spooled(inbox, tmp_path, letters=letters):
        until(lambda: inbox.ids == ["1", "2"])
    (letter,) = letters.dead
    assert (letter.topic, letter.payload, letter.headers) == ("spool", other, {})
    assert "missing required field" in letter.reason
    assert list(tmp_path.iterdir()) == []
