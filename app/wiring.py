"""The only place where settings become live adapters. One function per thing that is plugged in; heavy libraries are imported inside.

Nothing happens at import. Every process calls the few functions it needs; tests call them with settings of their own.
"""

import hashlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine

from app.contact import Contact
from app.domain.errors import BadConfig, Unavailable, UnknownPolicy
from app.domain.ids import checked_pseudonym, hash_actor, salt_fingerprint, utc_now, uuid7
from app.domain.policies import PolicyConfig
from app.domain.ports import Lease
from app.domain.release.terms import Terms
from app.domain.release.versions import KEPT_CHAMPIONS
from app.domain.retention import retention
from app.domain.telemetry.events import Erasure
from app.domain.telemetry.streams import ErasureReport, JoinRules, TopicPartition, join_rules
from app.sealing import Seal
from app.secret_files import SecretReader, private_folder, read_secrets, rotate, secret_file, written
from app.settings import Settings, policies, read_toml

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from app.access import SignIn
    from app.access.oidc import Oidc
    from app.db.access.erasures import SqlEraser
    from app.db.access.keys import SqlKeys
    from app.db.access.people import SqlPeople
    from app.db.access.traces import SqlTraces
    from app.db.clock import DatabaseClock
    from app.db.ingestion.backlog import SqlBacklog
    from app.db.ingestion.claims import SqlClaimSweep
    from app.db.ingestion.dead_letters import SqlDeadLetters
    from app.db.ingestion.episodes import SqlEpisodes
    from app.db.ingestion.inbox import SqlInbox
    from app.db.ingestion.relay import SqlRelayOffice
    from app.db.ingestion.spool import SpooledInbox
    from app.db.ingestion.streams import SqlEffects
    from app.db.learning.batches import SqlBatchStore
    from app.db.learning.cycles import SqlCycles
    from app.db.learning.labels import SqlLabels
    from app.db.learning.readings import SqlReadings as FollowUpReadings
    from app.db.learning.rollouts import SqlRollouts
    from app.db.learning.rule_sets import SqlReplays, SqlRules
    from app.db.learning.runs import SqlRunStore
    from app.db.learning.suite_scores import SqlScores
    from app.db.learning.suite_sources import WellEnded
    from app.db.operations.examination import SqlDeploymentState
    from app.db.operations.readings import SqlReadings
    from app.db.progress import SqlProgressLog
    from app.db.reads import SqlReads
    from app.db.recovery.checks import Finding, SqlRecovery
    from app.db.release.audit import Verification
    from app.db.release.done import SqlRequests
    from app.db.release.engines import SqlEngineLedger
    from app.db.release.evidence import SqlEvidenceBook
    from app.db.release.holdouts import SqlHoldoutBook
    from app.db.release.needed_weights import SqlNeededWeights
    from app.db.release.pairs import SqlPairs
    from app.db.release.pointer import SqlRoutes
    from app.db.release.release_views import SqlReleaseViews
    from app.db.release.releases import SqlReleaseLedger
    from app.db.release.versions import SqlVersions
    from app.db.release.webhooks import SqlWebhookBook
    from app.db.sight import SqlPages
    from app.db.sight.demonstration import SqlOperations
    from app.db.troubles import SqlTroubles
    from app.db.upkeep.keeper import SqlUpkeep
    from app.domain.learning.batches import RewardedTurn, TurnPayload
    from app.domain.learning.boxes import Boxes
    from app.domain.learning.corrections import Reaction
    from app.domain.learning.decisions import Decision
    from app.domain.learning.label_reports import LabelReport
    from app.domain.learning.rewards import Labelled
    from app.domain.ports import Claims
    from app.domain.release.releases import Release
    from app.domain.release.versions import PastRun
    from app.domain.telemetry.turns import PayloadClaim
    from app.messaging.cluster import Cluster
    from app.messaging.consumer import KafkaSource
    from app.messaging.direct import DirectInbox
    from app.messaging.producer import KafkaSink
    from app.policy.storage.remote import RemoteWeights
    from app.policy.storage.store import LocalWeights
    from app.registry.mlflow_registry import MlflowRegistry
    from app.release.desk import ReleaseDesk
    from app.release.jury import ReleaseJury
    from app.release.webhooks import Courier
    from app.serving.client import HttpEngines
    from app.serving.servers.control import Control
    from app.serving.servers.engines import ServerEngines
    from app.telemetry.instruments import Instruments
    from app.telemetry.traces import Traces
    from app.trajectories.segments import ParquetSegments


@cache
def code_version() -> str:
    """What is running, as versions record it: the package's version and the beginning of a SHA-256 over its source files."""
    root, source = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(path for room in ("app", "pipelines") for path in (root / room).rglob("*.py")):
        source.update(file.relative_to(root).as_posix().encode() + b"\x1f" + file.read_bytes())
    return f"ratchet {metadata.version('ratchet')} sha256:{source.hexdigest()[:16]}"


def upgrade_schema(settings: Settings) -> None:
    """Create the databases or bring them to this code's revision. Raises `BadConfig` for one that a newer version of Ratchet wrote."""
    from app.db import migrate

    keep_salt(settings)
    for url in dict.fromkeys((settings.database_url, settings.inbox_url)):
        migrate.refuse_unknown(url)
        if migrate.knows(url):
            migrate.upgrade(url, seal=webhook_seal(settings))
    note_salt(settings)
    seal_webhooks(settings)
    recount_labels(settings, only_if_empty=True)


def contract_schema(settings: Settings, *, moved: Callable[[int], None]) -> list[str]:
    """End what is kept for processes of older versions, none of which runs any more; returns their revisions. `moved` hears how many
    turns' words were moved so far. Killed on the way, the next call goes on.
    """
    from app.db import migrate
    from app.db.ingestion.words import move_apart

    with opened_state(settings) as state:
        older = {revision for url in {settings.database_url, settings.inbox_url} for revision in migrate.contract(url)}
        after: str | None = ""
        total = 0
        while after is not None:
            count, after = move_apart(state, after=after, limit=2_000)
            total += count
            moved(total)
    return sorted(older)


def seal_webhooks(settings: Settings) -> None:
    """Seal the signing secrets that an older process stored in clear."""
    from app.db.release.webhooks import SqlWebhookBook

    with opened_state(settings) as state:
        SqlWebhookBook(state, webhook_seal(settings)).seal_all()


