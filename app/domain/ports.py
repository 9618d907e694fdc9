"""What the rooms need from the outside world, as small structural Protocols; adapters inherit nothing, `app.wiring` plugs them in.

Grouped by who asks. Every port has one suite in `tests/ports`, run over its fake and its real adapter.
"""

from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from app.domain.access import ApiKey
from app.domain.learning.batches import BatchManifest, LabelledTurn, LabelsMade, TurnPayload, Voice
from app.domain.learning.cycles import Cycle, CycleStatus
from app.domain.learning.training import AdamParams, Datum, ForwardBackward, LossSpec, Place, StepOutcome
from app.domain.release.assignment import Arm
from app.domain.release.releases import Route
from app.domain.release.versions import TrainingRun, Version
from app.domain.telemetry.events import CloudEvent, Heard, Observation
from app.domain.telemetry.serving import EngineSight, GenerateRequest, GenerationChunk, ScoreRequest
from app.domain.telemetry.turns import PayloadClaim


class Clock(Protocol):
    """Tells the time; tests freeze it."""

    def __call__(self) -> datetime: ...


# --- the door: api ----------------------------------------------------------------------------------------------------------


class Receipt(StrEnum):
    """The inbox's answer per event."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    """Same (source, id), same payload: harmless, nothing stored."""
    CONFLICT = "conflict"
    """Same (source, id), other payload: the first one stays, counted."""


class Inbox(Protocol):
    """The durable door: returning means committed with full synchronisation."""

    async def append(self, events: Sequence[CloudEvent]) -> list[Receipt]:
        """Commit the events (group commit) and say per event what became of it. Raises `Overloaded` when the backlog is full."""
        ...


class Claims(Protocol):
    """Where the payloads of large turns go before their event."""

    def deposit(self, payload: TurnPayload) -> PayloadClaim:
        """Write it durably; the same payload again gives the same claim. Raises `Unavailable`."""
        ...


class Routes(Protocol):
    """What is live, read at most a second late."""

    def route(self, policy: str) -> Route:
        """The route of a policy. Raises `UnknownPolicy`, `Unavailable` when nothing was deployed yet."""
        ...

    def knows(self, policy: str, digest: str) -> bool:
        """Whether this is a version of the policy, whatever became of it."""
        ...


class Engines(Protocol):
    """Whoever samples: the embedded engine or vLLM."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerationChunk]:
        """Sample one completion.

        Raises `Unavailable` when no engine holds `request.digest`, `Overloaded` when all are full, `BadRequest` when the prompt
        does not fit the context window.
        """
        ...

    async def count_tokens(self, request: GenerateRequest) -> int:
        """Length of the prompt as the engine would feed it (chat template included). Raises as `generate` does."""
        ...

    async def score(self, request: ScoreRequest) -> list[float]:
        """Natural log-probability [T] of each completion token given all before it, under the distribution that sampling with this
        temperature and top-p draws from (-inf where top-p excludes it). Feeds the off-policy gate; live answers go first.

        Raises as `generate` does; `BadRequest` also where this kind of engine cannot score such a distribution.
        """
        ...


class GatewayEngines(Engines, Protocol):
    """The same, which can also be looked at."""

    async def sights(self) -> list[EngineSight]:
        """Every engine that is known, asked now; one that does not answer is among them and says so."""
        ...


class EngineState(StrEnum):
    """What an engine has of a version."""

    LOADING = "loading"
    READY = "ready"
    """In memory, whole-state digest verified."""
    FAILED = "failed"
    DROPPED = "dropped"


@dataclass(frozen=True, kw_only=True)
class Holder:
    """An engine that is ready with a version."""

    doubt: str | None = None
    """What is wrong with its log-probabilities; None where nothing is."""
    region: str = ""
    """Where it stands (RATCHET_REGION of the process that reports it)."""


class EngineLedger(Protocol):
    """Which versions the engines have to hold, and what each of them really holds."""

    def wanted(self) -> set[tuple[str, str]]:
        """(policy, digest) of champions, what may come back, and candidates."""
        ...

    def report(self, policy: str, digest: str, state: EngineState, detail: str | None = None) -> None:
        """Record what this engine has of a version; repeated reports say that it is still so."""
        ...

    def addresses(self, digest: str) -> list[str]:
        """Base URLs of the engines that reported the version ready in the last seconds."""
        ...

    def holders(self, digest: str) -> Mapping[str, Holder]:
        """The same, each with what is to be known before it is asked."""
        ...

    def roles(self, policy: str) -> Mapping[str, Sequence[str]]:
        """What the versions of a policy are wanted for: digests by `champion`, `candidate` and `previous`, the most wanted first."""
        ...


