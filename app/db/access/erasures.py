"""Forgetting a person: everything of theirs goes; the names of versions trained on it are reported.

    announce ──▶ what of theirs there is ──▶ inbox payloads ──▶ rows, one transaction ──▶ the segments, copied without them

From the announcement on ingestion forgets what they said before it, and waits for nobody: it is made while no transaction is under way
that does not know of it. So what is found afterwards is all there is. Killed on the way, the next attempt goes on.

What stays: that turns were served (empty shells, so that counts add up), that batches held them, and the pseudonym in `erasures`,
without which a replay would bring the rest back. It costs what the person has, not what the tables have.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Engine, LargeBinary, Row, cast, delete, func, literal, select, text, update

from app.db import locks
from app.db.access.names import has_one_of, in_words
from app.db.chunks import chunked, one_of, pair_of
from app.db.engine import BUSY_TIMEOUT_MS, insert_or_ignore, reading, writing
from app.db.ingestion import segment_rows
from app.db.ingestion.dead_letters import copy_key
from app.db.ingestion.observations import forget_retractions
from app.db.ingestion.turn_counts import count_labelled
from app.db.ingestion.turns import SHELL, lock_turns, note_evidence
from app.db.ingestion.words import forget_words
from app.db.learning.readings import forget_readings
from app.db.learning.rollups import COLUMNS, add_up
from app.db.outbox import OutboxEvent, enqueue
from app.db.release import audit
from app.db.tables import (
    batch_items,
    batches,
    blind_pairs,
    dead_letters,
    exposures,
    holdout_people,
    inbox,
    labels,
    observations,
    outbox,
    returned_items,
    training_runs,
    turns,
    versions,
)
from app.db.tables import erasures as erasures_table
from app.domain.errors import Unavailable
from app.domain.telemetry.events import GATEWAY, Erasure, EventType, Exposure, Observation, Topic
from app.domain.telemetry.streams import AppliedEvent, ErasureReport, SegmentFiles
from app.domain.telemetry.turns import TurnServed

FULL = text("length(payload) > 0")
"""As the indexes over rows with a payload say it."""
PAGE = 500
READERS_S = 5.0
"""A page reads for milliseconds; what takes longer is an export or a backup, which no erasure outwaits."""


class SqlEraser:
    """Forgets people in every place of a deployment: inbox, state, segments; audited."""

    def __init__(
        self, state: Engine, inbox_engine: Engine, *, segments: SegmentFiles,
        note: Callable[[str, datetime], None] = lambda actor, moment: None, patience_s: float = READERS_S,
    ) -> None:  # fmt: skip
        """`patience_s`: how long the readers of a SQLite file are waited for, before its log is left to another attempt."""
        self._state = state
        self._inbox = inbox_engine
        self._segments = segments
        self._note = note
        """Leaves word beside the segments, which a restored database does not take back."""
        self._patience_s = patience_s

    def erase(self, erasure: Erasure, *, now: datetime) -> ErasureReport:
        """Erase; a second call removes what came since, usually nothing. The bytes are gone from the files as well (SQLite).

        Raises `Unavailable` where the files cannot be reached: then the rows are gone, and a second call or the upkeep does the rest. And
        where somebody reads a SQLite file all the while: then its log still has the words, and a second call empties it.
        """
        self._note(erasure.actor, erasure.occurred_at)
        announce(self._state, erasure)
        with reading(self._state) as connection:
            mine = belongings(connection, erasure.actor)
        scrubbed = locks.settled(self._inbox, lambda connection: scrub_inbox(connection, erasure.actor, mine))

        def forget(connection: Connection) -> ErasureReport:
            report = erase_actor(connection, erasure, now=now, inbox_payloads=scrubbed).report
            detail = {"turns": report.turns, "trained_versions": list(report.trained_versions), "again": report.already_erased}
            audit.append(connection, actor=erasure.requested_by, action="erase", subject=erasure.actor, detail=detail, now=now)
            return report

        report = locks.settled(self._state, forget)
        kept = [engine for engine in {self._state, self._inbox} if not _empty_log(engine, self._patience_s)]
        try:  # all that is owed: what was merged or is old and still lies there holds their words too
            segment_rows.tidy(self._state, self._segments, now=now)
        except OSError as error:
            raise Unavailable(
                f"the rows are erased, and the store of the segments does not take the rest ({error}): check its space and its address, "
                "and erase again; `ratchet loop` does so by itself"
            ) from error
        if kept:
            raise Unavailable(
                f"the rows are erased, and their words are still in {kept[0].url.database}-wal, because somebody reads the database: "
                "let exports, backups and long pages end, and erase again"
            )
        return report


def announce(engine: Engine, erasure: Erasure) -> None:
    """From this commit on nothing that the person said before is applied any more; what is being applied now is applied first."""
    with writing(engine) as connection:
        locks.hold(connection, locks.ERASURES)
        row = {"actor": erasure.actor, "requested_by": erasure.requested_by, "erased_at": erasure.occurred_at, "report": {}}
        connection.execute(insert_or_ignore(connection, erasures_table), row)
        earlier = (erasures_table.c.actor == erasure.actor) & (erasures_table.c.erased_at < erasure.occurred_at)
        connection.execute(update(erasures_table).where(earlier).values(erased_at=erasure.occurred_at))


def _empty_log(engine: Engine, patience_s: float) -> bool:
    """SQLite overwrites what is deleted (`secure_delete`), and keeps it in the write-ahead log until that is emptied.

    Whether it is: it cannot be while somebody reads what it holds. Writers wait as long as readers are waited for.
    """
    if engine.dialect.name != "sqlite":
        return True
    raw = engine.raw_connection()
    try:
        cursor = raw.cursor()
        cursor.execute(f"PRAGMA busy_timeout={round(patience_s * 1000)}")
        try:
            busy, *_ = cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        finally:
            cursor.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
        return not busy
    finally:
        raw.close()


def erased_at(connection: Connection, actors: Iterable[str]) -> dict[str, datetime]:
    """When each of these actors was erased; absent where never."""
    found: dict[str, datetime] = {}
    for chunk in chunked(sorted(set(actors))):
        statement = select(erasures_table.c.actor, erasures_table.c.erased_at).where(erasures_table.c.actor.in_(chunk))
        found |= {row.actor: row.erased_at for row in connection.execute(statement)}
    return found


def tells_of_before(event: AppliedEvent, erased: datetime) -> bool:
    """Whether an event is from before its person was erased: by its receipt, or by what a gateway says, whose disk may have kept it.

    The times of all other sources are their clients' to choose, so they make nothing older than its receipt.
    """
    said = [event.received_at]
    if event.source == GATEWAY:
        match event.effect:
            case TurnServed():
                said.append(event.effect.finished_at)
            case Exposure() | Observation():
                said.append(event.effect.occurred_at)
            case _:
                pass
    return min(said) <= erased


class Erased(NamedTuple):
    """What a transaction erased."""

    report: ErasureReport
    segments: frozenset[str]
    """They hold the person's words until they are tidied."""