def recount_labels(settings: Settings, *, only_if_empty: bool = False) -> int:
    """Add the labels up anew for the pages; how many rows that made."""
    from app.db.engine import MIGRATING, open_engine, writing
    from app.db.learning.rollups import rebuild

    state = open_engine(settings.database_url, session=MIGRATING)
    try:
        with writing(state) as connection:
            return rebuild(connection, only_if_empty=only_if_empty)
    finally:
        state.dispose()


def open_operations(settings: Settings) -> "SqlOperations":
    """What the demo's terminal reads."""
    from app.db.sight.demonstration import SqlOperations

    return SqlOperations(open_state(settings), open_inbox(settings))


def open_state(settings: Settings) -> Engine:
    """The state database, refused when its schema is not at the revision this code was written for."""
    from app.db import migrate
    from app.db.engine import open_engine

    migrate.require_head(settings.database_url)
    return open_engine(settings.database_url)


@contextmanager
def opened_state(settings: Settings) -> "Iterator[Engine]":
    """The state database for one piece of work, and no longer."""
    state = open_state(settings)
    try:
        yield state
    finally:
        state.dispose()


def open_inbox(settings: Settings) -> Engine:
    """The inbox database; the same as the state database on PostgreSQL, a file of its own on SQLite."""
    from app.db import migrate
    from app.db.engine import open_engine

    migrate.require_head(settings.inbox_url)
    return open_engine(settings.inbox_url)


def clock(settings: Settings) -> "DatabaseClock":
    """The time by which all processes of this deployment act: the state database's. Raises `BadConfig` on a machine whose clock is off."""
    from app.db.clock import DatabaseClock

    told = DatabaseClock(open_state(settings))
    told.refuse_skew()
    return told


def readings(settings: Settings) -> "SqlReadings":
    """What the database knows of the loop, for `/metrics`."""
    from app.db.operations.readings import SqlReadings

    return SqlReadings(open_state(settings), open_inbox(settings))


def deployment_state(settings: Settings) -> "SqlDeploymentState":
    """The deployment as its database knows it, for `ratchet doctor` and backups."""
    from app.db.operations.examination import SqlDeploymentState

    return SqlDeploymentState(open_state(settings))


def database_hosts(url: str) -> list[str]:
    """Where a database's servers are; nothing of one that this machine alone has."""
    from app.db.operations.strangers import hosts_of

    return hosts_of(url)


def lets_strangers_in(url: str) -> bool:
    """Whether a database lets our user in whatever the password. Raises `Unavailable`."""
    from app.db.operations.strangers import lets_strangers_in as lets_in

    return lets_in(url)


def database_away() -> tuple[type[Exception], ...]:
    """What is raised where a database is away, fails over or has become one that only reads."""
    from sqlalchemy.exc import InterfaceError, InternalError, OperationalError

    return Unavailable, OperationalError, InterfaceError, InternalError


def places(settings: Settings) -> dict[str, str]:
    """Where files lie, by the setting that says so."""
    from app.policy.storage.remote_files import is_url

    states = {"RATCHET_STATES": settings.states} if is_url(settings.states) else {}  # a folder of one's own is nobody else's
    return {"RATCHET_SEGMENTS": settings.segments, "RATCHET_WEIGHTS": settings.weights} | states


def claim_place(location: str, identity: str, *, setting: str) -> None:
    """Take the place for this deployment. Raises `BadConfig` where it is another one's."""
    from app.policy.storage.claiming import claim

    claim(location, identity, setting=setting)


def place_faults(location: str, *, setting: str) -> list[str]:
    """What a place for files does not keep of what storage has to keep for us."""
    from app.policy.storage.claiming import faults

    return faults(location, setting=setting)


def claim_places(settings: Settings) -> None:
    """Take the places of all files for this deployment. Raises `BadConfig` where one is another deployment's."""
    with closing(deployment_state(settings)) as state:
        identity = state.identity()
    for setting, location in places(settings).items():
        claim_place(location, identity, setting=setting)


def refuse_one_machine(settings: Settings) -> None:
    """Where RATCHET_STANDBY is `required`, refuse a database whose commits wait for no standby, an empty one too."""
    from app.db.engine import expected_to_answer, open_engine, reading
    from app.db.operations.server import server_state

    if not settings.standby_required:
        return
    engine = open_engine(settings.database_url)
    try:
        with expected_to_answer(), reading(engine) as connection:
            server = server_state(connection)
    finally:
        engine.dispose()
    if server is None or not server.synchronous:
        raise BadConfig(
            "RATCHET_STANDBY is `required` and a commit waits for no standby, so what is acknowledged could be lost with one machine: set "
            "synchronous_standby_names = 'ANY 1 (*)' on the primary with a standby running, or unset RATCHET_STANDBY"
        )


def topic_faults(settings: Settings) -> list[str]:
    """How the broker's topics differ from what is configured. Raises `Unavailable`."""
    from app.messaging.topics import topic_faults as faults

    return faults(cluster(settings))


def check_tracking(settings: Settings) -> None:
    """Raise `Unavailable` where an MLflow server does not answer."""
    import httpx

    if not settings.mlflow_uri.startswith("http"):
        return
    try:
        httpx.get(f"{settings.mlflow_uri.rstrip('/')}/health", timeout=5.0).raise_for_status()
    except httpx.HTTPError as error:
        why = f"HTTP {error.response.status_code}" if isinstance(error, httpx.HTTPStatusError) else str(error)  # httpx tells who logged in
        place = settings.mlflow_uri.rpartition("@")[2]
        raise Unavailable(f"MLflow at {place} does not answer ({why}): check RATCHET_MLFLOW_URI") from error


def tracing(settings: Settings, process: str) -> "Traces":
    """Where the spans of a process go."""
    from app.telemetry.traces import open_traces

    return open_traces(settings.traces, process=process, share=settings.traces_share, version=release_of_code())


def traced_turns(settings: Settings, inference_ids: Sequence[str]) -> list[str]:
    """The trace contexts of those of these turns that are traced."""
    from app.db.ingestion.turns import traces_of

    with opened_state(settings) as state:
        return traces_of(state, inference_ids)


def release_of_code() -> str:
    """The package's version."""
    return metadata.version("ratchet")


def instruments(settings: Settings, process: str) -> "Instruments":
    """The metrics of a process, shown at RATCHET_METRICS where that is set."""
    from app.telemetry.exposition import expose
    from app.telemetry.instruments import Instruments

    own = Instruments(process, version=release_of_code())
    expose(own, settings.metrics)
    return own


def inbox_writer(settings: Settings) -> "SqlInbox":
    """The Inbox port with its writer thread; `close()` it on the way out."""
    from app.db.ingestion.inbox import SqlInbox

    return SqlInbox(open_inbox(settings))


