"""What a database that was restored to a moment, or promoted without its last commits, does not know any more.

Everything here compares it with something that did not go back: the notes of erasures beside the segments, the positions that ingestion
told Kafka after its commits, the weights in their store, the files of the segments, and ids that clients hold an answer for.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, Engine, ScalarSelect, exists, func, select

from app.db.chunks import chunked, one_of
from app.db.engine import expected_to_answer, reading
from app.db.ingestion.segment_rows import TRIMMING, WHOLE
from app.db.ingestion.streams import offsets
from app.db.operations.server import server_state
from app.db.tables import (
    applied_events,
    batch_items,
    deployment_history,
    erasures,
    inbox,
    returned_items,
    segments,
    training_runs,
    turns,
    versions,
)
from app.domain.telemetry.streams import TopicPartition


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that does not fit together, and what cures it."""

    what: str
    count: int
    cure: str
    first: str = ""
    """One of them, by name."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """What did not go back with the database."""

    erasures: Mapping[str, datetime]
    """Noted beside the segments."""
    versions: Collection[str]
    """Digests of the weights in their store."""
    size: Callable[[str], int]
    """Bytes of a segment's file; 0 where there is none."""
    group: str
    committed: Mapping[TopicPartition, int]
    """What the group told Kafka."""


class SqlRecovery:
    """Asks the state and the inbox databases."""

    def __init__(self, state: Engine, inbox_engine: Engine) -> None:
        self._state = state
        self._inbox = inbox_engine

    def findings(self, place: Place) -> list[Finding]:
        """All that does not fit together, each with its cure."""
        behind = self.behind(place.group, place.committed)
        named: list[tuple[str, Collection[str], str]] = [
            ("erasures that are not known here", list(self.lost_erasures(place.erasures)), "run `ratchet recover erasures`"),
            (
                "versions that are not known here",
                self.unknown_versions(place.versions),
                "their cycles were forgotten: do not serve them",
            ),
            ("champions whose weights are not in the store", self.missing_weights(place.versions), "restore the store of the weights"),
            ("turns that were trained on twice", self.trained_twice(), "roll back to the version before the second batch"),
            (
                "segments whose file is missing",
                self.missing_segments(place.size),
                "run `ratchet recover erasures`, and restore what it does not find",
            ),
        ]
        found = [Finding(what=what, count=len(names), first=min(names), cure=cure) for what, names, cure in named if names]
        if behind:
            cure = "they are read again, while the topic keeps them; compare ids with `ratchet recover acknowledged`"
            found.append(Finding(what="records that ingestion had applied", count=sum(behind.values()), cure=cure))
        return found

    def lost_erasures(self, noted: Mapping[str, datetime]) -> dict[str, datetime]:
        """People who asked to be forgotten, noted beside the segments, and whom this database does not know to be, or only of earlier."""
        with expected_to_answer(), reading(self._state) as connection:
            known = {row.actor: row.erased_at for row in connection.execute(select(erasures.c.actor, erasures.c.erased_at))}
        return {actor: moment for actor, moment in sorted(noted.items()) if actor not in known or known[actor] < moment}

    def words_of_shells(self, held: Iterable[tuple[str, list[str]]]) -> Iterator[str]:
        """Segments with turns in them whose person was erased: an older file came back. `held`: (segment, whose turns)."""
        with expected_to_answer(), reading(self._state) as connection:
            for name, ids in held:
                gone = select(turns.c.inference_id).where(one_of(connection, turns.c.inference_id, ids), turns.c.erased_at.is_not(None))
                if connection.execute(gone.limit(1)).first() is not None:
                    yield name

    def behind(self, group: str, committed: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """By how many records ingestion's positions lie behind what it told Kafka after its commits: commits were lost."""
        with expected_to_answer(), reading(self._state) as connection:
            ours = offsets(connection, group)
        return {place: told - ours.get(place, 0) for place, told in sorted(committed.items()) if told > ours.get(place, 0)}

    def not_known(self, acknowledged: Collection[str]) -> list[str]:
        """Those of the ids that were answered 202 and are neither in the inbox, nor applied, nor turns."""
        unknown = set(acknowledged)
        places = ((self._inbox, inbox.c.event_id), (self._state, applied_events.c.event_id), (self._state, turns.c.inference_id))
        for engine, column in places:
            with expected_to_answer(), reading(engine) as connection:
                for some in chunked(sorted(unknown), 5_000):
                    unknown.difference_update(connection.execute(select(column).where(one_of(connection, column, some))).scalars())
        return sorted(unknown)

    def unknown_versions(self, stored: Collection[str]) -> list[str]:
        """Weights in the store of which the database knows nothing: made by cycles that it forgot. They are not to be served."""
        with expected_to_answer(), reading(self._state) as connection:
            return sorted(set(stored) - set(connection.execute(select(versions.c.digest)).scalars()))

    def missing_weights(self, stored: Collection[str]) -> list[str]:
        """Versions that a champion's line may need and whose weights are not in the store."""
        table = deployment_history
        with expected_to_answer(), reading(self._state) as connection:
            served = select(table.c.digest).where(table.c.generation >= _newest_generation())
            return sorted(set(connection.execute(served).scalars()) - set(stored))

    def trained_twice(self) -> list[str]:
        """Turns whose batch was given back although a version that was promoted had learned from it, and that were batched once more."""
        back, run, line = returned_items, training_runs, deployment_history
        learned = exists(select(1).where(run.c.batch_id == back.c.batch_id, run.c.candidate == line.c.digest))
        again = exists(select(1).where(batch_items.c.inference_id == back.c.inference_id, batch_items.c.batch_id != back.c.batch_id))
        with expected_to_answer(), reading(self._state) as connection:
            return sorted(set(connection.execute(select(back.c.inference_id).where(learned, again)).scalars()))

    def missing_segments(self, size: Callable[[str], int]) -> list[str]:
        """Segments that rows tell of and whose file is not there."""
        told = select(segments.c.name).where(segments.c.state.in_([WHOLE, TRIMMING]), segments.c.rows > 0).order_by(segments.c.name)
        with expected_to_answer(), reading(self._state) as connection:
            names = connection.execute(told).scalars().all()
        return [name for name in names if not size(name)]


def _newest_generation() -> ScalarSelect[int]:
    table = deployment_history.alias("newest")
    return select(func.max(table.c.generation)).where(table.c.policy == deployment_history.c.policy).scalar_subquery()


def durability_of(engine: Engine) -> list[Finding]:
    """`durability` over a connection of its own. Raises `Unavailable`."""
    with expected_to_answer(), reading(engine) as connection:
        return durability(connection)


def durability(connection: Connection) -> list[Finding]:
    """What an acknowledgement is worth here, as findings; empty on SQLite, whose connections are opened with `synchronous=FULL`."""
    server = server_state(connection)
    return [] if server is None else [Finding(what=weak.what, count=1, cure=weak.cure) for weak in server.weaknesses()]