@dataclass(frozen=True, kw_only=True)
class EpisodeSummary:
    """A summary that the model wrote of its own context."""

    text: str
    tags: Mapping[str, str]
    """Say which messages it replaces, see `app.api.chat.summary`."""


@dataclass(frozen=True, kw_only=True)
class EpisodeState:
    """What the gateway has to know about a running episode when another replica, or itself before a restart, served it so far."""

    arm: Arm
    """The arm of its newest exposure: a running episode finishes on it."""
    last_inference_id: str
    summaries: tuple[EpisodeSummary, ...] = ()
    """Oldest first."""


class Episodes(Protocol):
    """Looks running episodes up; what was served in the last second may be missing (the gateway remembers that itself)."""

    def find(self, episode_id: str, policy: str) -> EpisodeState | None:
        """The episode as far as this policy served it."""
        ...

    def summaries(self, episode_id: str, policy: str) -> tuple[EpisodeSummary, ...]:
        """What the model wrote about the episode under this policy, oldest first; of practice too, which is no exposure."""
        ...


class Keys(Protocol):
    """The stored API keys; few, so they are read all at once and at most a second late."""

    def all(self) -> list[ApiKey]:
        """Every key that is neither revoked nor expired."""
        ...

    def ever(self) -> bool:
        """Whether any key was ever made, usable today or not."""
        ...

    def note_used(self, used: Mapping[str, datetime]) -> None:
        """When keys (by id) were used; what is older than what is noted, or within `USED_EVERY` of it, changes nothing."""
        ...


class Ledger(Protocol):
    """Which events were accepted, for ever."""

    def seen(self, source: str, ids: Sequence[str]) -> set[str]:
        """Those of the ids that were accepted under this source."""
        ...

    def observation(self, source: str, observation_id: str) -> Observation | None:
        """The observation that was accepted under this identity."""
        ...

    def about(
        self, *, inference_ids: Sequence[str] = (), episode_ids: Sequence[str] = (), policy: str | None, most: int = 10_000
    ) -> list[Heard]:
        """What was accepted about these turns and episodes, oldest first; of one policy where one is named, and then nothing else.

        Of more than `most` the newest: whoever may send feedback must not be able to fill the memory of whoever reads it.
        """
        ...


class Reads(Protocol):
    """What operators and dashboards read; every answer is plain JSON-serialisable data."""

    def ping(self) -> None:
        """Raise `Unavailable` when the database does not answer."""
        ...

    def counters(self) -> list[tuple[str, str, int]]:
        """(policy, name, value) of the durable counters."""
        ...

    def turns_per_version(self) -> list[tuple[str, str, int, int]]:
        """(policy, version digest, turns, labelled turns)."""
        ...

    def backlog(self) -> dict[str, float]:
        """Counts, and the age of the oldest event that is not applied: see `ratchet_…` of docs/metrics.md, "What the database knows"."""
        ...

    def runs(self, policy: str | None, limit: int) -> list[dict[str, Any]]: ...

    def versions(self, policy: str | None, limit: int) -> list[dict[str, Any]]: ...

    def engines(self, policy: str | None) -> list[dict[str, Any]]:
        """What each engine reported of each version; see `app.db.release.engine_reads`."""
        ...

    def labels_report(self, policy: str) -> dict[str, Any]:
        """Turns served, labels, exclusions per reason, rewards per version, per segment."""
        ...


# --- payloads and weights -------------------------------------------------------------------------------------------------------