def cluster(settings: Settings) -> "Cluster":
    """The Kafka cluster: a real one where RATCHET_KAFKA_BOOTSTRAP names it, else the embedded broker of this data folder."""
    from app.messaging.cluster import Cluster
    from app.messaging.options import kafka_config

    return Cluster(
        bootstrap=settings.kafka_bootstrap, address_file=settings.data / "broker.json", options=kafka_config(read_toml(settings.config)),
        password=settings.kafka_password, known_for=retention(read_toml(settings.config)).horizon,
    )  # fmt: skip


def require_broker(settings: Settings) -> None:
    """Raise `BadConfig` where neither a cluster is named nor the embedded broker can run."""
    from app.messaging.broker import find_broker

    if settings.kafka_bootstrap is None:
        find_broker()


def become_broker(settings: Settings, *, port: int | None = None) -> None:
    """Replace this process by the embedded broker. Raises `BadConfig` where a real cluster is configured."""
    from app.messaging.broker import become_broker as become

    if settings.kafka_bootstrap is not None:
        raise BadConfig(
            f"RATCHET_KAFKA_BOOTSTRAP is {settings.kafka_bootstrap}: that cluster is used, an embedded broker would serve nobody"
        )
    become(settings.data / "broker.json", port=port)


def event_sink(settings: Settings) -> "KafkaSink":
    """The EventSink port: the one producer of the relay."""
    from app.db.ingestion.epochs import SqlEpochs
    from app.messaging.producer import KafkaSink

    return KafkaSink(cluster(settings), SqlEpochs(open_state(settings)))


def event_source(settings: Settings, *, group: str, max_records: int) -> "KafkaSource":
    """The EventSource port: one member of the consumer group."""
    from app.db.ingestion.epochs import SqlEpochs
    from app.db.ingestion.members import SqlMembership
    from app.db.ingestion.relay import has_backlog
    from app.db.ingestion.streams import SqlPositions
    from app.messaging.consumer import KafkaSource

    state, inbox, where = open_state(settings), open_inbox(settings), cluster(settings)
    return KafkaSource(
        where, SqlEpochs(state), SqlMembership(state, group=group, partitions=where.partitions), group=group,
        positions=SqlPositions(state, group=group), backlog=lambda: has_backlog(inbox), max_records=max_records,
    )  # fmt: skip


def relay_office(settings: Settings, *, group: str) -> "SqlRelayOffice":
    """The RelayOffice port."""
    from app.db.clock import database_now
    from app.db.ingestion.relay import SqlRelayOffice

    return SqlRelayOffice(open_inbox(settings), open_state(settings), group=group, clock=database_now)


def trajectories(settings: Settings) -> "ParquetSegments":
    """The TrajectoryStore port. Where a segment was merged since its place was looked up, the turn's row says where it lies now."""
    from app.trajectories.segments import ParquetSegments

    return ParquetSegments(settings.segments, moved=lambda ids: _places(settings, ids))


def _places(settings: Settings, ids: Collection[str]) -> Mapping[str, str]:
    from app.db.engine import reading
    from app.db.upkeep.compaction import places_of

    with opened_state(settings) as state, reading(state) as connection:
        return places_of(connection, ids)


def upkeep(settings: Settings, *, owner: str) -> "SqlUpkeep":
    """What drops the past and merges segments, by `[retention]`; one process at a time."""
    from app.db.clock import DatabaseClock, database_now
    from app.db.upkeep.keeper import SqlUpkeep

    state = open_state(settings)
    return SqlUpkeep(
        state, open_inbox(settings), files=trajectories(settings), retention=retention(read_toml(settings.config)), owner=owner,
        clock=DatabaseClock(state), database_clock=database_now, own=utc_now,
    )  # fmt: skip


def effect_store(settings: Settings, *, rules: JoinRules | None = None) -> "SqlEffects":
    """The EffectStore port: rows in the state database, tokens in segments. Joined as configured, without `rules`."""
    from app.db.ingestion.streams import SqlEffects

    rules = rules or join_rules(load_policies(settings), read_toml(settings.config))
    segments = trajectories(settings)
    return SqlEffects(
        open_state(settings), rules=lambda: rules, segments=segments, holds=segments.holds,
    )  # fmt: skip


def claim_sweep(settings: Settings) -> "SqlClaimSweep":
    """Drops payloads of large turns whose event was never committed.

    A week is waited where nobody knows what is on its way: without an inbox, and where gateways have a spool for it.
    """
    from app.db.ingestion.claims import SqlClaimSweep

    segments, inbox = trajectories(settings), open_inbox(settings)
    age = timedelta(hours=1) if settings.ingest == "inbox" and inbox.dialect.name == "sqlite" else timedelta(days=7)
    return SqlClaimSweep(open_state(settings), inbox, claims=segments.claims, drop=segments.drop, min_age=age)


def troubles(settings: Settings, *, name: str) -> "SqlTroubles":
    """Where a process says what it waits for."""
    from app.db.troubles import SqlTroubles

    return SqlTroubles(open_state(settings), name=name)


def dead_letters(settings: Settings) -> "SqlDeadLetters":
    """The dead letters of this deployment."""
    from app.db.ingestion.dead_letters import SqlDeadLetters

    return SqlDeadLetters(open_state(settings))


def eraser(settings: Settings) -> "SqlEraser":
    """Forgets people everywhere in this deployment."""
    from app.db.access.erasures import SqlEraser

    store = trajectories(settings)
    return SqlEraser(open_state(settings), open_inbox(settings), segments=store, note=store.note_erasure)


def pseudonym_of(settings: Settings, *, actor: str | None = None, pseudonym: str | None = None) -> str:
    """Under which a person is stored, by the id that the product sends or by itself. Raises `BadRequest` for what is no pseudonym."""
    return hash_actor(actor or "", salt=actor_salt(settings)) if pseudonym is None else checked_pseudonym(pseudonym)


def forget(settings: Settings, pseudonym: str, *, by: str) -> ErasureReport:
    """Remove everything of a person, everywhere; and as an event, so that a replay of the events forgets as well."""
    now = clock(settings)()
    erasure = Erasure(id=uuid7(), actor=pseudonym, requested_by=by, occurred_at=now)
    inbox = inbox_writer(settings)
    try:
        inbox.append_blocking([erasure.as_event()])
    finally:
        inbox.close()
    return eraser(settings).erase(erasure, now=now)


