"""Every table, once. Alembic's migrations are checked against this file by a test.

Two groups: `inbox` may live in a database of its own (SQLite: its own file, so that the group commit of the HTTP door never
waits for a stage's transaction); everything else is the state of the loop.
"""

from datetime import UTC, datetime, timedelta

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    text,
)
from sqlalchemy.engine import Dialect

from app.domain.release.releases import ReleaseState

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(column_0_N_label)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "pk": "pk_%(table_name)s",
    }
)


EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _micros(moment: datetime) -> int:
    delta = moment - EPOCH
    return (delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds


_FIRST, _LAST = _micros(datetime(1, 1, 2, tzinfo=UTC)), _micros(datetime(9999, 12, 30, tzinfo=UTC))
"""What is stored beyond these (a year 1 with an offset) would raise at every reading, for ever."""


class UtcMicros(TypeDecorator[datetime]):
    """A timezone-aware UTC datetime, stored as integer microseconds since the epoch: exact, ordered, the same on both databases."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> int | None:
        """Refuse naive datetimes: a guess about their zone would be wrong somewhere."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value!r} has no timezone; use app.domain.ids.utc_now()")
        return _micros(value)

    def process_result_value(self, value: int | None, dialect: Dialect) -> datetime | None:
        """Back to an aware datetime, exactly."""
        if value is None:
            return None
        return EPOCH + timedelta(microseconds=min(max(value, _FIRST), _LAST))


def _partial(name: str, *columns: str, where: str, sqlite: str | None = None) -> Index:
    """An index over some rows. `sqlite` says the same where SQLite, which has no booleans, is asked in other words (`current = 1`)."""
    return Index(name, *columns, sqlite_where=text(sqlite or where), postgresql_where=text(where))


Id = String(64)
Name = String(200)
Sequence = BigInteger().with_variant(Integer, "sqlite")
"""SQLite autoincrements only a column declared INTEGER."""


# --- the door -----------------------------------------------------------------------------------------------------------