def erase_actor(connection: Connection, erasure: Erasure, *, now: datetime, inbox_payloads: int = 0) -> Erased:
    """Erase everything of `erasure.actor` from the state database. A second call finds what came since."""
    actor = erasure.actor
    own = _lock_turns(connection, actor)
    ids, episodes = [row.inference_id for row in own], sorted({row.episode_id for row in own})
    before: dict[str, Any] = connection.execute(select(erasures_table.c.report).where(erasures_table.c.actor == actor)).scalar() or {}
    held = frozenset(row.payload_segment for row in own if row.payload_segment)
    said = _erase_observations(connection, actor, ids, episodes)
    trained = sorted(set(before.get("trained_versions", [])) | _trained_versions(connection, actor, ids))
    labelled = _erase_labels(connection, actor, ids)
    report = ErasureReport(
        actor=actor,
        turns=len(ids),
        observations=len(said),
        labels=len(labelled),
        exposures=connection.execute(delete(exposures).where(exposures.c.actor == actor)).rowcount,
        inbox_payloads=inbox_payloads,
        dead_letters=_erase_letters(connection, {actor, *ids, *episodes}),
        segments=len(held),
        trained_versions=tuple(trained),
        already_erased=bool(before),
    )
    connection.execute(delete(blind_pairs).where(blind_pairs.c.cluster == actor))
    connection.execute(delete(holdout_people).where(holdout_people.c.person == actor))
    _erase_outbox(connection, [*ids, *episodes])
    note_evidence(connection, _others_about(connection, said, ids))
    _empty_turns(connection, ids, now, labelled={row.inference_id for row in labelled})
    segment_rows.leave_out(connection, held)
    _tombstones(connection, ids, episodes, now)
    _remember(connection, erasure, report, before)
    return Erased(report, held)


