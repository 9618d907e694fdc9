"""How long things are kept, what is taken up again from where it was buried, and what travels from box to box."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from math import inf
from typing import Any, cast

import msgspec
import pytest

from app.domain.errors import BadConfig, BadInput, NotFound
from app.domain.learning.boxes import BoxSpec, Limits, checked_patch, checked_path, travels
from app.domain.retention import Retention, days, retention
from app.domain.telemetry.dead_letters import letter_of, replay, told, told_whole
from app.domain.telemetry.streams import DeadLetter, EffectBatch, EffectStore, StoredDeadLetter
from tests.fakes.served import at, observation

NOW = datetime(2026, 11, 24, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    "toml",
    [
        {"segments_days": 90.0, "turns_days": 90.0}, {"inbox_days": 30.0, "dedupe_days": 30.0}, {"labels_days": 90.0},
        {"turns_days": inf}, {"turns_days": inf, "segments_days": inf, "labels_days": inf}, {"inbox_days": 0.001}, {"compact_bytes": 1},
    ],
)  # fmt: skip
def test_what_is_within_what_it_depends_on_may_be_kept(toml: dict[str, Any]) -> None:
    assert isinstance(retention({"retention": toml}), Retention)


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ({"segments_days": 90.5}, "segments_days is above turns_days"), ({"labels_days": 90.5}, "labels_days is above turns_days"),
        ({"inbox_days": 30.5}, "inbox_days is above dedupe_days"), ({"inbox_days": inf}, "inbox_days is above dedupe_days"),
        ({"segments_days": inf}, "segments_days is above"), ({"compact_after_h": 0.0}, "compact_after_h is 0"),
        ({"compact_bytes": 0}, "compact_bytes is 0"), ({"exposures_days": -1.0}, "exposures_days is -1"),
        ({"labels_days": "long"}, "labels_days"),
    ],
)  # fmt: skip
def test_what_could_not_be_kept_to_is_refused(toml: dict[str, Any], said: str) -> None:
    with pytest.raises(BadConfig, match=said):
        retention({"retention": toml})


def test_none_is_for_ever_and_a_half_is_twelve_hours() -> None:
    assert Retention(turns_days=None, segments_days=None, labels_days=None, dedupe_days=None).horizon is None
    assert Retention().horizon == timedelta(days=30)
    with pytest.raises(ValueError, match="labels_days is above"):
        Retention(labels_days=None)
    assert (days(None), days(inf), days(0.5)) == (None, None, timedelta(hours=12))
    assert retention({}) == Retention()


class Letters:
    """Letters in a list."""

    def __init__(self, *stored: StoredDeadLetter) -> None:
        self.stored = stored
        self.failed: list[tuple[int, str, datetime]] = []
        self.asked: list[tuple[bool, int, int]] = []

    def find(
        self, *, ids: Sequence[int] = (), reason: str | None = None, pending: bool = True, after: int = 0, limit: int = 1_000
    ) -> list[StoredDeadLetter]:
        self.asked.append((pending, after, limit))
        found = [one for one in self.stored if one.id > after and (not ids or one.id in ids) and (reason or "") in one.letter.reason]
        return found[:limit]

    def failed_again(self, id_: int, reason: str, *, now: datetime) -> None:
        self.failed.append((id_, reason, now))


class Store:
    """Remembers what was applied."""

    def __init__(self) -> None:
        self.batches: list[EffectBatch] = []

    def apply(self, batch: EffectBatch, *, now: datetime) -> None:
        self.batches.append(batch)


GOOD = msgspec.json.encode(observation("o", of="t"))


def letter(id_: int, payload: bytes = GOOD, headers: Mapping[str, str] | None = None) -> StoredDeadLetter:
    kept = DeadLetter(
        topic="events", partition=3, offset=40 + id_, payload=payload, reason="it made no sense",
        headers={"ce_type": "ratchet.observation.v1", "ce_id": f"e{id_}", "ce_source": "api"} if headers is None else headers,
    )  # fmt: skip
    return StoredDeadLetter(id=id_, letter=kept, attempts=2, first_seen_at=NOW - timedelta(days=1), last_seen_at=NOW, replayed_at=None)


def replayed(letters: Letters, **more: Any) -> tuple[Any, Store]:
    store = Store()
    return replay(letters, cast("EffectStore", store), clock=lambda: NOW, **more), store


def test_letters_that_make_sense_are_applied_one_by_one_and_the_others_stay_with_their_reason() -> None:
    deep = letter(3, b"[" * 100_000)
    letters = Letters(letter(1), letter(2, b"{"), deep, letter(4))
    done, store = replayed(letters)
    assert (done.applied, sorted(done.still), done.after) == (2, [2, 3], None)
    assert [batch.replayed_dead_letters for batch in store.batches] == [(1,), (4,)]
    assert [(id_, when) for id_, _, when in letters.failed] == [(2, NOW), (3, NOW)]
    assert letters.asked == [(True, 0, 200)]
    replayed(letters, ids=[4], after=2)
    assert letters.asked[-1] == (False, 2, 200), "one that is named is found although it was replayed"


def test_a_full_page_says_where_the_next_one_begins() -> None:
    full = Letters(*(letter(n + 1) for n in range(200)))
    assert replayed(full)[0].after == 200
    assert replayed(Letters(*full.stored[:199]))[0].after is None


@pytest.mark.parametrize(
    ("micros", "received"),
    [
        ("1732449600000001", datetime(2024, 11, 24, 12, 0, 0, 1, tzinfo=UTC)), ("0", datetime(1970, 1, 1, tzinfo=UTC)),
        ("9" * 18, NOW - timedelta(days=1)), ("-1", NOW - timedelta(days=1)), ("", NOW - timedelta(days=1)),
        ("soon", NOW - timedelta(days=1)),
        ("6" + "0" * 16, datetime(3871, 4, 29, 10, 40, tzinfo=UTC)),
    ],
)  # fmt: skip
def test_a_letter_counts_from_when_it_came_in(micros: str, received: datetime) -> None:
    fresh = msgspec.json.encode(observation("o", of="t", occurred_at=at(0)))
    headers = {"ce_type": "ratchet.observation.v1", "ce_ratchetreceived": micros}
    letters = Letters(letter(7, fresh, headers))
    done, store = replayed(letters)
    if received.year < 2026:
        assert "in the future" in done.still[7]
        return
    (event,) = store.batches[0].events
    assert event.received_at == received
    assert (event.id, event.source) == ("events:3:47", "dlq"), "who has no name is called by where it lay"
    assert (event.delivery.topic, event.delivery.partition, event.delivery.offset) == ("replay-7-events", 3, 47)


def test_a_letter_is_told_without_what_it_says_and_whole() -> None:
    stored = letter(7, b"\xff{")
    letters = Letters(stored)
    assert letter_of(letters, 7) is stored
    assert [pending for pending, _, _ in letters.asked] == [False], "one that was replayed is found too"
    assert told(stored) == {
        "id": 7, "topic": "events", "partition": 3, "offset": 47, "reason": "it made no sense", "attempts": 2,
        "first_seen_at": NOW - timedelta(days=1), "last_seen_at": NOW, "replayed_at": None,
    }  # fmt: skip
    assert told_whole(stored) == told(stored) | {"headers": dict(stored.letter.headers), "payload": "\\xff{"}
    with pytest.raises(NotFound, match="there is no dead letter 8"):
        letter_of(Letters(stored), 8)


@pytest.mark.parametrize("path", ["a", "a/b.py", ".hidden", "a b/c", "..a", "é"])
def test_a_path_within_a_workspace_is_taken_as_it_is(path: str) -> None:
    assert checked_path(path) == path


@pytest.mark.parametrize("path", ["", ".", "/a", "../a", "a/../b", "a//b", "a/", "./a", "a\0b", "a/./b"])
def test_a_path_that_leads_elsewhere_or_is_written_another_way_is_refused(path: str) -> None:
    with pytest.raises(BadInput, match="is no path within a workspace"):
        checked_path(path)


def test_a_patch_is_so_many_files_of_text_and_no_cache() -> None:
    files: dict[str, bytes | None] = {f"f{n}": b"x" for n in range(2000)}
    assert len(checked_patch(files | {"__pycache__/a.pyc": b"\xff", ".git/config": b"c", "a/.pytest_cache/b": None}).files) == 2000
    with pytest.raises(BadInput, match="2001 files and may have 2000, of 8 MiB"):
        checked_patch(files | {"one": None})
    assert checked_patch({"a": b"x" * (8 << 20), "gone": None}).files["gone"] is None
    with pytest.raises(BadInput, match="the patch has 2 files"):
        checked_patch({"a": b"x" * (8 << 20), "b": b"x"})
    with pytest.raises(BadInput, match="no UTF-8 text"):
        checked_patch({"a": b"\xff"})
    with pytest.raises(BadInput, match="no path within"):
        checked_patch({"../a": b"x"})
    assert [travels(path) for path in ("a.py", "a/__pycache__/b", ".gitignore", "x/.git")] == [True, False, True, False]


def test_a_patch_is_known_by_what_it_changes() -> None:
    one, same = checked_patch({"a": b"1", "b": None}), checked_patch({"b": None, "a": b"1"})
    others = [{"a": b"1"}, {"a": b"1", "b": b""}, {"a": b"2", "b": None}, {"c": b"1", "b": None}, {"a": None, "b": None}]
    assert one.digest == same.digest
    assert len({one.digest, *(checked_patch(cast("dict[str, bytes | None]", other)).digest for other in others)}) == 6


@pytest.mark.parametrize(
    ("folder", "good"),
    [("/tests", True), ("/a_b", True), ("/a/b", False), ("tests", False), ("/a-b", False), ("/usr", False), ("/work", False), ("/", False)],
)
def test_a_folder_of_its_own_has_a_plain_word_for_its_name(folder: str, good: bool) -> None:
    limits = Limits(cpu_s=1, memory_bytes=1, file_bytes=1)
    if good:
        assert BoxSpec(limits=limits, scratch=(folder,)).scratch == (folder,)
        return
    with pytest.raises(BadInput, match="no folder of one plain word"):
        BoxSpec(limits=limits, scratch=("/good", folder))