class TrajectoryStore(Protocol):
    """Token payloads in immutable Parquet segments."""

    def write(self, name: str, payloads: Sequence[TurnPayload]) -> str:
        """Write one segment; the same name and payloads again change nothing. Returns the segment's name."""
        ...

    def read(self, locations: Iterable[tuple[str, str]]) -> dict[str, TurnPayload]:
        """Payloads by inference id for (segment, inference_id) pairs; what is gone is absent from the answer."""
        ...


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a version is made from one that is held."""

    base: str
    deltas: tuple[bytes, ...] = ()
    """One after the other; see `app.policy.storage.delta`."""
    snapshot: Path | None = None
    """Instead: the version itself, to be compared with the base."""
    probe: bytes | None = None
    """What the version says of the fixed text, where its trainer wrote it down; see `app.policy.scoring.fixed_probe`."""


class WeightStore(Protocol):
    """Snapshots by digest. A snapshot is a folder: model.safetensors (bf16), config.json, tokenizer files, READY written last."""

    def path(self, digest: str) -> Path:
        """Local folder of a snapshot, fetched where the store is remote. Raises `NotFound`."""
        ...

    def publish(self, folder: Path) -> str:
        """Take over a finished snapshot folder (written by `app.policy`), durable before it returns. Returns its digest."""
        ...

    def exists(self, digest: str) -> bool: ...


class Beside(Protocol):
    """Small files beside a version's weights: added after it was published, removed with it, no part of its digest."""

    def read_beside(self, digest: str, name: str) -> bytes | None:
        """None where there is none."""
        ...

    def put_beside(self, digest: str, name: str, content: bytes) -> None:
        """Put one there, or another in its place. Raises `NotFound` (no such version)."""
        ...

    def take_beside(self, digest: str, name: str) -> None:
        """Take one away; harmless when it is not there."""
        ...


class EngineWeights(WeightStore, Beside, Protocol):
    """The same, as engines use it."""

    def way(self, digest: str, held: Collection[str]) -> Way | None:
        """How to make the version from one of those that are held; None where it descends from none, or a keyframe lies between."""
        ...


# --- the loop ---------------------------------------------------------------------------------------------------------------------


class ProgressLog(Protocol):
    """Where long work says how far it is, for the terminal and the console."""

    def report(self, policy: str, task: str, done: float, total: float, detail: dict[str, Any]) -> None:
        """`task` is `sampling`, `training`, `evaluation`, …; `detail` is small and JSON-serialisable."""
        ...


class CycleBook(Protocol):
    """Who runs a slot, and how far it got; see `app.db.learning.cycles`."""

    def elect(self, policy: str, slot: int, *, owner: str, now: datetime, lease: timedelta) -> Cycle | None: ...
    def take_over(self, policy: str, *, owner: str, now: datetime, lease: timedelta) -> Cycle | None: ...
    def renew(self, cycle: Cycle, *, now: datetime, lease: timedelta) -> None: ...
    def advance(self, cycle: Cycle, *, step: str, changes: Mapping[str, Any]) -> Cycle: ...
    def finish(self, cycle: Cycle, *, status: CycleStatus, reason: str | None, now: datetime) -> None: ...
    def skip(self, policy: str, slot: int, *, reason: str, now: datetime) -> bool: ...
    def find(self, policy: str, slot: int) -> Cycle: ...
    def newest_slot(self, policy: str) -> int | None: ...
    def running(self, policy: str) -> Cycle | None: ...
    def recent(self, policy: str, *, limit: int = 50) -> list[Cycle]: ...


class VersionBook(Protocol):
    """Versions by digest, with their lineage."""

    def add(self, version: Version) -> None: ...
    def find(self, policy: str, digest: str) -> Version: ...
    def of_policy(self, policy: str) -> list[Version]: ...


class VersionRegistry(Protocol):
    """The projection that people look at (MLflow)."""

    def register(self, version: Version, *, folder: Path, run: TrainingRun | None, card: str) -> None:
        """Idempotent by digest. Raises `Unavailable`: serving and rollback never depend on it."""
        ...

    def reconcile(self, policy: str, wanted: Mapping[str, str]) -> list[str]:
        """Make the aliases (alias → digest) what SQL says; returns a sentence per repair."""
        ...


@dataclass(frozen=True, kw_only=True)
class Lease:
    """A right to act, until `expires_at`; every write under it carries `token` (fencing)."""

    name: str
    owner: str
    token: int
    expires_at: datetime


# --- learning -------------------------------------------------------------------------------------------------------------------