def _lock_turns(connection: Connection, actor: str) -> Sequence[Any]:
    """The person's turns; locked with those of others that they spoke about. Nobody cuts a batch from the person's, labels them or joins
    anything to them before this transaction ends."""
    mine = turns.c.actor == actor
    for policy in sorted(connection.execute(select(turns.c.policy).where(mine).distinct()).scalars()):
        locks.hold(connection, locks.batches_of(policy))
    own = connection.execute(select(turns.c.inference_id, turns.c.episode_id).where(mine)).all()
    about = connection.execute(select(observations.c.inference_id, observations.c.episode_id).where(observations.c.actor == actor)).all()
    lock_turns(connection, {id_ for id_, _ in (*own, *about) if id_}, {episode for _, episode in (*own, *about) if episode})
    wanted = select(turns.c.inference_id, turns.c.episode_id, turns.c.payload_segment).where(mine)
    return connection.execute(wanted.order_by(turns.c.inference_id).with_for_update()).all()


class Belongings(NamedTuple):
    """What of a person there is, by name."""

    keys: list[str]
    """Ids of their turns and episodes, and of those that were shown to them."""
    said: list[tuple[str, str]]
    """(source, id) of what they said about anything."""


def belongings(connection: Connection, actor: str) -> Belongings:
    """Everything that `scrub_inbox` looks for."""
    served = select(turns.c.inference_id, turns.c.episode_id).where(turns.c.actor == actor)
    shown = select(exposures.c.inference_id, exposures.c.episode_id).where(exposures.c.actor == actor)
    keys = {key for statement in (served, shown) for row in connection.execute(statement) for key in row}
    said = select(observations.c.source, observations.c.id).where(observations.c.actor == actor)
    return Belongings(keys=sorted(keys), said=[(row.source, row.id) for row in connection.execute(said)])


def scrub_inbox(connection: Connection, actor: str, mine: Belongings) -> int:
    """Empty the payloads of everything in the inbox database that names the actor or belongs to their turns; identities stay, and the
    erasures, by which whoever replays the events forgets the person too.

    What was applied is found by its key or identity; of what was not yet, every payload is looked into.
    """
    keys, scrubbed = set(mine.keys), 0
    for waiting in (inbox.c.relayed_at.is_(None), inbox.c.relayed_at.is_not(None) & inbox.c.applied_at.is_(None)):
        named = select(inbox.c.seq, inbox.c.key, inbox.c.event_id).where(waiting, FULL, contains(connection, inbox.c.payload, actor))
        found = connection.execute(named).all()
        keys.update(key for row in found for key in (row.key, row.event_id))
        scrubbed += _empty(connection, one_of(connection, inbox.c.seq, [row.seq for row in found]))
    for some in chunked(sorted(keys)):
        scrubbed += _empty(connection, one_of(connection, inbox.c.key, some))
    for pairs in chunked(mine.said):
        scrubbed += _empty(connection, pair_of(connection, (inbox.c.source, inbox.c.event_id), pairs))
    return scrubbed