def recovery(settings: Settings) -> "SqlRecovery":
    """What a restored or promoted database does not know any more."""
    from app.db.recovery.checks import SqlRecovery

    return SqlRecovery(open_state(settings), open_inbox(settings))


def recovery_findings(settings: Settings, *, kafka: bool) -> "list[Finding]":
    """Every difference between the database and what did not go back with it; `kafka`: ask the broker as well."""
    from app.db.recovery.checks import Place, durability_of
    from app.messaging.topics import administering

    store, group = trajectories(settings), read_toml(settings.config).get("ingestion", {}).get("group", "ratchet-ingest")
    told: Mapping[TopicPartition, int] = {}
    if kafka:
        with administering(cluster(settings)) as admin:
            told = admin.committed(group)
    place = Place(
        erasures=store.noted_erasures(), versions=sorted(open_weights(settings).ages_s()), size=store.size, group=group, committed=told
    )
    with opened_state(settings) as state:
        return [*recovery(settings).findings(place), *durability_of(state)]


def erase_again(settings: Settings) -> tuple[int, int, int]:
    """Turns find their words in files that took the place of others; then those are forgotten whom the database forgot to have forgotten,
    and words of erased people in files that came back. How many turns, people, and files."""
    from app.db.ingestion import segment_rows
    from app.db.recovery.adoption import adopt, let_go
    from app.domain.ids import uuid7
    from app.domain.telemetry.events import Erasure

    store, found, now = trajectories(settings), recovery(settings), clock(settings)()
    with opened_state(settings) as state:
        turns = adopt(state, store, now=now)
    lost = found.lost_erasures(store.noted_erasures())
    for actor, moment in lost.items():
        eraser(settings).erase(Erasure(id=uuid7(), actor=actor, requested_by="recovery", occurred_at=moment), now=now)
    files = list(found.words_of_shells((name, store.turns(name)) for name in store.names()))
    with opened_state(settings) as state:
        segment_rows.forget_in(state, store, files, now=now)
        let_go(state, store, now=now)
    return turns, len(lost), len(files)


def traces(settings: Settings) -> "SqlTraces":
    """Looks for what is left of erased people, everywhere in this deployment."""
    from app.db.access.traces import SqlTraces
    from app.messaging.search import records_with
    from app.policy.storage.remote_files import RemoteFiles, folder_at, is_url
    from app.trajectories.exporting import exported_turns

    where, exports, training = cluster(settings), settings.data / "exports", settings.data / "training"
    away = is_url(settings.states)
    states = {settings.states: RemoteFiles(settings.states, setting="RATCHET_STATES").texts_with} if away else {}
    folders = dict.fromkeys([training, training if away else folder_at(settings.states), exports])
    return SqlTraces(
        open_state(settings), open_inbox(settings), files=trajectories(settings), topics=lambda words: records_with(where, words),
        exported=lambda: exported_turns(exports), folders=folders, stored=states,
    )  # fmt: skip


def sweep_segments(settings: Settings) -> int:
    """Remove segment files that no row knows and nobody wrote to for an hour; returns how many."""
    from app.db.ingestion.segment_rows import unknown_among

    store = trajectories(settings)
    names = [name for name in store.names() if (at := store.unchanged_since(name)) is not None and utc_now() - at > timedelta(hours=1)]
    with opened_state(settings) as state:
        unknown = unknown_among(state, names)
    for name in unknown:
        store.drop(name)
    return len(unknown)


def decisions(settings: Settings, *, policy: str | None, since: datetime | None, until: datetime | None) -> "Iterator[Decision]":
    """Labelled turns with their assignment and reward, oldest first."""
    from app.db.learning.decisions import read_decisions

    return read_decisions(open_state(settings), policy=policy, since=since, until=until)


def export_parquet(settings: Settings, folder: Path, *, policy: str | None, since: datetime | None, until: datetime | None) -> int:
    """Write labelled turns with their tokens as a Parquet data set; returns how many."""
    from app.db.learning.decisions import read_exported
    from app.trajectories.exporting import write_export

    store = trajectories(settings)
    with opened_state(settings) as state:
        return write_export(folder, read_exported(state, policy=policy, since=since, until=until), store.read)


def load_policies(settings: Settings) -> dict[str, PolicyConfig]:
    """The declared policies by name."""
    return policies(read_toml(settings.config), relative_to=settings.config.parent if settings.config else Path.cwd())


def require_policy(declared: dict[str, PolicyConfig], name: str) -> PolicyConfig:
    """The policy of that name, or a sentence that lists those there are."""
    if name not in declared:
        known = ", ".join(sorted(declared)) or "none"
        raise UnknownPolicy(
            f"no policy is named {name!r} (declared: {known}); add [policies.{name}] to the configuration or correct the name"
        )
    return declared[name]


def label_book(settings: Settings) -> "SqlLabels":
    """Due turns and their labels."""
    from app.db.learning.labels import SqlLabels

    return SqlLabels(open_state(settings))


def reactions(settings: Settings, inference_ids: Sequence[str], *, before: datetime) -> "list[Reaction]":
    """What people did with these turns; who was not heard of `before` is a newcomer."""
    from app.db.engine import reading
    from app.db.learning.reactions import read_reactions

    with opened_state(settings) as state, reading(state) as connection:
        return read_reactions(connection, inference_ids, before=before)


def backlog(settings: Settings) -> "SqlBacklog":
    """How far everything accepted is applied."""
    from app.db.ingestion.backlog import SqlBacklog

    return SqlBacklog(open_inbox(settings), open_state(settings))


def rule_book(settings: Settings, default: str) -> "SqlRules":
    """The rule set in force per policy; `default` is the TOML where none was ever activated."""
    from app.db.learning.rule_sets import SqlRules

    return SqlRules(open_state(settings), default)


def replay_book(settings: Settings) -> "SqlReplays":
    """Rule sets that people want to see over stored labels."""
    from app.db.learning.rule_sets import SqlReplays

    return SqlReplays(open_state(settings))


def reading_book(settings: Settings) -> "FollowUpReadings":
    """Takes what people say of follow-ups."""
    from app.db.clock import DatabaseClock
    from app.db.learning.readings import SqlReadings as FollowUpReadings

    state = open_state(settings)
    return FollowUpReadings(state, clock=DatabaseClock(state))


def label_report(settings: Settings, policy: str) -> "LabelReport":
    """How the turns of a policy are labelled at present."""
    from app.db.engine import reading
    from app.db.learning.label_report import label_report as read_report

    with opened_state(settings) as state, reading(state) as connection:
        return read_report(connection, policy)


