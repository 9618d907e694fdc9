"""What is left of a person who was erased: a proof, not a guess, so it reads everything. `ratchet erase --verify`."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from sqlalchemy import ColumnElement, Connection, Engine, Table, Text, cast, func, or_, select

from app.db.access.erasures import FULL, contains
from app.db.chunks import chunked, one_of
from app.db.engine import reading
from app.db.ingestion.segment_rows import WRITING
from app.db.tables import (
    batch_items,
    blind_pairs,
    dead_letters,
    exposures,
    holdout_people,
    inbox,
    labels,
    observations,
    outbox,
    returned_items,
    segments,
    turn_words,
    turns,
)
from app.domain.ids import utc_now

READ_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One place that was looked into."""

    place: str
    found: int
    """How much was found there; 0 is what an erasure promises."""
    cure: str = ""


class EveryFile(Protocol):
    """The files that turns' words lie in."""

    def names(self) -> list[str]:
        """Every segment there is."""
        ...

    def claims(self, before: datetime) -> list[str]:
        """Segments that gateways wrote before that moment, ahead of their events."""
        ...

    def turns(self, name: str) -> list[str]:
        """Ids of the turns whose words a segment holds."""
        ...


class SqlTraces:
    """Looks into every place that holds what people said: inbox, tables, segments, topics, exports, and folders of files."""

    def __init__(
        self,
        state: Engine,
        inbox_engine: Engine,
        *,
        files: EveryFile,
        topics: Callable[[bytes], Mapping[str, int]],
        exported: Callable[[], Iterable[str]],
        folders: Iterable[Path],
        stored: Mapping[str, Callable[[bytes], int]] = {},
    ) -> None:
        """`stored`: places in object storage by their URL, each with what counts the files that hold some bytes."""
        self._state = state
        self._inbox = inbox_engine
        self._files = files
        self._topics = topics
        self._exported = exported
        """Ids of the turns that exports hold copies of: packed, and nobody is named in them."""
        self._folders = list(folders)
        self._stored = stored

    def find(self, actor: str) -> list[Trace]:
        """Every place with what of the person is left there; raises `Unavailable` where a place cannot be looked into."""
        shells = self._shells()
        return [
            *self._in_tables(actor),
            *self._in_inbox(actor, shells),
            *self._in_segments(shells),
            *(
                Trace(place=f"topic {name}", found=count, cure="its records go with its retention")
                for name, count in self._topics(actor.encode()).items()
            ),
            Trace(place="exports", found=len(shells.intersection(self._exported())), cure="a copy of theirs: delete it, export anew"),
            *(Trace(place=f"files in {folder}", found=_files_with(folder, actor.encode())) for folder in self._folders),
            *(Trace(place=f"files in {url}", found=files_with(actor.encode())) for url, files_with in self._stored.items()),
        ]  # fmt: skip

    def _shells(self) -> set[str]:
        with reading(self._state) as connection:
            return set(connection.execute(select(turns.c.inference_id).where(turns.c.erased_at.is_not(None))).scalars())

    def _in_tables(self, actor: str) -> Iterator[Trace]:
        again = "run `ratchet erase` again"
        erased = select(turns.c.inference_id).where(turns.c.erased_at.is_not(None))
        with reading(self._state) as connection:
            for table in (turns, observations, labels, batch_items, returned_items, exposures):
                yield Trace(place=f"table {table.name}", found=_count(connection, table, table.c.actor == actor), cure=again)
            yield Trace(place="table blind_pairs", found=_count(connection, blind_pairs, blind_pairs.c.cluster == actor), cure=again)
            followed = _count(connection, holdout_people, holdout_people.c.person == actor)
            yield Trace(place="table holdout_people", found=followed, cure=again)
            words = or_(
                turns.c.completion != "",
                cast(turns.c.tool_calls, Text) != "[]",
                turns.c.actor.is_not(None),
                turns.c.payload_segment.is_not(None),
            )
            yield Trace(place="shells with words", found=_count(connection, turns, turns.c.erased_at.is_not(None) & words), cure=again)
            apart = _count(connection, turn_words, turn_words.c.inference_id.in_(erased))
            yield Trace(place="words beside shells", found=apart, cure=again)
            said = observations.c.inference_id.in_(erased)
            yield Trace(place="observations about shells", found=_count(connection, observations, said), cure=again)
            for table in (dead_letters, outbox):
                named = contains(connection, table.c.payload, actor)
                yield Trace(place=f"table {table.name}, payloads", found=_count(connection, table, named), cure=again)

    def _in_inbox(self, actor: str, shells: set[str]) -> Iterator[Trace]:
        with reading(self._inbox) as connection:
            named = contains(connection, inbox.c.payload, actor) & (inbox.c.key != actor)
            found = _count(connection, inbox, named)
            found += sum(_count(connection, inbox, one_of(connection, inbox.c.key, some) & FULL) for some in chunked(sorted(shells)))
        yield Trace(place="inbox payloads", found=found, cure="run `ratchet erase` again once ingestion has caught up")

    def _in_segments(self, shells: set[str]) -> Iterator[Trace]:
        with reading(self._state) as connection:
            known = {row.name: row.state for row in connection.execute(select(segments.c.name, segments.c.state))}
        names = self._files.names()
        unknown = [name for name in names if name not in known]
        every = [*names, *self._files.claims(utc_now())]
        held = sum(len(shells.intersection(self._files.turns(name))) for name in every)
        yield Trace(place=f"segments ({len(every)} files)", found=held, cure="run `ratchet erase` again")
        yield Trace(place="segments that no row knows", found=len(unknown), cure="run `ratchet erase --sweep`")
        begun = sum(state == WRITING for state in known.values())
        yield Trace(place="segments begun and not finished", found=begun, cure="ingestion sweeps them ten minutes after their beginning")


def _count(connection: Connection, table: Table, condition: ColumnElement[bool]) -> int:
    return connection.execute(select(func.count()).select_from(table).where(condition)).scalar_one()


def _files_with(folder: Path, words: bytes) -> int:
    return sum(_has(path, words) for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0


def _has(path: Path, words: bytes) -> bool:
    """Whether a file has these bytes, read a piece at a time."""
    with path.open("rb") as file:
        tail = b""
        while piece := file.read(READ_BYTES):
            if words in tail + piece:
                return True
            tail = piece[-len(words) :]
    return False
