"""What the console's pages show: read a page at a time, by key, from rows that were added up when labels were written.

Lists are cut by key and never by number: the next page begins after the last row that was shown, however many come in meanwhile.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, Protocol, TypeVar

from app.domain.access import ApiKey
from app.domain.learning.cycles import Cycle
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
from app.domain.views.rows import GateRow, ProgressRow, Reach, StepRow
from app.domain.views.story import Told

T = TypeVar("T")
PAGE = 50


@dataclass(frozen=True, kw_only=True)
class Page(Generic[T]):
    """Some rows of a list, newest first."""

    rows: tuple[T, ...]
    after: str | None = None
    """Where the next page begins; None on the last one."""


Cells = Mapping[tuple[str, str], Sums]
"""By (version, measure)."""
Course = Mapping[tuple[str, str, datetime], Sums]
"""By (version, measure, hour)."""


@dataclass(frozen=True, kw_only=True)
class VersionInfo:
    """One version as lists show it."""

    digest: str
    name: str
    kind: str
    parent: str | None
    step: int
    created_at: datetime
    licence: str
    base_model: str


@dataclass(frozen=True, kw_only=True)
class Moved:
    """One move of the deployment pointer."""

    generation: int
    digest: str
    previous: str | None
    anchor: str
    action: str
    actor: str
    reason: str | None
    occurred_at: datetime
    release_id: str | None


@dataclass(frozen=True, kw_only=True)
class Barred:
    """One quarantined version."""

    digest: str
    reason: str
    since: datetime
    votes: tuple[str, ...]
    """Who voted to lift it."""


@dataclass(frozen=True, kw_only=True)
class EngineRow:
    """What an engine says it holds."""

    engine_id: str
    digest: str
    state: str
    detail: str | None
    seen_at: datetime


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What waits for a person, and what goes on."""

    ready: tuple[Release, ...]
    in_flight: tuple[Release, ...]
    alarms: tuple[Alarm, ...]
    """Open ones."""
    frozen: str | None
    unfreeze_votes: tuple[str, ...]
    held: tuple[Cycle, ...]
    """The newest slots, where two or more in a row were held or failed."""
    engines: tuple[EngineRow, ...]
    """Those that hold the champion wrongly, or were not heard of lately."""
    troubles: tuple[tuple[str, str, datetime], ...]
    """(process, what it waits for, since)."""
    dead_letters: int
    """Not replayed; counted no further than a thousand."""
    slots: tuple[Cycle, ...]
    """The last 48, newest first."""
    progress: tuple[ProgressRow, ...]
    counters: Mapping[str, int]
    turns: tuple[int, int]
    """(turns, labelled ones) of the policy."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """Who was served in one stage and arm of a canary."""

    stage: str
    arm: str
    digest: str
    requests: int
    people: int


@dataclass(frozen=True, kw_only=True)
class LabelLine:
    """One current label in a list."""

    inference_id: str
    revision: int
    version: str
    segment: str
    reward: float
    exclusion: str | None
    terms: tuple[Mapping[str, Any], ...]
    labelled_at: datetime
    batch_id: str | None


@dataclass(frozen=True, kw_only=True)
class Inspected:
    """Everything about one turn's label."""

    inference_id: str
    episode_id: str
    version: str
    policy: str
    arm: str
    segment: str
    started_at: datetime
    finished_at: datetime
    finish_reason: str
    completion: str
    erased_at: datetime | None
    revisions: tuple[LabelLine, ...]
    """Newest first."""
    observed: tuple[Mapping[str, Any], ...]
    """In order of occurrence: `name`, `value`, `occurred_at`, `received_at`, `status`, `retracted_at`."""


@dataclass(frozen=True, kw_only=True)
class RuleSetInfo:
    """A rule set that was put in force."""

    digest: str
    name: str
    activated_by: str
    activated_at: datetime
    toml: str


@dataclass(frozen=True, kw_only=True)
class LetterRow:
    """A dead letter without its payload."""

    id: int
    topic: str
    partition: int
    offset: int
    reason: str
    attempts: int
    last_seen_at: datetime
    replayed_at: datetime | None


@dataclass(frozen=True, kw_only=True)
class StreamRow:
    """How far a consumer is on one partition."""

    consumer_group: str
    topic: str
    partition: int
    next_offset: int
    high_water: int | None
    updated_at: datetime


@dataclass(frozen=True, kw_only=True)
class ErasureRow:
    """A person who was forgotten, with what went."""

    actor: str
    requested_by: str
    erased_at: datetime
    report: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class CutRow:
    """A batch with what was left out of it, by reason."""

    id: str
    slot: int
    created_at: datetime
    items: int
    left_out: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class AuditFilter:
    """Which entries are wanted; None is any."""

    subject: str | None = None
    actor: str | None = None
    action: str | None = None
    """Begins so."""
    policy: str | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """The training run behind a candidate."""

    id: str
    status: str
    message: str | None
    metrics: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Trace(Protocol):
    """One place that was looked into for what is left of somebody."""

    @property
    def place(self) -> str: ...
    @property
    def found(self) -> int: ...
    @property
    def cure(self) -> str: ...