@contextmanager
def labelled_turns(settings: Settings, policy: str, *, limit: int) -> "Iterator[Iterator[Labelled]]":
    """The newest labelled turns of a policy with the reward they have, as one consistent read."""
    from app.db.engine import reading
    from app.db.learning.label_report import labelled_turns as read_labelled

    with opened_state(settings) as state, reading(state) as connection:
        yield read_labelled(connection, policy, limit=limit)


def version_book(settings: Settings) -> "SqlVersions":
    """Versions by digest, with their lineage."""
    from app.db.release.versions import SqlVersions

    return SqlVersions(open_state(settings))


def cycle_book(settings: Settings) -> "SqlCycles":
    """Who runs a slot, and how far it got."""
    from app.db.learning.cycles import SqlCycles

    return SqlCycles(open_state(settings))


def read_texts(file: Path) -> Iterator[tuple[str, str, str]]:
    """Name, domain and text of each row of a Parquet file."""
    from app.trajectories.corpus import read_texts

    return read_texts(file)


def batch_store(settings: Settings) -> "SqlBatchStore":
    """Where batches are cut."""
    from app.db.learning.batches import SqlBatchStore

    return SqlBatchStore(open_state(settings))


def run_store(settings: Settings) -> "SqlRunStore":
    """Training runs and baseline trackers."""
    from app.db.learning.runs import SqlRunStore

    return SqlRunStore(open_state(settings))


def progress_log(settings: Settings) -> "SqlProgressLog":
    """How far long work is."""
    from app.db.progress import SqlProgressLog

    return SqlProgressLog(open_state(settings))


def score_book(settings: Settings) -> "SqlScores":
    """Scores of versions on offline suites."""
    from app.db.learning.suite_scores import SqlScores

    return SqlScores(open_state(settings))


def pair_book(settings: Settings) -> "SqlPairs":
    """Blind pairs for people to judge."""
    from app.db.release.pairs import SqlPairs

    return SqlPairs(open_state(settings))


def jury(settings: Settings) -> "ReleaseJury":
    """Takes people's votes about blind pairs."""
    from app.release.jury import ReleaseJury

    return ReleaseJury(release_ledger(settings))


def registry(settings: Settings) -> "MlflowRegistry":
    """The MLflow projection."""
    from app.policy.storage.remote_files import is_url
    from app.registry.mlflow_registry import MlflowRegistry

    return MlflowRegistry(settings.mlflow_uri, weights=settings.weights if is_url(settings.weights) else None)


def lineage_of(settings: Settings, name: str) -> list[dict[str, Any]]:
    """What a version and its ancestors were trained on, newest first."""
    from app.db.engine import reading
    from app.db.learning.lineage import chain_of, version_of_name

    with opened_state(settings) as state, reading(state) as connection:
        return chain_of(connection, version_of_name(connection, name))


def versions_that_saw(settings: Settings, actor: str) -> dict[str, list[str]]:
    """Which versions served a person, were trained on their turns, or descend from one that was."""
    from app.db.engine import reading
    from app.db.learning.lineage import versions_that_saw

    with opened_state(settings) as state, reading(state) as connection:
        return versions_that_saw(connection, hash_actor(actor, salt=actor_salt(settings)))


def schema_revision(settings: Settings) -> str:
    """The revision the state database is at."""
    from app.db import migrate

    return migrate.current_revision(settings.database_url) or "none"


ACTOR_SALT, SESSION_SECRET, WEBHOOK_KEY = "actor_salt", "session_secret", "webhook_key"
PUBLIC_SALT = "ratchet-embedded"
"""What people were hashed under before each deployment made a salt of its own; anybody can read it here."""
SHORTEST_SECRET = 16


def actor_salt(settings: Settings) -> str:
    """The secret under which people's ids are hashed. Raises `BadConfig` where it is not the one under which the database's people are
    stored, and where replicas would hash one person differently.

    A database that is away is asked the next time: whoever answers people goes on without it.
    """
    from app.db.operations.facts import stored_under

    salt = _salt_given(settings)
    try:
        stored = stored_under(settings.database_url)
    except Unavailable as error:
        if salt is None:
            raise  # a fresh one may be the wrong one
        log.warning("actor salt unchecked why=%s", error)
        return salt
    if salt is None and stored.fingerprint is None and not stored.people:
        return _own_salt(settings)
    if salt is None or stored.fingerprint not in (None, salt_fingerprint(salt)):
        raise BadConfig(_another_salt(settings))
    return salt


def _salt_given(settings: Settings) -> str | None:
    """The salt as it is set, or as the file says; None where there is no file yet. Raises `BadConfig` where it has to be set."""
    path = settings.secrets / ACTOR_SALT
    if settings.actor_salt is not None:
        return settings.actor_salt
    if not settings.database_url.startswith("sqlite"):
        raise BadConfig(
            "RATCHET_ACTOR_SALT is not set and the database is a server, which others may share: set it to one long random value for all "
            "of them (openssl rand -hex 32), and keep it as long as you keep the data"
        )
    return read_secrets(path)[0] if path.exists() else None


def _own_salt(settings: Settings) -> str:
    return read_secrets(secret_file(settings.secrets, ACTOR_SALT))[0]


def _another_salt(settings: Settings) -> str:
    path = settings.secrets / ACTOR_SALT
    if settings.actor_salt is None and not path.exists():
        found = f"{path} is missing: this database's people are stored under the salt that was in it"
    else:
        where = str(path) if settings.actor_salt is None else "RATCHET_ACTOR_SALT"
        found = f"{where} is another salt than the one under which this database's people are stored"
    return (
        f"{found}; bring that one back (docs/backup.md), or, where it is lost, run `ratchet recover salt`: everybody stored so far is a "
        "stranger from then on"
    )


def keep_salt(settings: Settings) -> None:
    """A new deployment gets a random salt; one that was begun before there were such keeps the one it has hashed people under.

    Raises `BadConfig` where it had one of its own that is gone.
    """
    from app.db import migrate
    from app.db.operations.facts import stored_under

    if not settings.database_url.startswith("sqlite") or _salt_given(settings) is not None:
        return
    if migrate.current_revision(settings.database_url) is None or stored_under(settings.database_url).since_salts:
        actor_salt(settings)
    else:
        written(private_folder(settings.secrets), [PUBLIC_SALT]).replace(settings.secrets / ACTOR_SALT)