def _empty(connection: Connection, which: ColumnElement[bool]) -> int:
    return connection.execute(update(inbox).where(which, FULL, inbox.c.type != EventType.ERASURE).values(payload=b"")).rowcount


def contains(connection: Connection, column: ColumnElement[Any], text: str) -> ColumnElement[bool]:
    """Whether the bytes of a column have this text in them."""
    if connection.dialect.name == "sqlite":
        return func.instr(column, literal(text.encode(), LargeBinary)) > 0
    return func.position(cast(literal(text.encode(), LargeBinary), LargeBinary).op("IN")(column)) > 0


def _trained_versions(connection: Connection, actor: str, ids: Sequence[str]) -> set[str]:
    """Names of the versions that runs made from batches with this actor's turns (the digest where no name is known)."""
    found: set[str] = set()
    tables = (batch_items, returned_items)
    conditions = [(t, t.c.actor == actor) for t in tables] + [(t, t.c.inference_id.in_(chunk)) for t in tables for chunk in chunked(ids)]
    for items, condition in conditions:
        statement = (
            select(func.coalesce(versions.c.name, training_runs.c.candidate))
            .select_from(items.join(batches, batches.c.id == items.c.batch_id))
            .join(training_runs, training_runs.c.batch_id == batches.c.id)
            .join(versions, (versions.c.digest == training_runs.c.candidate) & (versions.c.policy == training_runs.c.policy), isouter=True)
            .where(condition, training_runs.c.candidate.is_not(None))
            .distinct()
        )
        found.update(connection.execute(statement).scalars())
    return found


def _erase_observations(connection: Connection, actor: str, ids: Sequence[str], episodes: Sequence[str]) -> Sequence[Any]:
    """What the person said and what others said about them, with what took it back: what each was about."""
    o = observations.c
    about = o.inference_id, o.episode_id, o.source, o.id, o.retracted_at
    erased: list[Any] = list(connection.execute(delete(observations).where(o.actor == actor).returning(*about)))
    for chunk in chunked(ids):
        erased += connection.execute(delete(observations).where(o.inference_id.in_(chunk)).returning(*about))
    for chunk in chunked(episodes):
        erased += connection.execute(delete(observations).where(o.episode_id.in_(chunk)).returning(*about))
    forget_retractions(connection, [(row.source, row.id) for row in erased if row.retracted_at is not None])
    return erased


def _others_about(connection: Connection, said: Sequence[Any], own: Collection[str]) -> set[str]:
    """Turns of others that this was said about: their labels are to be made without it."""
    named = one_of(connection, turns.c.inference_id, {row.inference_id for row in said if row.inference_id})
    within = one_of(connection, turns.c.episode_id, {row.episode_id for row in said if row.episode_id})
    return set(connection.execute(select(turns.c.inference_id).where(named | within, turns.c.erased_at.is_(None))).scalars()) - set(own)


def _erase_labels(connection: Connection, actor: str, ids: Sequence[str]) -> Sequence[Row[*tuple[Any, ...]]]:
    """What they were, those that were replaced included."""
    gone = list(connection.execute(delete(labels).where(labels.c.actor == actor).returning(*COLUMNS)))
    for chunk in chunked(ids):
        gone += connection.execute(delete(labels).where(labels.c.inference_id.in_(chunk)).returning(*COLUMNS))
        forget_readings(connection, chunk)
        for items in (batch_items, returned_items):
            connection.execute(update(items).where(items.c.inference_id.in_(chunk)).values(actor=None))
    for items in (batch_items, returned_items):
        connection.execute(update(items).where(items.c.actor == actor).values(actor=None))
    add_up(connection, (), taken_back=[row for row in gone if row.current])
    return gone