class Trainer(Protocol):
    """Whoever computes gradients: the local one, or a service of Tinker's shape (forward_backward, optim_step, save and load)."""

    def precision(self) -> str:
        """Name of the dtype that the matrix products run in, such as `bfloat16`; whatever `auto` was resolved to."""
        ...

    def forward(self, data: Sequence[Datum]) -> ForwardBackward:
        """Log-probabilities and entropies under the current weights, no gradient."""
        ...

    def forward_backward(self, data: Sequence[Datum], loss: LossSpec) -> ForwardBackward:
        """Add the loss's gradient over `data` to the one being accumulated. Raises `Unavailable` when a worker is lost."""
        ...

    def optim_step(self, params: AdamParams) -> StepOutcome:
        """Apply the accumulated gradient and forget it; afterwards the weights are again those that would be published."""
        ...

    def retreat(self, kept: float, start: Place) -> None:
        """Go back towards `start` (a snapshot's folder, or a saved state's place), keeping a share of the way; the optimizer stays."""
        ...

    def load_state(self, snapshot: Path) -> None:
        """Weights only, from a snapshot folder; the optimizer starts anew."""
        ...

    def load_state_with_optimizer(self, folder: Place) -> None:
        """Continue exactly where `save_state` was. Raises `DamagedState` where what is in object storage is not what was written."""
        ...

    def save_state(self, folder: Place) -> Mapping[str, str]:
        """Master weights and optimizer state; returns the digest of each file, by name."""
        ...

    def save_weights_for_sampler(self, folder: Path, like: Path) -> str:
        """Write a bf16 snapshot with the configuration and tokenizer of the snapshot `like`; returns its digest."""
        ...


class CutSession(Protocol):
    """One transaction in which a batch is cut; nobody else cuts for this policy meanwhile."""

    def existing(self, slot: int) -> BatchManifest | None:
        """The batch of this slot, where one was cut already."""
        ...

    def give_back(self) -> int:
        """Free the labels of batches that came to nothing by a fault; returns how many.

        That is a batch whose cycle is over as HELD or FAILED, and of which no candidate went before a gate that failed it or is still
        on its way. A batch whose candidate was judged stays used up: the gates have seen what these labels teach.
        """
        ...

    def lineage(self, champion: str, versions_back: int) -> tuple[str, ...]:
        """The champion and up to `versions_back` of its ancestors, newest first."""
        ...

    def known_versions(self) -> frozenset[str]:
        """Digests of every version of this policy."""
        ...

    def last_window_end(self) -> datetime | None:
        """Where the newest batch's window ended."""
        ...

    def unused_labels(
        self, *, versions: Sequence[str], since: datetime | None, until: datetime, slot: int = 0, at_most: int | None = None
    ) -> list[LabelledTurn]:
        """Current labels in no batch: of `versions` whenever made, of any other version since `since`; none made after `until`.

        With `at_most`, those of so many labels that say anything, whole episodes, drawn by lot: the same ones for the same slot.
        """
        ...

    def voices(self, turns: Sequence[LabelledTurn], *, before: datetime) -> Mapping[str, Sequence[Voice]]:
        """By inference id, whose word decided each turn's outcome; newcomers are those of whom nothing is older than `before`."""
        ...

    def made(self, *, since: datetime | None, until: datetime) -> LabelsMade:
        """The current labels in no batch that were made in this time, counted."""
        ...

    def save(self, manifest: BatchManifest) -> None:
        """Insert the batch and its items. Raises when a turn is in another batch already."""
        ...


class BatchStore(Protocol):
    """Where batches are cut."""

    def cutting(self, policy: str) -> AbstractContextManager[CutSession]:
        """Open a transaction with the policy's cutting locked; committed when the block ends well, rolled back otherwise."""
        ...


class RunStore(Protocol):
    """Training runs and the baseline trackers that follow the champion's lineage."""

    def get(self, run_id: str) -> TrainingRun | None:
        """The run as last recorded."""
        ...

    def put(self, run: TrainingRun) -> None:
        """Insert or overwrite the run."""
        ...

    def tracker(self, digest: str) -> dict[str, Any] | None:
        """The tracker's state after the run that made `digest`."""
        ...

    def put_tracker(self, digest: str, policy: str, state: dict[str, Any]) -> None:
        """Remember the tracker's state of a candidate."""
        ...

    def term_means(self, batch_id: str) -> dict[str, float]:
        """Mean value of each reward term over the batch's labels, where it spoke."""
        ...

    def labels_used_share(self, batch_id: str) -> float | None:
        """Of the labels of the day up to the batch that could teach something, the share that is in a batch; None without such labels."""
        ...

    def term_shares(self, batch_id: str) -> dict[str, float]:
        """Share of the absolute reward that comes from each term; empty where no term spoke."""
        ...
