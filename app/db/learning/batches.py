"""Batches in SQL: the port `BatchStore`. One transaction at a time cuts for a policy; the primary key of `batch_items` is the promise."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    Row,
    delete,
    exists,
    func,
    insert,
    literal_column,
    or_,
    select,
    text,
    true,
    union_all,
    update,
)

from app.db import locks
from app.db.chunks import chunked, one_of
from app.db.engine import writing
from app.db.ingestion.words import COMPLETION, WITH_WORDS
from app.db.learning.labels import lot_of
from app.db.learning.voices import read_voices
from app.db.tables import (
    POOL,
    POOL_SQLITE,
    UtcMicros,
    batch_items,
    batches,
    cycles,
    gate_results,
    labels,
    releases,
    returned_items,
    training_runs,
    turns,
    versions,
)
from app.domain.ids import utc_now
from app.domain.learning.batches import BatchItem, BatchManifest, LabelGroup, LabelledTurn, LabelsMade, Voice
from app.domain.learning.cycles import CycleStatus
from app.domain.learning.rewards import PROCESS_TERMS, Credit
from app.domain.release.gates import Verdict
from app.domain.release.releases import ReleaseState
from app.domain.telemetry.events import is_rollout

_NOT_BY_TIME: ColumnElement[datetime] = literal_column("+labels.labelled_at", UtcMicros())
"""The `+` keeps SQLite from choosing the index over times, along which every label there is comes before `until`."""
INSERT_ROWS = 500
"""Rows per INSERT: below SQLite's limit on bound parameters."""


class SqlBatchStore:
    """Cuts in the state database."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @contextmanager
    def cutting(self, policy: str) -> Iterator["SqlCutSession"]:
        """SQLite: the database's one writer. PostgreSQL: an advisory lock on the policy, held to the end of the transaction."""
        with writing(self.engine) as connection:
            locks.hold(connection, locks.batches_of(policy))
            yield SqlCutSession(connection, policy)