class Sight(Protocol):
    """Read-only sight of a deployment, for pages."""

    def policies(self) -> list[str]: ...
    def pulse(self) -> tuple[str, str]:
        """One cheap read that says something else whenever what pages show has changed, and second, whenever who may look has."""
        ...

    def find(self, policy: str, wanted: str) -> str | None:
        """The path below /console of what is called so; None where nothing is."""
        ...

    def pointer(self, policy: str) -> Pointer | None: ...
    def needs(self, policy: str) -> Needs: ...
    def names(self, policy: str, digests: Collection[str]) -> dict[str, str]:
        """Names of versions by digest; unknown ones are missing."""
        ...

    # access
    def people(self) -> list[Person]: ...
    def every_key(self) -> list[ApiKey]:
        """Of programs and of people, ended ones too, newest first."""
        ...

    def sessions(self, person_id: str) -> list[SessionRow]:
        """Open ones of somebody, newest first."""
        ...

    def hands(self, actor: str) -> list[HandRow]:
        """Whose hands made their credentials, newest first."""
        ...

    # releases
    def releases(self, policy: str, *, after: str | None = None, limit: int = PAGE) -> Page[Release]: ...
    def release(self, release_id: str) -> Release | None: ...
    def gates(self, release_id: str) -> list[GateRow]:
        """The newest answer of each gate."""
        ...

    def decisions(self, release_id: str, *, newest: int = 200) -> list[GateRow]:
        """Live decisions as they were recorded, oldest first."""
        ...

    def results(self, release_id: str) -> Iterator[tuple[GateRow, GateResult]]:
        """Every answer of every gate, in the order in which they came."""
        ...

    def story(self, release: Release) -> list[Told]: ...
    def steps(self, release_id: str) -> list[StepRow]: ...
    def alarms(self, policy: str, release_id: str | None = None) -> list[Alarm]: ...
    def approvals(self, release_id: str) -> list[Approval]: ...
    def served(self, release_id: str) -> list[Served]: ...
    def run_of(self, policy: str, digest: str) -> Run | None: ...
    def reach(self, policy: str, digest: str) -> Reach: ...
    def preference(self, release_id: str) -> Preference: ...
    def judging(self, release_id: str) -> tuple[list[str], list[BlindVote]]:
        """Ids of the release's blind pairs, and every vote about them."""
        ...

    def pair(self, pair_id: str) -> BlindPair:
        """Raises `NotFound`."""
        ...

    # versions
    def versions(self, policy: str, *, after: str | None = None, limit: int = PAGE) -> Page[VersionInfo]: ...
    def version(self, policy: str, digest: str) -> VersionInfo | None: ...
    def history(self, policy: str, *, after: str | None = None, limit: int = PAGE) -> Page[Moved]: ...
    def quarantined(self, policy: str) -> list[Barred]: ...
    def good_versions(self, policy: str, *, besides: str) -> list[str]: ...
    def digest_of(self, policy: str, wanted: str) -> str | None: ...
    def pins(self, policy: str) -> Mapping[str, Pin]:
        """What people pinned, by digest."""
        ...

    def holdout(self, policy: str) -> Holdout | None:
        """The newest long-term holdout, whether open or not."""
        ...

    # labels, added up
    def sums(self, policy: str, versions: Collection[str], *, since: datetime | None = None) -> Cells: ...
    def course(self, policy: str, versions: Collection[str], *, since: datetime, measures: Collection[str]) -> Course: ...
    def segments(self, policy: str, versions: Collection[str], *, since: datetime | None = None) -> Mapping[tuple[str, str, str], Sums]:
        """By (version, segment, measure)."""
        ...

    def totals(self, policy: str, *, since: datetime) -> Mapping[str, Sums]:
        """Of every version together, by measure."""
        ...

    # labels, one by one
    def labels(
        self, policy: str, *, after: str | None = None, limit: int = PAGE, exclusion: str | None = None, version: str | None = None
    ) -> Page[LabelLine]: ...
    def inspect(self, inference_id: str) -> Inspected | None: ...
    def rule_sets(self, policy: str) -> list[RuleSetInfo]: ...
    def proposals(self, policy: str) -> list[Proposal]:
        """What people proposed, newest first."""
        ...

    def replays(self, policy: str) -> list[AskedReplay]:
        """Newest first, without what came of them."""
        ...

    def replay(self, policy: str, replay_id: str) -> AskedReplay | None: ...
    def to_read(self, policy: str) -> int:
        """Follow-ups that wait for somebody to read them, counted no further than a thousand."""
        ...

    def next_to_read(self, policy: str, *, before: datetime | None = None) -> Asked | None:
        """The newest that waits; with `before` the newest of those that are older."""
        ...

    def asked_about(self, policy: str, inference_id: str, observation_id: str) -> Asked | None: ...
    def agreed(self, policy: str) -> Agreed:
        """How far people and the reader of follow-ups agree on the newest two thousand that people read."""
        ...

    def cuts(self, policy: str, *, newest: int = 30) -> list[CutRow]: ...

    # data
    def letters(self, *, after: str | None = None, limit: int = PAGE) -> Page[LetterRow]: ...
    def streams(self) -> list[StreamRow]: ...
    def parked(self) -> int:
        """Observations that wait for their turn, counted no further than ten thousand."""
        ...

    def erasures(self, *, newest: int = PAGE) -> list[ErasureRow]: ...

    # audit
    def audit(self, wanted: AuditFilter, *, after: str | None = None, limit: int = PAGE) -> Page[AuditEntry]: ...
    def audit_entries(self) -> Iterator[AuditEntry]:
        """The whole chain, in order."""
        ...

    def head(self) -> tuple[int, str]:
        """(number, hash) of the newest entry: what a printed page names, so that it can be placed in the chain."""
        ...

    def verify(self) -> tuple[int, str, str | None]:
        """(entries, head, the first thing that is wrong or None)."""
        ...