inbox = Table(
    "inbox",
    metadata,
    Column("seq", Sequence, primary_key=True, autoincrement=True),
    Column("source", Name, nullable=False),
    Column("event_id", Name, nullable=False),
    Column("type", Name, nullable=False),
    Column("key", Name, nullable=False),
    Column("time", UtcMicros, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    Column("payload_hash", LargeBinary, nullable=False),
    Column("received_at", UtcMicros, nullable=False),
    Column("relayed_at", UtcMicros),
    Column("applied_at", UtcMicros),
    Column("rounds", Integer, nullable=False, server_default="0"),
    Column("era", Integer, nullable=False, server_default="0"),
    UniqueConstraint("source", "event_id"),
    Index("ix_inbox_to_send", "seq", sqlite_where=text("relayed_at IS NULL"), postgresql_where=text("relayed_at IS NULL")),
    Index(
        "ix_inbox_unconfirmed",
        "relayed_at",
        sqlite_where=text("relayed_at IS NOT NULL AND applied_at IS NULL"),
        postgresql_where=text("relayed_at IS NOT NULL AND applied_at IS NULL"),
    ),
    _partial("ix_inbox_to_trim", "applied_at", where="applied_at IS NOT NULL AND length(payload) > 0"),
    _partial("ix_inbox_key", "key", where="length(payload) > 0"),
    sqlite_autoincrement=True,
)

"""On PostgreSQL in partitions by `era`: an event is unique, and `seq` the primary key, within each of them (`app.db.upkeep.eras`)."""

inbox_eras = Table(
    "inbox_eras",
    metadata,
    Column("era", Integer, primary_key=True, autoincrement=False),
    Column("opened_at", UtcMicros, nullable=False),
    Column("closed_at", UtcMicros),
)

# --- streaming ------------------------------------------------------------------------------------------------------------

stream_offsets = Table(
    "stream_offsets",
    metadata,
    Column("consumer_group", Name),
    Column("topic", Name),
    Column("partition", Integer),
    Column("next_offset", BigInteger, nullable=False),
    Column("high_water", BigInteger),
    Column("updated_at", UtcMicros, nullable=False),
    Column("incarnation", Name),
    PrimaryKeyConstraint("consumer_group", "topic", "partition"),
)
"""`incarnation`: id of the cluster and of the topic. An offset says nothing about a topic of the same name that was made anew."""

topic_epochs = Table(
    "topic_epochs",
    metadata,
    Column("topic", Name),
    Column("epoch", Integer),
    Column("opened_at", UtcMicros, nullable=False),
    Column("closed_at", UtcMicros),
    Column("deleted_at", UtcMicros),
    PrimaryKeyConstraint("topic", "epoch"),
)
"""The embedded broker's topics (`ratchet.events.7`): it forgets them at every restart, so the database remembers."""

applied_events = Table(
    "applied_events",
    metadata,
    Column("source", Name),
    Column("event_id", Name),
    Column("payload_hash", LargeBinary),
    Column("applied_at", UtcMicros, nullable=False),
    PrimaryKeyConstraint("source", "event_id"),
    Index("ix_applied_events_time", "applied_at"),
)
"""Kept as long as an event is known again: see `app.domain.retention`."""

dead_letters = Table(
    "dead_letters",
    metadata,
    Column("id", Sequence, primary_key=True, autoincrement=True),
    Column("topic", Name, nullable=False),
    Column("partition", Integer, nullable=False),
    Column("offset", BigInteger, nullable=False),
    Column("reason", Text, nullable=False),
    Column("headers", JSON, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    Column("attempts", Integer, nullable=False, server_default="1"),
    Column("first_seen_at", UtcMicros, nullable=False),
    Column("last_seen_at", UtcMicros, nullable=False),
    Column("replayed_at", UtcMicros),
    Column("source", Name),
    Column("event_id", Name),
    UniqueConstraint("topic", "partition", "offset"),
    Index("ix_dead_letters_source_event_id", "source", "event_id"),
    sqlite_autoincrement=True,
)
"""`source` and `event_id`: the identity in its envelope, where that is readable; what is buried need not be sent again.

`topic`: with `~` and the letter's `id` behind it where it was made anew since, and another letter lies at that place now."""

troubles = Table(
    "troubles",
    metadata,
    Column("name", Name, primary_key=True),
    Column("reason", Text, nullable=False),
    Column("since", UtcMicros, nullable=False),
    Column("updated_at", UtcMicros, nullable=False),
)
"""What a process waits for at present, in a sentence; `/health` shows it."""

leases = Table(
    "leases",
    metadata,
    Column("name", Name, primary_key=True),
    Column("owner", Name, nullable=False),
    Column("token", BigInteger, nullable=False),
    Column("expires_at", UtcMicros, nullable=False),
)

turns = Table(
    "turns",
    metadata,
    Column("inference_id", Id, primary_key=True),
    Column("episode_id", Id, nullable=False, index=True),
    Column("policy", Name, nullable=False),
    Column("version", Id, nullable=False),
    Column("kind", String(16), nullable=False),
    Column("source", Name, nullable=False),
    Column("started_at", UtcMicros, nullable=False),
    Column("finished_at", UtcMicros, nullable=False),
    Column("label_due_at", UtcMicros, nullable=False),
    Column("labelled_at", UtcMicros),
    Column("needs_relabel", Boolean, nullable=False, server_default=text("false")),
    Column("evidence", Integer, nullable=False, server_default="0"),
    Column("actor", Id, index=True),
    Column("segment", Name, nullable=False),
    Column("finish_reason", String(16), nullable=False),
    Column("train_consent", Boolean, nullable=False),
    Column("has_logprobs", Boolean, nullable=False),
    Column("prompt_tokens", Integer, nullable=False),
    Column("completion_tokens", Integer, nullable=False),
    Column("tool_calls", JSON, nullable=False),
    Column("time_to_first_token_s", Float),
    Column("release_id", Id),
    Column("stage", String(32), nullable=False),
    Column("arm", String(16), nullable=False),
    Column("probability", Float, nullable=False),
    Column("completion", Text, nullable=False),
    Column("tags", JSON, nullable=False),
    Column("payload_segment", Name),
    Column("erased_at", UtcMicros),
    _partial("ix_turns_policy_due", "policy", "label_due_at", where="labelled_at IS NULL"),
    _partial("ix_turns_policy_relabel", "policy", "inference_id", where="needs_relabel", sqlite="needs_relabel = 1"),
    Index("ix_turns_policy_version", "policy", "version", "finished_at"),
    _partial("ix_turns_labelled", "labelled_at", where="labelled_at IS NOT NULL"),
)

turn_words = Table(
    "turn_words",
    metadata,
    Column("inference_id", Id, primary_key=True),
    Column("completion", Text, nullable=False),
    Column("tool_calls", JSON, nullable=False),
)
"""What turns said, apart from their rows, which are small and change: `app.db.ingestion.words`."""

segments = Table(
    "segments",
    metadata,
    Column("name", Name, primary_key=True),
    Column("rows", Integer, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("created_at", UtcMicros, nullable=False),
    Column("state", String(16), nullable=False, server_default="whole"),
    _partial("ix_segments_writing", "created_at", where="state = 'writing'"),
    _partial("ix_segments_owing", "name", where="state IN ('trimming', 'dropping')"),
    Index("ix_segments_time", "created_at", "name"),
)
"""`state`: `writing` before its file is begun, `whole` with the rows that point into it, `trimming` where it holds turns besides that point
elsewhere, `dropping` when nobody points into it any more: see `app.db.ingestion.segment_rows`."""

turn_counts = Table(
    "turn_counts",
    metadata,
    Column("policy", Name),
    Column("version", Id),
    Column("turns", BigInteger, nullable=False, server_default="0"),
    Column("labelled", BigInteger, nullable=False, server_default="0"),
    PrimaryKeyConstraint("policy", "version"),
)
"""Turns per version and those of them that have a label, written with the turns: nobody counts a table to show a number."""

observations = Table(
    "observations",
    metadata,
    Column("source", Name),
    Column("id", Name),
    Column("policy", Name),
    Column("inference_id", Id, index=True),
    Column("episode_id", Id, index=True),
    Column("name", Name, nullable=False),
    Column("value", JSON),
    Column("occurred_at", UtcMicros, nullable=False),
    Column("received_at", UtcMicros, nullable=False),
    Column("actor", Id),
    Column("tags", JSON, nullable=False),
    Column("status", String(16), nullable=False),
    Column("retracted_at", UtcMicros),
    PrimaryKeyConstraint("source", "id"),
    CheckConstraint("(inference_id IS NULL) <> (episode_id IS NULL)", name="one_target"),
    _partial("ix_observations_actor", "actor", where="actor IS NOT NULL"),
    Index("ix_observations_parked", "received_at", sqlite_where=text("status = 'parked'"), postgresql_where=text("status = 'parked'")),
    _partial("ix_observations_stray", "received_at", where="status = 'orphan'"),
)
"""`status`: `joined`, `parked` (its turn is not known yet), `late`, `orphan`."""

retractions = Table(
    "retractions",
    metadata,
    Column("source", Name),
    Column("observation_id", Name),
    Column("occurred_at", UtcMicros, nullable=False),
    Column("matched", Boolean, nullable=False, server_default=text("false")),
    Column("received_at", UtcMicros, nullable=False),
    PrimaryKeyConstraint("source", "observation_id"),
    Index("ix_retractions_unmatched", "source", "observation_id", sqlite_where=text("NOT matched"), postgresql_where=text("NOT matched")),
    _partial("ix_retractions_waiting", "received_at", where="NOT matched"),
)
"""`matched`: the observation is known and taken back."""

exposures = Table(
    "exposures",
    metadata,
    Column("id", Id, primary_key=True),
    Column("policy", Name, nullable=False),
    Column("inference_id", Id, nullable=False, unique=True),
    Column("episode_id", Id, nullable=False, index=True),
    Column("actor", Id, nullable=False, index=True),
    Column("release_id", Id),
    Column("stage", String(32), nullable=False),
    Column("arm", String(16), nullable=False),
    Column("probability", Float, nullable=False),
    Column("share", Float, nullable=False),
    Column("holdback", Float, nullable=False),
    Column("digest", Id, nullable=False),
    Column("occurred_at", UtcMicros, nullable=False),
    Index("ix_exposures_release", "release_id", "stage", "occurred_at"),
    Index("ix_exposures_policy_time", "policy", "occurred_at"),
)

counters = Table(
    "counters",
    metadata,
    Column("policy", Name),
    Column("name", Name),
    Column("value", BigInteger, nullable=False),
    PrimaryKeyConstraint("policy", "name"),
)
"""Monotone counts that must survive restarts: early, late, orphaned, duplicate, conflict, retracted, dead_lettered, …"""

compatible_revisions = Table("compatible_revisions", metadata, Column("revision", Name, primary_key=True))
"""Revisions whose code may run on this schema. An expanding migration adds its own; a contracting one takes away those it breaks."""

# --- labels ---------------------------------------------------------------------------------------------------------------

rule_sets = Table(
    "rule_sets",
    metadata,
    Column("digest", Id, primary_key=True),
    Column("name", Name, nullable=False),
    Column("toml", Text, nullable=False),
    Column("created_at", UtcMicros, nullable=False),
)

rule_set_activations = Table(
    "rule_set_activations",
    metadata,
    Column("id", Sequence, primary_key=True, autoincrement=True),
    Column("policy", Name, nullable=False, index=True),
    Column("digest", Id, nullable=False),
    Column("activated_by", Name, nullable=False),
    Column("activated_at", UtcMicros, nullable=False),
    sqlite_autoincrement=True,
)

rule_set_proposals = Table(
    "rule_set_proposals",
    metadata,
    Column("id", Name, primary_key=True),
    Column("policy", Name, nullable=False),
    Column("toml", Text, nullable=False),
    Column("proposed_by", Name, nullable=False),
    Column("proposed_at", UtcMicros, nullable=False),
    Column("settled_at", UtcMicros),
    Column("digest", Id),
    Column("refused", Text),
    Index("ix_rule_set_proposals_policy", "policy", "proposed_at"),
)
"""Rule sets that people asked for; the labeller put each in force (`digest`) or said what is wrong with it (`refused`)."""

rule_set_replays = Table(
    "rule_set_replays",
    metadata,
    Column("id", Name, primary_key=True),
    Column("policy", Name, nullable=False),
    Column("toml", Text, nullable=False),
    Column("asked_by", Name, nullable=False),
    Column("asked_at", UtcMicros, nullable=False),
    Column("settled_at", UtcMicros),
    Column("refused", Text),
    Column("outcome", JSON),
    Index("ix_rule_set_replays_policy", "policy", "asked_at"),
)
"""Rule sets that people want to see over stored labels; the labeller scores by each (`outcome`) or says what is wrong with it."""

follow_up_readings = Table(
    "follow_up_readings",
    metadata,
    Column("inference_id", Id),
    Column("observation_id", Name),
    Column("policy", Name, nullable=False),
    Column("labelled_at", UtcMicros, nullable=False),
    Column("leaned_to", String(16)),
    Column("unsure", Boolean, nullable=False),
    Column("mood", String(16)),
    Column("read_by", Name),
    Column("proven", Boolean),
    Column("read_at", UtcMicros),
    PrimaryKeyConstraint("inference_id", "observation_id"),
    _partial("ix_follow_up_readings_open", "policy", "labelled_at", where="mood IS NULL"),
    _partial("ix_follow_up_readings_read", "policy", "read_at", where="mood IS NOT NULL"),
)
"""Follow-ups that people are asked to read: what the labeller's reader abstained on (`unsure`), and some of the others, drawn by lot."""

_TELLS = "batch_id IS NULL AND (exclusion IS NULL OR exclusion IN ('empty_completion', 'no_logprobs'))"
POOL, POOL_SQLITE = f"current AND NOT held_out AND {_TELLS}", f"current = 1 AND held_out = 0 AND {_TELLS}"
"""Labels from which batches are drawn: unused, and of turns that something is known about. Said exactly so by who wants the index."""

labels = Table(
    "labels",
    metadata,
    Column("inference_id", Id),
    Column("revision", Integer),
    Column("current", Boolean, nullable=False),
    Column("policy", Name, nullable=False),
    Column("version", Id, nullable=False),
    Column("reward", Float, nullable=False),
    Column("terms", JSON, nullable=False),
    Column("rule_set", Id, nullable=False),
    Column("exclusion", String(32)),
    Column("segment", Name, nullable=False),
    Column("actor", Id),
    Column("held_out", Boolean, nullable=False),
    Column("finished_at", UtcMicros, nullable=False),
    Column("labelled_at", UtcMicros, nullable=False),
    Column("lot", BigInteger, nullable=False, server_default="0"),
    Column("batch_id", Id),
    Column("success", Float),
    PrimaryKeyConstraint("inference_id", "revision"),
    Index("uq_labels_one_current", "inference_id", unique=True, sqlite_where=text("current"), postgresql_where=text("current")),
    Index("ix_labels_window", "policy", "version", "labelled_at"),
    _partial("ix_labels_time", "policy", "labelled_at", where="current", sqlite="current = 1"),
    _partial("ix_labels_lot", "policy", "lot", where="current AND batch_id IS NULL", sqlite="current = 1 AND batch_id IS NULL"),
    _partial(
        "ix_labels_pool",
        "policy",
        "version",
        "lot",
        where=POOL,
        sqlite=POOL_SQLITE,
    ),
    _partial("ix_labels_actor", "actor", where="actor IS NOT NULL"),
)
"""`lot` is a hash of the episode, see `app.db.learning.labels.lot_of`: batches are drawn along it. `batch_id` tells where the label was
used; `success` is what the gold signal `task_success` said when the label was made, for `label_rollups`."""

label_rollups = Table(
    "label_rollups",
    metadata,
    Column("policy", Name),
    Column("version", Id),
    Column("hour", UtcMicros),
    Column("segment", Name),
    Column("measure", Name),
    Column("n", BigInteger, nullable=False),
    Column("total", BigInteger, nullable=False),
    Column("squares", BigInteger, nullable=False),
    Column("negative", BigInteger, nullable=False),
    PrimaryKeyConstraint("policy", "version", "hour", "segment", "measure"),
    Index("ix_label_rollups_hour", "policy", "hour"),
)
"""Current labels added up (`app.db.learning.rollups`), sums in millionths: what pages show costs what a page has, not
what the labels have."""

erasures = Table(
    "erasures",
    metadata,
    Column("actor", Id, primary_key=True),
    Column("requested_by", Name, nullable=False),
    Column("erased_at", UtcMicros, nullable=False),
    Column("report", JSON, nullable=False),
)

# --- batches, runs, versions ------------------------------------------------------------------------------------------------

batches = Table(
    "batches",
    metadata,
    Column("id", Id, primary_key=True),
    Column("policy", Name, nullable=False),
    Column("slot", BigInteger, nullable=False),
    Column("champion", Id, nullable=False),
    Column("anchor", Id, nullable=False),
    Column("rule_set", Id, nullable=False),
    Column("window_from", UtcMicros, nullable=False),
    Column("window_to", UtcMicros, nullable=False),
    Column("left_out", JSON, nullable=False),
    Column("created_at", UtcMicros, nullable=False),
    UniqueConstraint("policy", "slot"),
)

batch_items = Table(
    "batch_items",
    metadata,
    Column("inference_id", Id, primary_key=True),
    Column("batch_id", Id, nullable=False, index=True),
    Column("episode_id", Id, nullable=False),
    Column("reward", Float, nullable=False),
    Column("label_revision", Integer, nullable=False),
    Column("segment", Name, nullable=False),
    Column("actor", Id),
    Column("channels", Text, nullable=False, server_default=""),
    _partial("ix_batch_items_actor", "actor", where="actor IS NOT NULL"),
)
"""The primary key is the promise that a turn is trained on at most once, whoever cuts."""

returned_items = Table(
    "returned_items",
    metadata,
    Column("inference_id", Id),
    Column("batch_id", Id),
    Column("episode_id", Id, nullable=False),
    Column("reward", Float, nullable=False),
    Column("label_revision", Integer, nullable=False),
    Column("segment", Name, nullable=False),
    Column("actor", Id),
    Column("channels", Text, nullable=False, server_default=""),
    PrimaryKeyConstraint("inference_id", "batch_id"),
    Index("ix_returned_items_batch_id", "batch_id"),
    Index("ix_returned_items_actor", "actor", sqlite_where=text("actor IS NOT NULL"), postgresql_where=text("actor IS NOT NULL")),
)
"""Items of batches that came to nothing by a fault: their labels may be used again, and this says what the batch was."""

training_runs = Table(
    "training_runs",
    metadata,
    Column("id", Id, primary_key=True),
    Column("policy", Name, nullable=False, index=True),
    Column("batch_id", Id, nullable=False),
    Column("parent", Id, nullable=False),
    Column("status", String(16), nullable=False),
    Column("hold_reason", String(40)),
    Column("message", Text),
    Column("candidate", Id),
    Column("metrics", JSON, nullable=False),
    Column("config", JSON, nullable=False),
    Column("started_at", UtcMicros, nullable=False),
    Column("finished_at", UtcMicros),
)

versions = Table(
    "versions",
    metadata,
    Column("digest", Id),
    Column("policy", Name),
    Column("name", Name, nullable=False),
    Column("kind", String(16), nullable=False),
    Column("parent", Id),
    Column("step", Integer, nullable=False),
    Column("run_id", Id),
    Column("base_model", Name, nullable=False),
    Column("licence", Name, nullable=False),
    Column("optimizer_uri", Text),
    Column("tags", JSON, nullable=False),
    Column("created_at", UtcMicros, nullable=False),
    PrimaryKeyConstraint("policy", "digest"),
    UniqueConstraint("policy", "name"),
    Index("ix_versions_policy_created", "policy", "created_at", "digest"),
)

tracker_states = Table(
    "tracker_states",
    metadata,
    Column("digest", Id, primary_key=True),
    Column("policy", Name, nullable=False),
    Column("state", JSON, nullable=False),
    Column("updated_at", UtcMicros, nullable=False),
)
"""The baseline tracker after the run that made `digest`; like the optimizer state it follows the champion's lineage."""

cycles = Table(
    "cycles",
    metadata,
    Column("policy", Name),
    Column("slot", BigInteger),
    Column("status", String(16), nullable=False),
    Column("step", String(32), nullable=False),
    Column("reason", Text),
    Column("owner", Name),
    Column("fencing_token", BigInteger, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("lease_expires_at", UtcMicros),
    Column("batch_id", Id),
    Column("run_id", Id),
    Column("release_id", Id),
    Column("timings", JSON, nullable=False),
    Column("started_at", UtcMicros, nullable=False),
    Column("finished_at", UtcMicros),
    PrimaryKeyConstraint("policy", "slot"),
    CheckConstraint("status IN ('running', 'done', 'held', 'skipped', 'failed')", name="status"),
)

progress = Table(
    "progress",
    metadata,
    Column("policy", Name),
    Column("task", Name),
    Column("done", Float, nullable=False),
    Column("total", Float, nullable=False),
    Column("detail", JSON, nullable=False),
    Column("updated_at", UtcMicros, nullable=False),
    PrimaryKeyConstraint("policy", "task"),
)

suite_scores = Table(
    "suite_scores",
    metadata,
    Column("digest", Id),
    Column("suite", Name),
    Column("scores", JSON, nullable=False),
    Column("scored_at", UtcMicros, nullable=False),
    PrimaryKeyConstraint("digest", "suite"),
)
"""Scores of a version on a suite in one comparison (content hash of both): a killed cycle asks nothing twice, a new one draws afresh."""

# --- releases ---------------------------------------------------------------------------------------------------------------

releases = Table(
    "releases",
    metadata,
    Column("id", Id, primary_key=True),
    Column("policy", Name, nullable=False),
    Column("digest", Id, nullable=False, index=True),
    Column("version_name", Name, nullable=False),
    Column("state", String(24), nullable=False),
    Column("generation", Integer, nullable=False),
    Column("stage", Integer),
    Column("stage_since", UtcMicros),
    Column("champion_digest", Id, nullable=False),
    Column("champion_generation", Integer, nullable=False),
    Column("evidence_digest", Id),
    Column("reason", Text),
    Column("initiator", Name),
    Column("approvals_needed", Integer),
    Column("approval_expires_at", UtcMicros),
    Column("config", JSON, nullable=False),
    Column("created_at", UtcMicros, nullable=False),
    Column("changed_at", UtcMicros, nullable=False),
    CheckConstraint("state IN (" + ", ".join(f"'{s.value}'" for s in ReleaseState) + ")", name="state"),
    Index(
        "uq_releases_one_canary", "policy", unique=True, sqlite_where=text("state = 'CANARY'"), postgresql_where=text("state = 'CANARY'")
    ),
    Index("ix_releases_policy_state", "policy", "state"),
    Index("ix_releases_policy_created", "policy", "created_at", "id"),
)

release_history = Table(
    "release_history",
    metadata,
    Column("release_id", Id),
    Column("generation", Integer),
    Column("from_state", String(24)),
    Column("to_state", String(24), nullable=False),
    Column("stage", Integer),
    Column("reason", Text),
    Column("actor", Name, nullable=False),
    Column("occurred_at", UtcMicros, nullable=False),
    PrimaryKeyConstraint("release_id", "generation"),
)

gate_results = Table(
    "gate_results",
    metadata,
    Column("id", Sequence, primary_key=True, autoincrement=True),
    Column("release_id", Id, nullable=False, index=True),
    Column("gate", String(32), nullable=False),
    Column("digest", Id, nullable=False),
    Column("verdict", String(16), nullable=False),
    Column("action", String(16)),
    Column("reason", Text, nullable=False),
    Column("evidence", JSON, nullable=False),
    Column("config_hash", Id, nullable=False),
    Column("evidence_hash", Id, nullable=False),
    Column("decided_at", UtcMicros, nullable=False),
    sqlite_autoincrement=True,
)

gate_evidence = Table(
    "gate_evidence",
    metadata,
    Column("hash", Id, primary_key=True),
    Column("release_id", Id, nullable=False, index=True),
    Column("payload", LargeBinary, nullable=False),
    Column("created_at", UtcMicros, nullable=False),
)
"""The units a live decision was computed from, compressed, by content: `ratchet release explain` decides again from them."""

blind_pairs = Table(
    "blind_pairs",
    metadata,
    Column("id", Id, primary_key=True),
    Column("release_id", Id, nullable=False, index=True),
    Column("policy", Name, nullable=False),
    Column("suite", Name, nullable=False),
    Column("task", Text, nullable=False),
    Column("cluster", Text, nullable=False, index=True),
    Column("messages", JSON, nullable=False),
    Column("champion_answer", Text, nullable=False),
    Column("candidate_answer", Text, nullable=False),
    Column("champion_score", Float, nullable=False),
    Column("candidate_score", Float, nullable=False),
    Column("salt", String(64), nullable=False),
    Column("kept_at", UtcMicros, nullable=False, index=True),
)
"""Held-out questions with both versions' answers, for people to judge without knowing which is which."""

blind_votes = Table(
    "blind_votes",
    metadata,
    Column("pair_id", Id),
    Column("voter", Name),
    Column("release_id", Id, nullable=False, index=True),
    Column("favoured", String(16), nullable=False),
    Column("candidate_left", Boolean, nullable=False),
    Column("counted", Boolean, nullable=False),
    Column("proven", Boolean, nullable=False),
    Column("voted_at", UtcMicros, nullable=False),
    PrimaryKeyConstraint("pair_id", "voter"),
    Index("uq_blind_votes_one_counts", "pair_id", unique=True, sqlite_where=text("counted"), postgresql_where=text("counted")),
)
"""Nobody votes twice on one pair, and one vote of each pair counts."""

deployment_pointer = Table(
    "deployment_pointer",
    metadata,
    Column("policy", Name, primary_key=True),
    Column("digest", Id, nullable=False),
    Column("generation", Integer, nullable=False),
    Column("previous", Id),
    Column("anchor", Id, nullable=False),
    Column("holdback", Float, nullable=False),
    Column("holdback_digest", Id),
    Column("release_id", Id),
    Column("changed_at", UtcMicros, nullable=False),
)

deployment_history = Table(
    "deployment_history",
    metadata,
    Column("policy", Name),
    Column("generation", Integer),
    Column("digest", Id, nullable=False),
    Column("previous", Id),
    Column("anchor", Id, nullable=False),
    Column("holdback", Float, nullable=False, server_default="0"),
    Column("holdback_digest", Id),
    Column("action", String(24), nullable=False),
    Column("good", Boolean, nullable=False),
    Column("release_id", Id),
    Column("actor", Name, nullable=False),
    Column("reason", Text),
    Column("occurred_at", UtcMicros, nullable=False),
    PrimaryKeyConstraint("policy", "generation"),
)

quarantine = Table(
    "quarantine",
    metadata,
    Column("policy", Name),
    Column("digest", Id),
    Column("reason", Text, nullable=False),
    Column("release_id", Id),
    Column("since", UtcMicros, nullable=False),
    Column("lift_votes", JSON),
    PrimaryKeyConstraint("policy", "digest"),
)

pinned_versions = Table(
    "pinned_versions",
    metadata,
    Column("policy", Name),
    Column("digest", Id),
    Column("reason", Text, nullable=False),
    Column("pinned_by", Name, nullable=False),
    Column("pinned_at", UtcMicros, nullable=False),
    PrimaryKeyConstraint("policy", "digest"),
)
"""Versions whose weights people want kept, however old they become."""

holdouts = Table(
    "holdouts",
    metadata,
    Column("id", Id, primary_key=True),
    Column("policy", Name, nullable=False),
    Column("digest", Id, nullable=False),
    Column("share", Float, nullable=False),
    Column("began_at", UtcMicros, nullable=False),
    Column("ends_at", UtcMicros, nullable=False),
    Column("counted_until", UtcMicros, nullable=False),
    Column("thresholds", JSON, nullable=False),
    Column("readings", JSON, nullable=False),
    Column("read_until", UtcMicros),
    Column("ended_at", UtcMicros),
    Column("ended_because", Text),
    Index("ix_holdouts_policy", "policy", "began_at"),
    Index("uq_holdouts_open", "policy", unique=True, sqlite_where=text("ended_at IS NULL"), postgresql_where=text("ended_at IS NULL")),
)
"""Long-term holdouts; one of a policy is open at a time."""

holdout_people = Table(
    "holdout_people",
    metadata,
    Column("holdout", Id),
    Column("week", Integer),
    Column("person", Id),
    Column("metric", Name),
    Column("held", Boolean, nullable=False),
    Column("turns", Integer, nullable=False),
    Column("total", Float, nullable=False),
    PrimaryKeyConstraint("holdout", "week", "person", "metric"),
    Index("ix_holdout_people_person", "person"),
)
"""Sums of whom a holdout follows, by week; gone once it has ended."""

approvals = Table(
    "approvals",
    metadata,
    Column("release_id", Id),
    Column("approver", Name),
    Column("evidence_digest", Id),
    Column("approved", Boolean, nullable=False),
    Column("reason", Text),
    Column("decided_at", UtcMicros, nullable=False),
    Column("voided_at", UtcMicros),
    PrimaryKeyConstraint("release_id", "approver", "evidence_digest"),
)

circuit_breakers = Table(
    "circuit_breakers",
    metadata,
    Column("policy", Name, primary_key=True),
    Column("reason", Text, nullable=False),
    Column("frozen_at", UtcMicros, nullable=False),
    Column("unfreeze_votes", JSON, nullable=False),
)

alarms = Table(
    "alarms",
    metadata,
    Column("id", Id, primary_key=True),
    Column("policy", Name, nullable=False),
    Column("kind", String(24), nullable=False),
    Column("release_id", Id, index=True),
    Column("generation", Integer, nullable=False),
    Column("reason", Text, nullable=False),
    Column("raised_at", UtcMicros, nullable=False),
    Column("raised_by", Name, nullable=False),
    Column("until", Text, nullable=False),
    Column("ended_at", UtcMicros),
    Column("ended_by", Text),
    Column("end_reason", Text),
    Index("ix_alarms_policy", "policy", "raised_at"),
    Index(
        "uq_alarms_one_open",
        "policy",
        "kind",
        unique=True,
        sqlite_where=text("ended_at IS NULL"),
        postgresql_where=text("ended_at IS NULL"),
    ),
)

audit = Table(
    "audit",
    metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("occurred_at", UtcMicros, nullable=False),
    Column("actor", Name, nullable=False),
    Column("action", Name, nullable=False),
    Column("subject", Name, nullable=False),
    Column("detail", JSON, nullable=False),
    Column("previous_hash", Id, nullable=False),
    Column("hash", Id, nullable=False, unique=True),
    Index("ix_audit_subject", "subject", "seq"),
)

audit_head = Table(
    "audit_head",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("seq", BigInteger, nullable=False),
    Column("hash", Id, nullable=False),
)
"""One row, locked by every appender: reading the newest audit row without it forks the chain under concurrency."""

outbox = Table(
    "outbox",
    metadata,
    Column("seq", Sequence, primary_key=True, autoincrement=True),
    Column("event_id", Id, nullable=False, unique=True),
    Column("topic", Name, nullable=False),
    Column("key", Name, nullable=False),
    Column("type", Name, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    Column("created_at", UtcMicros, nullable=False),
    Column("sent_at", UtcMicros),
    Index("ix_outbox_to_send", "seq", sqlite_where=text("sent_at IS NULL"), postgresql_where=text("sent_at IS NULL")),
    _partial("ix_outbox_key", "key", where="length(payload) > 0"),
    sqlite_autoincrement=True,
)

webhooks = Table(
    "webhooks",
    metadata,
    Column("id", Id, primary_key=True),
    Column("policy", Name),
    Column("url", Text, nullable=False),
    Column("secrets", JSON, nullable=False),
    # In clear: empty, but for what an older process registered during an upgrade.
    Column("events", JSON, nullable=False),
    Column("created_at", UtcMicros, nullable=False),
    Column("disabled_at", UtcMicros),
    Column("sealed", JSON),
    # The secrets, newest first, each sealed with the deployment's key.
)

webhook_deliveries = Table(
    "webhook_deliveries",
    metadata,
    Column("webhook_id", Id),
    Column("event_id", Id),
    Column("attempts", Integer, nullable=False),
    Column("next_attempt_at", UtcMicros),
    Column("delivered_at", UtcMicros),
    Column("last_status", Text),
    PrimaryKeyConstraint("webhook_id", "event_id"),
)

# --- serving and access -------------------------------------------------------------------------------------------------------

engine_versions = Table(
    "engine_versions",
    metadata,
    Column("engine_id", Name),
    Column("policy", Name),
    Column("digest", Id),
    Column("address", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("detail", Text),
    Column("changed_at", UtcMicros, nullable=False),
    Column("seen_at", UtcMicros, nullable=False),
    Column("region", Name, nullable=False, server_default=""),
    PrimaryKeyConstraint("engine_id", "policy", "digest"),
)
"""The ledger of what each engine really holds: `loading`, `ready` (whole-state digest verified), `failed`, `dropped`."""

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", Id, primary_key=True),
    Column("prefix", String(16), nullable=False, unique=True),
    Column("hash", LargeBinary, nullable=False),
    Column("name", Name, nullable=False),
    Column("scopes", JSON, nullable=False),
    Column("policy", Name),
    Column("rate_per_s", Float),
    Column("created_at", UtcMicros, nullable=False),
    Column("expires_at", UtcMicros),
    Column("revoked_at", UtcMicros),
    Column("person_id", Id, index=True),
    # Whom it speaks for: a personal token. Null: a program's key, which speaks for nobody.
    Column("made_by", Name),
    Column("last_used_at", UtcMicros),
    # To the minute.
)

people = Table(
    "people",
    metadata,
    Column("id", Id, primary_key=True),
    Column("name", Name, nullable=False, unique=True),
    Column("email", Name, unique=True),
    Column("os_user", Name),
    Column("roles", JSON, nullable=False),
    Column("policy", Name),
    Column("password_hash", Text),
    Column("subject", Text, unique=True),
    Column("created_at", UtcMicros, nullable=False),
    Column("made_by", Name, nullable=False),
    Column("disabled_at", UtcMicros),
    Column("failures", Integer, nullable=False, server_default="0"),
    # Wrong passwords since the last right one.
    Column("locked_until", UtcMicros),
)

invitations = Table(
    "invitations",
    metadata,
    Column("hash", Id, primary_key=True),
    Column("person_id", Id, nullable=False, index=True),
    Column("made_by", Name, nullable=False),
    Column("made_at", UtcMicros, nullable=False),
    Column("expires_at", UtcMicros, nullable=False),
    Column("used_at", UtcMicros),
)
"""Links with which somebody sets their password, once."""

browser_sessions = Table(
    "browser_sessions",
    metadata,
    Column("hash", Id, primary_key=True),
    Column("person_id", Id, nullable=False, index=True),
    Column("created_at", UtcMicros, nullable=False),
    Column("seen_at", UtcMicros, nullable=False),
    Column("expires_at", UtcMicros, nullable=False),
    Column("ended_at", UtcMicros),
)

credential_acts = Table(
    "credential_acts",
    metadata,
    Column("seq", Sequence, primary_key=True, autoincrement=True),
    Column("person", Name, nullable=False),
    Column("made_by", Name, nullable=False),
    Column("what", String(24), nullable=False),
    Column("at", UtcMicros, nullable=False),
    Index("ix_credential_acts_person", "person", "at"),
    sqlite_autoincrement=True,
)
"""Who made or reset whose credential, and when: they do not count beside each other for a day."""

done_requests = Table(
    "done_requests",
    metadata,
    Column("request_id", Name, primary_key=True),
    Column("actor", Name, nullable=False),
    Column("act", Name, nullable=False),
    Column("subject", Name, nullable=False),
    Column("done_at", UtcMicros, nullable=False),
)
"""Acts of people by the name of their request: one that is sent again is done already."""

# --- operations ---------------------------------------------------------------------------------------------------------------

deployment_facts = Table(
    "deployment_facts",
    metadata,
    Column("name", Name, primary_key=True),
    Column("value", JSON, nullable=False),
    Column("at", UtcMicros, nullable=False),
)
"""What a deployment knows about itself: its id, its newest backup, its newest drill."""

# --- rollouts ---------------------------------------------------------------------------------------------------------------

rollouts = Table(
    "rollouts",
    metadata,
    Column("id", Id, primary_key=True),
    Column("policy", Name, nullable=False),
    Column("taskset", Name, nullable=False),
    Column("task", Name, nullable=False),
    Column("task_hash", Id, nullable=False),
    Column("group_id", Id, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("harness_hash", Id, nullable=False),
    Column("episode_id", Id),
    Column("owner", Name),
    Column("token", Integer, nullable=False),
    Column("leased_until", UtcMicros),
    Column("planned_at", UtcMicros, nullable=False),
    Column("closed_at", UtcMicros),
    Column("outcome", String(24)),
    Column("reward", Float),
    Column("duration_s", Float),
    Column("turns", Integer),
    Column("flags", JSON),
    UniqueConstraint("episode_id"),
    UniqueConstraint("group_id", "attempt"),
    Index("ix_rollouts_taskset", "policy", "taskset", "planned_at"),
    _partial("ix_rollouts_open", "policy", "planned_at", where="outcome IS NULL"),
)
"""`token` fences: whoever took a row later has a higher one, and writes under an older one change nothing."""