class SqlCutSession:
    """One transaction; see the port."""

    def __init__(self, connection: Connection, policy: str) -> None:
        self.connection = connection
        self.policy = policy

    def existing(self, slot: int) -> BatchManifest | None:
        """The slot's batch with its items."""
        row = self.connection.execute(select(batches).where(batches.c.policy == self.policy, batches.c.slot == slot)).one_or_none()
        return None if row is None else read_manifest(self.connection, row)

    def give_back(self) -> int:
        """Move the items to `returned_items`, free their labels, and ask for a label anew: more may have been said meanwhile."""
        batch_ids = self.connection.execute(select(batches.c.id).where(_came_to_nothing(self.policy))).scalars().all()
        freed = 0
        for batch in batch_ids:
            items = select(batch_items).where(batch_items.c.batch_id == batch)
            turn_ids = items.with_only_columns(batch_items.c.inference_id)
            columns = [column.name for column in returned_items.c]
            copied = items.with_only_columns(*(batch_items.c[name] for name in columns))
            self.connection.execute(insert(returned_items).from_select(columns, copied))
            self.connection.execute(update(labels).where(labels.c.inference_id.in_(turn_ids)).values(batch_id=None))
            asked = turns.c.inference_id.in_(turn_ids) & turns.c.labelled_at.is_not(None)
            self.connection.execute(update(turns).where(asked).values(needs_relabel=True))
            freed += self.connection.execute(delete(batch_items).where(batch_items.c.batch_id == batch)).rowcount
        return freed

    def lineage(self, champion: str, versions_back: int) -> tuple[str, ...]:
        """Follow `parent` from the champion."""
        found = [champion]
        while len(found) <= versions_back:
            mine = (versions.c.policy == self.policy) & (versions.c.digest == found[-1])  # two policies may begin with one base
            parent = self.connection.execute(select(versions.c.parent).where(mine)).scalar_one_or_none()
            if parent is None:
                break
            found.append(parent)
        return tuple(found)

    def known_versions(self) -> frozenset[str]:
        """Digests of the policy's versions."""
        return frozenset(self.connection.execute(select(versions.c.digest).where(versions.c.policy == self.policy)).scalars())

    def last_window_end(self) -> datetime | None:
        """End of the newest window."""
        return self.connection.execute(select(func.max(batches.c.window_to)).where(batches.c.policy == self.policy)).scalar_one_or_none()

    def unused_labels(
        self, *, versions: Sequence[str], since: datetime | None, until: datetime, slot: int = 0, at_most: int | None = None
    ) -> list[LabelledTurn]:
        """Current labels in no batch, sorted by inference id; with `at_most`, those of the episodes drawn by lot."""
        fresh = true() if since is None else labels.c.labelled_at > since
        mine = or_(labels.c.version.in_(versions), fresh)
        if at_most is None:
            return self._labelled(mine & self._unused(until))
        wanted = mine & self._unused(until, labelled_at=_NOT_BY_TIME)
        drawn = sorted(self._draw(versions, until, slot, at_most))
        found = [turn for lots in chunked(drawn) for turn in self._labelled(wanted & one_of(self.connection, labels.c.lot, lots))]
        return sorted(found, key=lambda turn: turn.inference_id)

    def _unused(self, until: datetime, *, labelled_at: ColumnElement[datetime] = labels.c.labelled_at) -> ColumnElement[bool]:
        mine = labels.c.current & (labels.c.policy == self.policy) & labels.c.batch_id.is_(None) & (labelled_at <= until)
        # A process of the revision before does not write batch_id.
        return mine & ~exists(select(1).where(batch_items.c.inference_id == labels.c.inference_id))

    def _labelled(self, wanted: ColumnElement[bool]) -> list[LabelledTurn]:
        sibling = turns.alias("sibling")
        same_episode = (sibling.c.episode_id == turns.c.episode_id) & (sibling.c.policy == turns.c.policy)
        episode_open = exists(select(1).where(same_episode, sibling.c.labelled_at.is_(None)))
        tries = select(func.count()).where(returned_items.c.inference_id == labels.c.inference_id).scalar_subquery()
        statement = (
            select(labels, turns, episode_open.label("episode_open"), turns.c.episode_id.label("episode"), tries.label("tries"), COMPLETION)
            .select_from(WITH_WORDS.join(labels, turns.c.inference_id == labels.c.inference_id))
            .where(wanted)
            .order_by(labels.c.inference_id)
        )
        return [_labelled_turn(row) for row in self.connection.execute(statement)]

    def _draw(self, versions: Sequence[str], until: datetime, slot: int, at_most: int) -> set[int]:
        """Lots of about `at_most` labels of each version that say something, from the slot's place onwards; by the newest rule set."""
        pool = text(POOL_SQLITE if self.connection.dialect.name == "sqlite" else POOL)
        rule_set = self._newest_rule_set(until)
        begin, drawn = lot_of(f"{self.policy}\x1f{slot}"), set[int]()
        for version in versions:  # one ordered walk along the index for each, onwards and then around: the database stops at the limit
            mine = select(labels.c.lot).where(pool, labels.c.policy == self.policy, labels.c.version == version)
            mine = mine.where(labels.c.rule_set == rule_set, labels.c.labelled_at <= until).order_by(labels.c.lot)
            onwards = self.connection.execute(mine.where(labels.c.lot >= begin).limit(at_most)).scalars().all()
            around = self.connection.execute(mine.where(labels.c.lot < begin).limit(max(0, at_most - len(onwards)))).scalars().all()
            drawn.update(onwards, around)
        return drawn

    def _newest_rule_set(self, until: datetime) -> str | None:
        newest = select(labels.c.rule_set).where(labels.c.current, labels.c.policy == self.policy, labels.c.labelled_at <= until)
        return self.connection.execute(newest.order_by(labels.c.labelled_at.desc(), labels.c.rule_set.desc()).limit(1)).scalar()

    def voices(self, turns: Sequence[LabelledTurn], *, before: datetime) -> Mapping[str, Sequence[Voice]]:
        """Two reads by index, of what was said about these turns and of who was there before."""
        return read_voices(self.connection, turns, policy=self.policy, before=before)

    def made(self, *, since: datetime | None, until: datetime) -> LabelsMade:
        """The current labels in no batch that were made in this time, counted by the database."""
        inside = self._unused(until) & (true() if since is None else labels.c.labelled_at > since)
        group = (labels.c.exclusion, labels.c.version, labels.c.held_out, labels.c.rule_set)
        rows = self.connection.execute(select(*group, func.count(), func.min(labels.c.labelled_at)).where(inside).group_by(*group)).all()
        groups = Counter({LabelGroup(exclusion, version, bool(out), rules): n for exclusion, version, out, rules, n, _ in rows})
        return LabelsMade(groups=groups, first_at=min((row[5] for row in rows), default=None))

    def save(self, manifest: BatchManifest) -> None:
        """Insert batch and items; an item that is in another batch breaks the primary key and with it the transaction."""
        self.connection.execute(
            insert(batches).values(
                id=manifest.id, policy=manifest.policy, slot=manifest.slot, champion=manifest.champion, anchor=manifest.anchor,
                rule_set=manifest.rule_set, window_from=manifest.window_from, window_to=manifest.window_to,
                left_out=manifest.left_out, created_at=utc_now(),
            )
        )  # fmt: skip
        rows = [
            {"inference_id": item.inference_id, "batch_id": manifest.id, "episode_id": item.episode_id, "reward": item.reward,
             "label_revision": item.label_revision, "segment": item.segment, "actor": item.actor, "channels": item.channels}
            for item in manifest.items
        ]  # fmt: skip
        for start in range(0, len(rows), INSERT_ROWS):
            self.connection.execute(insert(batch_items), rows[start : start + INSERT_ROWS])
            used = [row["inference_id"] for row in rows[start : start + INSERT_ROWS]]
            mine = one_of(self.connection, labels.c.inference_id, used) & labels.c.current
            self.connection.execute(update(labels).where(mine).values(batch_id=manifest.id))