def note_salt(settings: Settings) -> None:
    """The database remembers under which salt its people are stored. Raises `BadConfig` where that is another one than ours."""
    from app.db.engine import writing
    from app.db.operations.facts import note_salt

    if settings.actor_salt is None and not settings.database_url.startswith("sqlite"):
        return  # whoever hashes people has to be told it, and says so
    salt = actor_salt(settings)
    with opened_state(settings) as state, writing(state) as connection:
        note_salt(connection, salt_fingerprint(salt), now=utc_now())
    actor_salt(settings)  # somebody may have been first


def accept_salt(settings: Settings, *, by: str) -> None:
    """From now on people are stored under the salt that is set, or a fresh one where none is: whoever was stored before is a stranger."""
    from app.db.engine import writing
    from app.db.operations.facts import SALT, write_fact
    from app.db.release import audit

    fingerprint, now = salt_fingerprint(_salt_given(settings) or _own_salt(settings)), utc_now()
    with opened_state(settings) as state, writing(state) as connection:
        write_fact(connection, SALT, {"fingerprint": fingerprint}, now=now)
        audit.append(connection, actor=by, action="actor_salt.changed", subject="everybody's pseudonym", detail={}, now=now)


def session_secrets(settings: Settings) -> "Callable[[], Sequence[str]]":
    """The secrets that sign the keys of sessions, newest first, as they are at each call."""
    if settings.session_secrets:
        return lambda: settings.session_secrets
    return SecretReader(secret_file(settings.secrets, SESSION_SECRET))


def webhook_seal(settings: Settings) -> Seal:
    """What seals the signing secrets of webhooks; its key is made with the first secret that is sealed, or opened."""
    return Seal(keys=lambda: webhook_keys(settings))


def webhook_keys(settings: Settings) -> Sequence[str]:
    """The keys that seal webhooks' secrets, newest first. Raises `BadConfig` where replicas would each make one of their own."""
    if settings.webhook_keys:
        return settings.webhook_keys
    if not settings.database_url.startswith("sqlite"):
        raise BadConfig(
            "RATCHET_WEBHOOK_KEYS is not set, there are webhooks, and the database is a server, which others may share: set it to one long "
            "random value for all of them (openssl rand -hex 32)"
        )
    return read_secrets(secret_file(settings.secrets, WEBHOOK_KEY))


def rotate_session_secret(settings: Settings, *, by: str) -> Path:
    """A fresh secret in front of the one in use; keys signed with older ones than that end. Raises `BadConfig` where ours is not in use."""
    if settings.session_secrets:
        raise BadConfig("RATCHET_SESSION_SECRETS is set: put a fresh secret in front of it, and drop the last one, where you set it")
    write_audit(settings, actor=by, action="session_secret.rotated", subject="keys of sessions", detail={})
    return rotate(settings.secrets, SESSION_SECRET)


def refuse_weak_secrets(settings: Settings) -> None:
    """A service that others reach needs secrets that nobody knows. Raises `BadConfig`."""
    sessions, webhooks = session_secrets(settings)(), settings.webhook_keys
    given = [("RATCHET_ACTOR_SALT", actor_salt(settings))]
    given += [("RATCHET_SESSION_SECRETS", secret) for secret in sessions] + [("RATCHET_WEBHOOK_KEYS", key) for key in webhooks]
    stranger = ", which makes everybody a stranger, and say so with `ratchet recover salt`"
    for name, secret in given:
        if secret == PUBLIC_SALT or len(secret) < SHORTEST_SECRET:
            raise BadConfig(
                f"{settings.reached_by}, so other machines reach this service, and {name} is or has a value that can be known or guessed: "
                f"set it to a long random one (openssl rand -hex 32){stranger if 'SALT' in name else ''}"
            )


def boxes(*, trusted: bool = False) -> "Boxes":
    """The Boxes port: bubblewrap's; plain processes only for programs that the configuration calls trusted."""
    from app.sandbox.bubblewrap import BubblewrapBoxes
    from app.sandbox.processes import ProcessBoxes

    return ProcessBoxes() if trusted else BubblewrapBoxes()


def cluster_boxes(settings: Settings) -> "Boxes":
    """The Boxes port of a cluster: Ray's sandbox over REST. Raises `BadConfig` where no server is named."""
    from app.sandbox.ray_rest import RayBoxes

    if settings.sandbox_url is None:
        raise BadConfig("rollouts.sandbox is `ray` and RATCHET_SANDBOX_URL is unset: name the server, or set it to `bubblewrap`")
    return RayBoxes(settings.sandbox_url, settings.sandbox_image, token=settings.sandbox_token)


def rollout_book(settings: Settings) -> "SqlRollouts":
    """The RolloutBook port."""
    from app.db.learning.rollouts import SqlRollouts

    return SqlRollouts(open_state(settings))


def ray_token(settings: Settings) -> Path:
    """The file with the token that every call to this deployment's own Ray cluster carries."""
    return secret_file(settings.secrets, "ray_token")


@dataclass(frozen=True, kw_only=True)
class HttpAdapters:
    """What the api process plugs in."""

    policies: dict[str, PolicyConfig]
    inbox: "SqlInbox | DirectInbox"
    answers: "SpooledInbox | None"
    """The same for what was answered, which waits on this machine's disk while the database is away. None on SQLite: one disk has both."""
    routes: "SqlRoutes"
    engines: "HttpEngines | ServerEngines"
    keys: "SqlKeys"
    people: "SqlPeople"
    episodes: "SqlEpisodes"
    reads: "SqlReads"
    pages: "SqlPages"
    claims: "Claims"
    contact: Contact
    """With the database."""
    ingestion_troubles: Callable[[], list[str]]
    """What keeps accepted events from being applied, a sentence each."""

    async def check_engines(self) -> None:
        """Raise `Unavailable` where no engine answers."""
        await self.engines.ping()

    def close(self, *, patience_s: float = 0.0) -> None:
        """Commit what waits: answers that are on the disk for so long at most, then the inbox."""
        if self.answers is not None:
            self.answers.close(patience_s=patience_s)
        self.inbox.close()


def door(settings: Settings) -> "SqlInbox | DirectInbox":
    """The Inbox port of the api: the inbox table, or with RATCHET_INGEST=direct the replicated cluster itself."""
    if settings.ingest == "inbox":
        return inbox_writer(settings)
    from app.messaging.direct import DirectInbox

    return DirectInbox(event_sink(settings))


