"""`app.domain.views.pages.Sight` on SQL: each answer is one short read transaction."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime

from sqlalchemy import Connection, Engine, func, select

from app.db.access.keys import SqlKeys
from app.db.access.people import SqlPeople
from app.db.engine import expected_to_answer, reading
from app.db.learning import readings, rule_sets
from app.db.learning.rule_sets import SqlRules
from app.db.release import audit as chain
from app.db.release import pairs
from app.db.release.alarms import read_alarms
from app.db.release.holdouts import read_holdouts
from app.db.release.pins import read_pins
from app.db.release.pointer import good_versions, read_pointer
from app.db.sight import access, data, labels, needs, releases
from app.db.sight.measures import R, read_sums
from app.db.tables import (
    api_keys,
    audit_head,
    browser_sessions,
    cycles,
    deployment_pointer,
    engine_versions,
    people,
    progress,
    rule_set_proposals,
    rule_set_replays,
    troubles,
    turn_counts,
)
from app.domain.access import ApiKey
from app.domain.learning.readings import Agreed, Asked
from app.domain.learning.rule_sets import AskedReplay, Proposal
from app.domain.people import Person
from app.domain.release.alarms import Alarm
from app.domain.release.gates import GateResult
from app.domain.release.holdouts import Holdout
from app.domain.release.pairs import BlindPair, BlindVote, Preference
from app.domain.release.releases import Approval, AuditEntry, Pin, Pointer, Release
from app.domain.release.sums import Sums
from app.domain.views.access import HandRow, SessionRow
from app.domain.views.pages import (
    PAGE,
    AuditFilter,
    Barred,
    Cells,
    Course,
    CutRow,
    ErasureRow,
    Inspected,
    LabelLine,
    LetterRow,
    Moved,
    Needs,
    Page,
    RuleSetInfo,
    Run,
    Served,
    StreamRow,
    VersionInfo,
)
from app.domain.views.rows import GateRow, Reach, StepRow
from app.domain.views.story import Told, story_of


class SqlPages:
    """Reads a deployment for pages."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        """Raises `Unavailable` for a database that is away."""
        with expected_to_answer(), reading(self._engine) as connection:
            yield connection

    def policies(self) -> list[str]:
        """Those that were deployed."""
        with self._reading() as connection:
            return list(connection.execute(select(deployment_pointer.c.policy).order_by(deployment_pointer.c.policy)).scalars())

    def pulse(self) -> tuple[str, str]:
        """(the newest of everything that pages show, the newest of who may look), in one statement over a handful of rows."""
        newest = (
            select(func.max(audit_head.c.seq)), select(func.max(progress.c.updated_at)), select(func.count()).select_from(troubles),
            select(func.max(engine_versions.c.changed_at)), select(func.sum(turn_counts.c.turns + turn_counts.c.labelled)),
            select(func.max(rule_set_replays.c.settled_at)), select(func.max(rule_set_proposals.c.settled_at)),
            select(func.sum(cycles.c.attempt)).where(cycles.c.status == "running"), select(func.max(cycles.c.slot)),
        )  # fmt: skip
        access = (
            select(func.max(api_keys.c.revoked_at)), select(func.max(people.c.disabled_at)), select(func.max(browser_sessions.c.ended_at)),
        )  # fmt: skip
        with self._reading() as connection:
            row = connection.execute(select(*(one.scalar_subquery() for one in (*newest, *access)))).one()
        said = ["" if value is None else str(value).replace(" ", "T") for value in row]
        return ".".join(said), ".".join([said[0], *said[len(newest) :]])

    def find(self, policy: str, wanted: str) -> str | None:
        """The path below /console of what is called so."""
        with self._reading() as connection:
            return releases.find_path(connection, policy, wanted)

    def pointer(self, policy: str) -> Pointer | None:
        """What is live."""
        with self._reading() as connection:
            return read_pointer(connection, policy)

    def needs(self, policy: str) -> Needs:
        """What waits for a person."""
        with self._reading() as connection:
            return needs.read_needs(connection, policy)

    def names(self, policy: str, digests: Collection[str]) -> dict[str, str]:
        """Names of versions by digest."""
        with self._reading() as connection:
            return releases.read_names(connection, policy, digests)

    # --- access

    def people(self) -> list[Person]:
        """Everybody, those who were disabled too."""
        with expected_to_answer():
            return SqlPeople(self._engine).all()

    def every_key(self) -> list[ApiKey]:
        """Newest first."""
        with expected_to_answer():
            return SqlKeys(self._engine).history()[::-1]

    def sessions(self, person_id: str) -> list[SessionRow]:
        """Open ones, newest first."""
        with self._reading() as connection:
            return access.read_sessions(connection, person_id)

    def hands(self, actor: str) -> list[HandRow]:
        """Newest first."""
        with self._reading() as connection:
            return access.read_hands(connection, actor)

    # --- releases

    def releases(self, policy: str, *, after: str | None = None, limit: int = PAGE) -> Page[Release]:
        """Newest first."""
        with self._reading() as connection:
            return releases.read_releases(connection, policy, after=after, limit=limit)

    def release(self, release_id: str) -> Release | None:
        """By its key."""
        with self._reading() as connection:
            return releases.read_release(connection, release_id)

    def gates(self, release_id: str) -> list[GateRow]:
        """The newest answer of each gate."""
        with self._reading() as connection:
            return releases.read_gates(connection, release_id)

    def decisions(self, release_id: str, *, newest: int = 200) -> list[GateRow]:
        """Live decisions, oldest first."""
        with self._reading() as connection:
            return releases.read_decisions(connection, release_id, newest)

    def results(self, release_id: str) -> Iterator[tuple[GateRow, GateResult]]:
        """Every answer of every gate, in order."""
        with self._reading() as connection:
            yield from releases.read_results(connection, release_id)

    def steps(self, release_id: str) -> list[StepRow]:
        """Oldest move first."""
        with self._reading() as connection:
            return releases.read_steps(connection, release_id)

    def story(self, release: Release) -> list[Told]:
        """What became of it, in words."""
        with self._reading() as connection:
            names = releases.read_names(connection, release.policy, [release.champion_digest])
            return story_of(
                release, champion=names.get(release.champion_digest, release.champion_digest[:12]),
                steps=releases.read_steps(connection, release.id), served=releases.read_served(connection, release.id),
                alarms=read_alarms(connection, release.policy, release_id=release.id), scene=needs.read_scene(connection, release),
            )  # fmt: skip

    def alarms(self, policy: str, release_id: str | None = None) -> list[Alarm]:
        """Newest first."""
        with self._reading() as connection:
            return read_alarms(connection, policy, release_id=release_id)

    def approvals(self, release_id: str) -> list[Approval]:
        """Those that stand."""
        with self._reading() as connection:
            return releases.read_words(connection, release_id)

    def served(self, release_id: str) -> list[Served]:
        """Per stage and arm."""
        with self._reading() as connection:
            return releases.read_served(connection, release_id)

    def run_of(self, policy: str, digest: str) -> Run | None:
        """The run that made a version."""
        with self._reading() as connection:
            return releases.read_run(connection, policy, digest)

    def reach(self, policy: str, digest: str) -> Reach:
        """Whom moving away from a version moves."""
        with self._reading() as connection:
            return releases.read_reach(connection, policy, digest)

    # --- versions

    def preference(self, release_id: str) -> Preference:
        """What people judged blind."""
        with self._reading() as connection:
            return pairs.read_preference(connection, release_id)

    def judging(self, release_id: str) -> tuple[list[str], list[BlindVote]]:
        """Ids of the release's blind pairs, and every vote about them."""
        with self._reading() as connection:
            return [pair.id for pair in pairs.read_scored(connection, release_id)], pairs.read_votes(connection, release_id)

    def pair(self, pair_id: str) -> BlindPair:
        """Raises `NotFound`."""
        with self._reading() as connection:
            return pairs.read_pair(connection, pair_id)

    def versions(self, policy: str, *, after: str | None = None, limit: int = PAGE) -> Page[VersionInfo]:
        """Newest first."""
        with self._reading() as connection:
            return releases.read_versions(connection, policy, after=after, limit=limit)

    def version(self, policy: str, digest: str) -> VersionInfo | None:
        """By its digest."""
        with self._reading() as connection:
            return releases.read_version(connection, policy, digest)

    def history(self, policy: str, *, after: str | None = None, limit: int = PAGE) -> Page[Moved]:
        """The pointer's moves, newest first."""
        with self._reading() as connection:
            return releases.read_moves(connection, policy, after=after, limit=limit)

    def quarantined(self, policy: str) -> list[Barred]:
        """Newest first."""
        with self._reading() as connection:
            return releases.read_barred(connection, policy)

    def good_versions(self, policy: str, *, besides: str) -> list[str]:
        """Where a rollback may go, the next one first."""
        with self._reading() as connection:
            return good_versions(connection, policy, besides=frozenset({besides}))

    def digest_of(self, policy: str, wanted: str) -> str | None:
        """Of the version that is called so."""
        with self._reading() as connection:
            return releases.find_version(connection, policy, wanted)

    def pins(self, policy: str) -> dict[str, Pin]:
        """What people pinned."""
        with self._reading() as connection:
            return read_pins(connection, policy)

    def holdout(self, policy: str) -> Holdout | None:
        """The newest."""
        with self._reading() as connection:
            return next(iter(read_holdouts(connection, policy, limit=1)), None)

    # --- labels, added up

    def sums(self, policy: str, versions: Collection[str], *, since: datetime | None = None) -> Cells:
        """By (version, measure)."""
        with self._reading() as connection:
            found = read_sums(connection, policy, R.version, R.measure, versions=versions, since=since)
        return {(key[0], key[1]): sums for key, sums in found.items()}

    def course(self, policy: str, versions: Collection[str], *, since: datetime, measures: Collection[str]) -> Course:
        """By (version, measure, hour)."""
        with self._reading() as connection:
            found = read_sums(connection, policy, R.version, R.measure, R.hour, versions=versions, since=since, measures=measures)
        return {(key[0], key[1], key[2]): sums for key, sums in found.items()}

    def segments(self, policy: str, versions: Collection[str], *, since: datetime | None = None) -> Mapping[tuple[str, str, str], Sums]:
        """By (version, segment, measure)."""
        with self._reading() as connection:
            found = read_sums(connection, policy, R.version, R.segment, R.measure, versions=versions, since=since)
        return {(key[0], key[1], key[2]): sums for key, sums in found.items()}

    def totals(self, policy: str, *, since: datetime) -> Mapping[str, Sums]:
        """By measure."""
        with self._reading() as connection:
            return {key[0]: sums for key, sums in read_sums(connection, policy, R.measure, since=since).items()}

    # --- labels, one by one

    def labels(
        self, policy: str, *, after: str | None = None, limit: int = PAGE, exclusion: str | None = None, version: str | None = None
    ) -> Page[LabelLine]:
        """Newest first."""
        with self._reading() as connection:
            return labels.read_labels(connection, policy, after=after, limit=limit, exclusion=exclusion, version=version)

    def inspect(self, inference_id: str) -> Inspected | None:
        """Everything about one turn's label."""
        with self._reading() as connection:
            return labels.read_inspected(connection, inference_id)

    def rule_sets(self, policy: str) -> list[RuleSetInfo]:
        """Newest first."""
        with self._reading() as connection:
            return labels.read_rule_sets(connection, policy)

    def proposals(self, policy: str) -> list[Proposal]:
        """Newest first."""
        with expected_to_answer():
            return SqlRules(self._engine, "").proposals(policy)

    def replays(self, policy: str) -> list[AskedReplay]:
        """Newest first."""
        with self._reading() as connection:
            return rule_sets.read_replays(connection, policy)

    def replay(self, policy: str, replay_id: str) -> AskedReplay | None:
        """By its id, of that policy alone."""
        with self._reading() as connection:
            found = rule_sets.read_replay(connection, replay_id)
        return found if found is not None and found.policy == policy else None

    def to_read(self, policy: str) -> int:
        """How many follow-ups wait for people."""
        with self._reading() as connection:
            return readings.count_open(connection, policy)

    def next_to_read(self, policy: str, *, before: datetime | None = None) -> Asked | None:
        """The newest that waits, in its conversation."""
        with self._reading() as connection:
            return readings.next_open(connection, policy, before=before)

    def asked_about(self, policy: str, inference_id: str, observation_id: str) -> Asked | None:
        """One of them."""
        with self._reading() as connection:
            return readings.asked_about(connection, policy, inference_id, observation_id)

    def agreed(self, policy: str) -> Agreed:
        """How far people and the reader agree."""
        with self._reading() as connection:
            return readings.agreed(connection, policy)

    def cuts(self, policy: str, *, newest: int = 30) -> list[CutRow]:
        """The newest batches."""
        with self._reading() as connection:
            return labels.read_cuts(connection, policy, newest)

    # --- data

    def letters(self, *, after: str | None = None, limit: int = PAGE) -> Page[LetterRow]:
        """Dead letters, newest first."""
        with self._reading() as connection:
            return data.read_letters(connection, after=after, limit=limit)

    def streams(self) -> list[StreamRow]:
        """How far each consumer is."""
        with self._reading() as connection:
            return data.read_streams(connection)

    def parked(self) -> int:
        """Observations that wait for their turn."""
        with self._reading() as connection:
            return data.read_parked(connection)

    def erasures(self, *, newest: int = PAGE) -> list[ErasureRow]:
        """Newest first."""
        with self._reading() as connection:
            return data.read_erasures(connection, newest)

    # --- audit

    def audit(self, wanted: AuditFilter, *, after: str | None = None, limit: int = PAGE) -> Page[AuditEntry]:
        """Newest first."""
        with self._reading() as connection:
            return access.read_audit(connection, wanted, after=after, limit=limit)

    def audit_entries(self) -> Iterator[AuditEntry]:
        """The whole chain, in order."""
        with self._reading() as connection:
            yield from chain.entries(connection)

    def head(self) -> tuple[int, str]:
        """(number, hash) of the newest entry."""
        with self._reading() as connection:
            row = connection.execute(select(audit_head.c.seq, audit_head.c.hash)).first()
        return (0, "") if row is None else (row.seq, row.hash)

    def verify(self) -> tuple[int, str, str | None]:
        """Recompute the chain."""
        with self._reading() as connection:
            found = chain.verify(connection)
        return found.entries, found.head, found.problem