def read_manifest(connection: Connection, row: Row[tuple[object, ...]]) -> BatchManifest:
    """A batch's row and its items, given back or not; where their tokens lie comes from the turns, which may have been erased since."""
    of_batch = [
        select(*(table.c[c.name] for c in returned_items.c)).where(table.c.batch_id == row.id) for table in (batch_items, returned_items)
    ]
    found = union_all(*of_batch).subquery()
    statement = (
        select(found, turns.c.version, turns.c.payload_segment, turns.c.source, turns.c.tags)
        .join(turns, turns.c.inference_id == found.c.inference_id, isouter=True)
        .order_by(found.c.inference_id)
    )
    items = tuple(
        BatchItem(
            inference_id=item.inference_id, episode_id=item.episode_id, reward=item.reward, label_revision=item.label_revision,
            segment=item.segment, actor=item.actor, version=item.version or "", payload_segment=item.payload_segment or "",
            channels=item.channels,
            group=_group(item.source, item.tags),
        )
        for item in connection.execute(statement)
    )  # fmt: skip
    return BatchManifest(
        id=row.id, policy=row.policy, slot=row.slot, champion=row.champion, anchor=row.anchor, rule_set=row.rule_set,
        window_from=row.window_from, window_to=row.window_to, items=items, left_out=dict(row.left_out),
    )  # fmt: skip


def _came_to_nothing(policy: str) -> ColumnElement[bool]:
    """See `CutSession.give_back`."""
    over = exists(
        select(1).where(
            cycles.c.policy == batches.c.policy, cycles.c.slot == batches.c.slot,
            cycles.c.status.in_((CycleStatus.HELD.value, CycleStatus.FAILED.value)),
        )
    )  # fmt: skip
    failed = exists(select(1).where(gate_results.c.release_id == releases.c.id, gate_results.c.verdict == Verdict.FAIL.value))
    judged = exists(
        select(1)
        .select_from(training_runs.join(releases, (releases.c.digest == training_runs.c.candidate)))
        .where(
            training_runs.c.batch_id == batches.c.id, releases.c.policy == batches.c.policy,
            (releases.c.state != ReleaseState.ABORTED.value) | failed,
        )
    )  # fmt: skip
    holds_labels = exists(select(1).where(batch_items.c.batch_id == batches.c.id))
    return (batches.c.policy == policy) & over & ~judged & holds_labels


def _is_process(term: Mapping[str, Any]) -> bool:
    return Credit(term.get("credit") or (Credit.PROCESS if term["name"] in PROCESS_TERMS else Credit.OUTCOME)) is Credit.PROCESS


def _process(terms: Sequence[Mapping[str, Any]]) -> float:
    """The weighted sum of the terms about the turn itself."""
    return sum(term["weight"] * term["value"] for term in terms if term["value"] is not None and _is_process(term))


def _spoke(terms: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, float], ...]:
    """The terms about the outcome that had something to say."""
    return tuple((term["name"], term["value"]) for term in terms if term["value"] is not None and not _is_process(term))


def _group(source: str | None, tags: Mapping[str, str] | None) -> str:
    """Of a rollout's turn; a tag of that name on anybody else's means nothing."""
    return (tags or {}).get("group", "") if source is not None and is_rollout(source) else ""


def _labelled_turn(row: Row[tuple[object, ...]]) -> LabelledTurn:
    turn = row._mapping
    return LabelledTurn(
        inference_id=turn[labels.c.inference_id], episode_id=turn["episode"], version=turn[labels.c.version], reward=turn[labels.c.reward],
        label_revision=turn[labels.c.revision], rule_set=turn[labels.c.rule_set], exclusion=turn[labels.c.exclusion],
        segment=turn[labels.c.segment], actor=turn[labels.c.actor], held_out=turn[labels.c.held_out], kind=turn[turns.c.kind],
        imported=turn[turns.c.source].startswith("import:"), train_consent=turn[turns.c.train_consent],
        erased=turn[turns.c.erased_at] is not None, has_logprobs=turn[turns.c.has_logprobs], payload_segment=turn[turns.c.payload_segment],
        completion_tokens=turn[turns.c.completion_tokens], finished_at=turn[turns.c.finished_at], labelled_at=turn[labels.c.labelled_at],
        episode_open=bool(turn["episode_open"]), process=_process(turn[labels.c.terms]), has_outcome=bool(_spoke(turn[labels.c.terms])),
        tries=turn["tries"], completion=turn[COMPLETION], spoke=_spoke(turn[labels.c.terms]),
        rollout=is_rollout(turn[turns.c.source]), group=_group(turn[turns.c.source], turn[turns.c.tags]),
    )  # fmt: skip