def http_adapters(settings: Settings) -> HttpAdapters:
    """Everything live behind the HTTP service."""
    from app.db.access.keys import SqlKeys
    from app.db.access.people import SqlPeople
    from app.db.ingestion.dead_letters import SqlDeadLetters
    from app.db.ingestion.episodes import SqlEpisodes
    from app.db.ingestion.spool import Spool, SpooledInbox
    from app.db.reads import SqlReads
    from app.db.release.pointer import SqlRoutes
    from app.db.sight import SqlPages
    from app.db.troubles import ingestion_troubles

    state, inbox, taken = open_state(settings), open_inbox(settings), door(settings)
    contact, bury = Contact(region=settings.region), SqlDeadLetters(state).bury
    return HttpAdapters(
        policies=load_policies(settings),
        inbox=taken,
        answers=None if inbox.dialect.name == "sqlite" else SpooledInbox(taken, Spool(settings.data / "spool"), bury=bury),
        routes=SqlRoutes(state, contact=contact),
        contact=contact,
        engines=open_engines(settings),
        keys=SqlKeys(state),
        people=SqlPeople(state),
        episodes=SqlEpisodes(state, inbox),
        reads=SqlReads(state, inbox),
        pages=SqlPages(state),
        claims=LateClaims(settings),
        ingestion_troubles=lambda: ingestion_troubles(state, inbox),
    )


class LateClaims:
    """The Claims port, opened by the first large turn: most gateways never need the trajectory store."""

    def __init__(self, settings: Settings) -> None:
        self._open = cache(lambda: trajectories(settings))

    def deposit(self, payload: "TurnPayload") -> "PayloadClaim":
        """See `ParquetSegments.deposit`."""
        return self._open().deposit(payload)


def write_audit(settings: Settings, *, actor: str, action: str, subject: str, detail: dict[str, Any]) -> None:
    """An entry of the audit chain about something that no policy's releases depend on."""
    from app.db.engine import writing
    from app.db.release import audit

    with opened_state(settings) as state, writing(state) as connection:
        audit.append(connection, actor=actor, action=action, subject=subject, detail=detail, now=utc_now())


def key_book(settings: Settings) -> "SqlKeys":
    """The stored API keys."""
    from app.db.access.keys import SqlKeys

    return SqlKeys(open_state(settings))


def requests(settings: Settings) -> "SqlRequests":
    """Which requests of people were carried out."""
    from app.db.clock import DatabaseClock
    from app.db.release.done import SqlRequests

    state = open_state(settings)
    return SqlRequests(state, clock=DatabaseClock(state))


def people_book(settings: Settings) -> "SqlPeople":
    """The people of this deployment."""
    from app.db.access.people import SqlPeople

    return SqlPeople(open_state(settings))


def sign_in(settings: Settings) -> "SignIn":
    """The desk of the entrance."""
    from app.access import Passwords, SignIn

    return SignIn(people_book(settings), passwords=Passwords(), clock=utc_now)


def oidc(settings: Settings) -> "Oidc | None":
    """The provider where people sign in, where there is one."""
    if settings.oidc is None:
        return None
    from app.access.oidc import Oidc, Registration, require_https

    issuer, client_id, client_secret = settings.oidc
    registration = Registration(
        issuer=require_https(issuer), client_id=client_id, client_secret=client_secret, redirect_uri=f"{settings.address}/console/oidc"
    )  # fmt: skip
    return Oidc(registration, people_book(settings), secrets=session_secrets(settings))


def open_weights(settings: Settings) -> "LocalWeights | RemoteWeights":
    """The WeightStore port: a local folder, or a URL with a cache under the data folder."""
    from app.policy.storage.remote import open_store

    return open_store(settings.weights, cache=settings.data / "weights-cache")


def needed_weights(settings: Settings, *, newest: int = KEPT_CHAMPIONS) -> "SqlNeededWeights":
    """Which versions' weights something still needs."""
    from app.db.clock import DatabaseClock
    from app.db.release.needed_weights import SqlNeededWeights

    state = open_state(settings)
    return SqlNeededWeights(state, newest=newest, clock=DatabaseClock(state))


def open_engines(settings: Settings) -> "HttpEngines | ServerEngines":
    """The Engines port of the gateway: embedded engines, found through the ledger, else at RATCHET_ENGINES; or servers of other make
    (`vllm+http://…`, `sglang+http://…`)."""
    from app.serving.client import HttpEngines
    from app.serving.servers.engines import ServerEngines
    from app.serving.servers.sglang import Sglang
    from app.serving.servers.vllm import Vllm

    for dialect, key in ((Vllm(), settings.vllm_key), (Sglang(), settings.sglang_key)):
        urls = [url.removeprefix(dialect.scheme) for url in settings.engines if url.startswith(dialect.scheme)]
        if urls and len(urls) < len(settings.engines):
            raise BadConfig(f"RATCHET_ENGINES mixes {dialect.name} servers and engines of another make: list one kind only")
        if urls:
            return ServerEngines(dialect, urls, holders=engine_ledger(settings).holders, region=settings.region, api_key=key)
    ledger = engine_ledger(settings)
    return HttpEngines(
        settings.engines, holders=ledger.holders, everywhere=ledger.everywhere, region=settings.region, key=settings.engine_key
    )


def server_control(settings: Settings, *, vllm: str | None, sglang: str | None) -> "Control":
    """The control side of one server of other make. Raises `BadConfig` unless exactly one is named."""
    from app.serving.servers.sglang_control import SglangControl
    from app.serving.servers.vllm_control import VllmControl

    if vllm is not None and sglang is None:
        return VllmControl(vllm, api_key=settings.vllm_key)
    if sglang is not None and vllm is None:
        return SglangControl(sglang, api_key=settings.sglang_admin_key or settings.sglang_key)
    raise BadConfig("name one server: --vllm URL or --sglang URL")


def engine_ledger(settings: Settings, *, engine_id: str = "", address: str = "") -> "SqlEngineLedger":
    """What engines have to hold and do hold; an engine says who and where it is, readers do not."""
    from app.db.clock import DatabaseClock
    from app.db.release.engines import SqlEngineLedger

    state = open_state(settings)
    return SqlEngineLedger(state, engine_id=engine_id, address=address, region=settings.region, clock=DatabaseClock(state))


def release_ledger(settings: Settings) -> "SqlReleaseLedger":
    """The ReleaseLedger port."""
    from app.db.clock import DatabaseClock
    from app.db.release.releases import SqlReleaseLedger

    state = open_state(settings)
    return SqlReleaseLedger(state, clock=DatabaseClock(state))