def _erase_letters(connection: Connection, names: set[str]) -> int:
    """Dead letters that name the actor, one of their turns or their episodes, and what was sent of them to their topic."""
    wanted, last, erased = in_words(names), 0, 0
    d = dead_letters.c
    letters = select(d.id, d.topic, d.partition, d.offset, d.payload).order_by(d.id).limit(PAGE)
    while page := connection.execute(letters.where(d.id > last)).all():
        last = page[-1].id
        mine = [row for row in page if has_one_of(row.payload, wanted)]
        if mine:
            connection.execute(delete(dead_letters).where(one_of(connection, d.id, [row.id for row in mine])))
            erased += len(mine)
            _erase_outbox(connection, [copy_key(row.topic, row.partition, row.offset) for row in mine])
    return erased


def _erase_outbox(connection: Connection, keys: Sequence[str]) -> None:
    """Payloads of the loop's own events about these turns, episodes or dead letters."""
    for some in chunked(keys):
        mine = one_of(connection, outbox.c.key, some)
        connection.execute(update(outbox).where(mine, FULL).values(payload=b""))


def forget_said(connection: Connection, shells: Sequence[str]) -> None:
    """What others said about turns that came after their person was erased, and about episodes of which nothing else is left."""
    if not shells:
        return
    o = observations.c
    connection.execute(delete(observations).where(one_of(connection, o.inference_id, shells)))
    theirs = select(turns.c.episode_id).where(one_of(connection, turns.c.inference_id, shells))
    alive = select(turns.c.episode_id).where(turns.c.episode_id.in_(theirs), turns.c.erased_at.is_(None))
    connection.execute(delete(observations).where(o.episode_id.in_(theirs), o.episode_id.not_in(alive)))


def _empty_turns(connection: Connection, ids: Sequence[str], now: datetime, *, labelled: set[str]) -> None:
    """Leave shells, and let labelling give them their exclusion: every served turn ends with a label.

    Not those that had one and are not among `labelled`: retention took it, and they are in the sums already.

    A label that is being made at this moment from what stood there is stale, and says so by `evidence`.
    """
    for chunk in chunked(ids):
        had = select(turns.c.policy, turns.c.version, turns.c.inference_id).where(
            one_of(connection, turns.c.inference_id, chunk), turns.c.labelled_at.is_not(None)
        )
        rows = connection.execute(had).all()
        count_labelled(connection, [(row.policy, row.version) for row in rows if row.inference_id in labelled], by=-1)
        values = SHELL | {"erased_at": now, "needs_relabel": False, "evidence": turns.c.evidence + 1}
        connection.execute(update(turns).where(turns.c.inference_id.in_(chunk)).values(values))
        due = set(chunk) - {row.inference_id for row in rows if row.inference_id not in labelled}
        mine = one_of(connection, turns.c.inference_id, sorted(due))
        connection.execute(update(turns).where(mine).values(labelled_at=None, label_due_at=now))
        forget_words(connection, chunk)


def _tombstones(connection: Connection, ids: Sequence[str], episodes: Sequence[str], now: datetime) -> None:
    """Null records for every key: on a compacted topic they take the older ones away."""
    events = [OutboxEvent(topic=Topic.EVENTS, type=EventType.ERASURE, key=key, payload=b"") for key in (*episodes, *ids)]
    events += [OutboxEvent(topic=Topic.LABELS, type=EventType.ERASURE, key=key, payload=b"") for key in (*episodes, *ids)]
    enqueue(connection, events, now=now)


def _remember(connection: Connection, erasure: Erasure, report: ErasureReport, before: dict[str, Any]) -> None:
    counts = {
        name: getattr(report, name) + before.get(name, 0)
        for name in ("turns", "observations", "labels", "exposures", "inbox_payloads", "dead_letters", "segments")
    }
    values = {"report": counts | {"trained_versions": list(report.trained_versions)}}
    connection.execute(update(erasures_table).where(erasures_table.c.actor == erasure.actor).values(values))