def release_desk(settings: Settings, *, terms: Terms | None = None, traces: "Traces | None" = None) -> "ReleaseDesk":
    """The hands of the release state machine; `terms` are those that releases opened by it are frozen with."""
    from app.release.desk import ReleaseDesk
    from app.release.tracing import traced

    ledger = release_ledger(settings)
    if traces is None or not traces.on:
        return ReleaseDesk(ledger, terms=terms)
    versions = version_book(settings)
    return ReleaseDesk(ledger, terms=terms, moved=traced(traces, lambda policy, digest: versions.find(policy, digest).tags))


def trainable_labels(settings: Settings) -> Callable[[str], int]:
    """How many labels of a policy's champion a batch could take now."""
    from app.db.engine import reading
    from app.db.learning.labels import count_trainable
    from app.db.release.pointer import read_pointer

    engine = open_state(settings)

    def count(policy: str) -> int:
        with reading(engine) as connection:
            pointer = read_pointer(connection, policy)
            return 0 if pointer is None else count_trainable(connection, policy, pointer.digest)

    return count


def evidence_book(settings: Settings) -> "SqlEvidenceBook":
    """The EvidenceBook port of the watch."""
    from app.db.release.evidence import SqlEvidenceBook

    return SqlEvidenceBook(open_state(settings))


def holdout_book(settings: Settings) -> "SqlHoldoutBook":
    """What the long-term holdouts of a deployment came to."""
    from app.db.release.holdouts import SqlHoldoutBook

    return SqlHoldoutBook(open_state(settings))


def release_views(settings: Settings) -> "SqlReleaseViews":
    """What people read about releases, and the audit chain."""
    from app.db.release.release_views import SqlReleaseViews

    return SqlReleaseViews(open_state(settings))


def release_story(settings: Settings, release: "Release") -> list[str]:
    """What became of a release, a sentence for each thing that happened."""
    from app.db.sight import SqlPages

    with opened_state(settings) as state:
        return [told.sentence() for told in SqlPages(state).story(release)]


def verify_exported(file: Path, *, seen: tuple[int, str] | None) -> "Verification":
    """What recomputing an exported audit chain finds."""
    from app.db.release.audit import verify_lines

    with file.open(encoding="utf-8") as lines:
        return verify_lines(lines, seen=seen)


def webhook_book(settings: Settings) -> "SqlWebhookBook":
    """Receivers of release events, and deliveries."""
    from app.db.release.webhooks import SqlWebhookBook

    return SqlWebhookBook(open_state(settings), webhook_seal(settings))


def courier(settings: Settings) -> "Courier":
    """Delivers release events to their receivers."""
    from app.release.post import PostOffice
    from app.release.webhooks import Courier

    office = None if settings.smtp is None else PostOffice(url=settings.smtp, sender=settings.mail_from)
    return Courier(
        webhook_book(settings), clock=utc_now, allow_loopback=settings.reached_by is None, post_office=office, address=settings.address
    )  # fmt: skip


def well_ended_turns(settings: Settings, policy: str, *, limit: int) -> "list[WellEnded]":
    """Turns of held-out people that ended well, newest first."""
    from app.db.engine import reading
    from app.db.learning.suite_sources import well_ended_turns

    with opened_state(settings) as state, reading(state) as connection:
        return well_ended_turns(connection, policy, limit=limit)


def rewarded_turns(settings: Settings) -> "Callable[[str, str, int], list[RewardedTurn]]":
    """The newest turns of a policy's version that no update may learn from, with their rewards."""
    from app.db.engine import reading
    from app.db.learning.rewarded_turns import rewarded_turns

    engine = open_state(settings)

    def newest(policy: str, version: str, count: int) -> "list[RewardedTurn]":
        with reading(engine) as connection:
            return rewarded_turns(connection, policy, version, newest=count)

    return newest


def learned_answers(settings: Settings, policy: str, *, batch: str | None = None, newest: int = 5000) -> list[str]:
    """Texts that versions of a policy were trained on: the answers of one batch, or of the newest batches."""
    from app.db.engine import reading
    from app.db.learning.learned_turns import learned_turns

    with opened_state(settings) as state, reading(state) as connection:
        found = learned_turns(connection, policy, batch=batch, newest=newest)
    return [payload.completion for payload in trajectories(settings).read(found).values()]


def own_answers(settings: Settings, policy: str, version: str, *, newest: int = 20_000) -> "list[tuple[str, TurnPayload]]":
    """Who asked, and the tokens, of the newest answers of a version that may be trained on, the newest first."""
    from app.db.engine import reading
    from app.db.learning.learned_turns import own_turns

    with opened_state(settings) as state, reading(state) as connection:
        found = own_turns(connection, policy, version, newest=newest)
    payloads = trajectories(settings).read((segment, inference_id) for segment, inference_id, _ in found)
    return [(unit, payloads[inference_id]) for _, inference_id, unit in found if inference_id in payloads]


def own_answers_counted(settings: Settings, *, at_most: int) -> Callable[[str, str], int]:
    """How many answers a policy's version has that `own_answers` would read, counted no further than `at_most`."""
    from app.db.engine import reading
    from app.db.learning.learned_turns import count_own_turns

    engine = open_state(settings)

    def count(policy: str, version: str) -> int:
        with reading(engine) as connection:
            return count_own_turns(connection, policy, version, at_most=at_most)

    return count


def drafting_term(settings: Settings, *, owner: str) -> Callable[[], AbstractContextManager[Callable[[], None] | None]]:
    """The right to train draft heads, for one process of the deployment at a time: what renews it, or None while another has it."""
    from app.db import leases
    from app.db.clock import database_now
    from app.db.engine import writing

    state, ttl = open_state(settings), timedelta(minutes=1)

    @contextmanager
    def term() -> Iterator[Callable[[], None] | None]:
        with leases.term(state, "drafting", owner, ttl=ttl, clock=database_now) as lease:
            yield None if lease is None else partial(renew, lease)

    def renew(lease: Lease) -> None:
        with writing(state) as connection:
            leases.renew(connection, lease, ttl=ttl, now=database_now(connection))

    return term


def run_history(settings: Settings) -> "Callable[[str, str], list[PastRun]]":
    """The runs behind a champion's line, oldest first."""
    from app.db.engine import reading
    from app.db.learning.run_history import run_history

    engine = open_state(settings)

    def of_line(policy: str, champion: str) -> "list[PastRun]":
        with reading(engine) as connection:
            return run_history(connection, policy, champion)

    return of_line


def digest_of_version(settings: Settings, name: str) -> str:
    """The digest of the version with this name, or whose digest begins with it."""
    from app.db.engine import reading
    from app.db.learning.lineage import version_of_name

    with opened_state(settings) as state, reading(state) as connection:
        return version_of_name(connection, name).digest
