"""One turn of the loop, once per slot.

```
 labels ──▶ cut the batch ──▶ update ──▶ candidate ──▶ judge ──▶ queue for the canary ──▶ (watch: canary, approval, promotion)
              │                 │                        │
              └─ HELD: too few  └─ HELD: a guard    ▲    └─ REJECTED or INCONCLUSIVE: the champion stays
                            `ratchet pretrain` ─────┘
```

A version that `ratchet pretrain` made goes first: the slot judges it and trains nothing.

Every step is durable and idempotent: its outcome is stored under the slot's fencing token before the next one starts, so a
replica that takes the slot over after a kill goes on from there. What each step waits for:

| step      | consumes                       | waits for                          | unblocked by                |
|-----------|--------------------------------|------------------------------------|-----------------------------|
| batch     | labels of the champion (*)     | nothing (HELD if too few)          |                             |
| train     | the batch's token payloads     | the training workers               | Ray                         |
| register  | the candidate's snapshot       | nothing (MLflow may be down)       |                             |
| judge     | suites, logged turns           | an engine holding the candidate    | the engines' ledger         |
| queue     | the verdicts                   | nothing                            |                             |

(*) or of the newest candidate that is being judged and its ancestors: with `[schedule] chain` slots train on while a canary of days runs.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from app.domain.errors import Held, LeaseLost, RatchetError, Unavailable
from app.domain.learning.batches import BatchManifest
from app.domain.learning.cycles import Cycle, CycleStatus
from app.domain.policies import PolicyConfig
from app.domain.ports import BatchStore, Clock, CycleBook, ProgressLog, VersionBook, VersionRegistry, WeightStore
from app.domain.release.gates import GateName, GateResult, Verdict
from app.domain.release.releases import Pointer, Release, ReleaseState
from app.domain.release.versions import RunStatus, TrainingRun, Version, VersionKind, version_name
from app.domain.telemetry.traceparent import TRACEPARENT
from app.telemetry.traces import NOWHERE, Span, Traces
from pipelines.batching import cut_batch
from pipelines.config import LoopConfig
from pipelines.projection import model_card
from pipelines.training import TrainingPorts, forget_run, train

log = logging.getLogger(__name__)
T = TypeVar("T")

LOOP = "system:loop"
PRETRAINER = "system:pretrain"
"""Who opens the release of a version that `ratchet pretrain` made."""


class ReleaseDoor(Protocol):
    """What the cycle may do to releases: open one, put verdicts on it, queue or stop it. Promotion is not among them."""

    def pointer(self, policy: str) -> Pointer: ...
    def open(self, version: Version, *, initiator: str) -> Release: ...
    def start_offline(self, release_id: str) -> Release: ...
    def record(self, release_id: str, result: GateResult) -> None: ...
    def recorded(self, release_id: str) -> dict[GateName, GateResult]: ...
    def queue(self, release_id: str) -> Release: ...
    def stop(self, release_id: str, *, to: ReleaseState, reason: str) -> Release: ...


@dataclass(frozen=True, kw_only=True)
class Case:
    """What the offline gates are asked about."""

    candidate: Version
    champion: Version
    run: TrainingRun
    release: Release


Judge = Callable[[Case], GateResult]


@dataclass(frozen=True, kw_only=True)
class CyclePorts:
    """The world of a cycle."""

    cycles: CycleBook
    batches: BatchStore
    versions: VersionBook
    weights: WeightStore
    releases: ReleaseDoor
    registry: VersionRegistry
    training: TrainingPorts
    progress: ProgressLog
    judges: dict[GateName, Judge]
    """Every offline gate, in the order in which they are asked; all are asked, whatever the others say."""
    pretrained: Callable[[str], Release | None]
    """The release of a pretrained version that waits for the offline gates, if the policy has one."""
    clock: Clock
    code: str = ""
    """What is running, for the versions it makes."""
    ahead: Callable[[str], str | None] = lambda _policy: None
    """The candidate to continue from while it or an older one is being judged, by digest; None is the champion (`[schedule] chain`)."""
    rehearse: Callable[[str, BatchManifest], None] = lambda _champion, _batch: None
    """Told when a batch is cut: the champion's half of what the judges will ask may begin beside the update."""
    traces: Traces = NOWHERE
    traced: Callable[[Sequence[str]], Sequence[str]] = lambda _turns: ()
    """The trace contexts of turns, for the spans that a batch is linked to."""


def run_cycle(cycle: Cycle, *, policy: PolicyConfig, config: LoopConfig, ports: CyclePorts) -> None:
    """Make one candidate from one slot's labels and put it before the gates; ends in a status and a reason, never silently."""
    span = ports.traces.begin("cycle", always=True, ratchet__policy=cycle.policy, ratchet__slot=cycle.slot)
    turn = _Turn(cycle=cycle, policy=policy, config=config, ports=ports, span=span)
    try:
        candidate, run = turn.pretrained() or turn.learned()
        release = turn.step("open", lambda: turn.open(candidate))
        verdicts = turn.step("judge", lambda: turn.judge(release, candidate, run))
        reason = turn.step("queue", lambda: turn.queue_or_stop(release, verdicts))
        turn.finish(CycleStatus.DONE, reason)
    except Held as held:
        turn.finish(CycleStatus.HELD, f"{held.reason}: {held}")
    except LeaseLost as lost:
        log.warning("cycle left to its new owner policy=%s slot=%d: %s", cycle.policy, cycle.slot, lost)
    except RatchetError as error:
        turn.finish(CycleStatus.FAILED, str(error))
        turn.give_up()
    finally:
        if span is not None:
            span.end()


class _Turn:
    """The steps of one cycle, with their bookkeeping."""

    def __init__(self, *, cycle: Cycle, policy: PolicyConfig, config: LoopConfig, ports: CyclePorts, span: Span | None) -> None:
        self._span = span
        self._cycle = cycle
        self._policy = policy
        self._config = config
        self._ports = ports
        self._pointer = ports.releases.pointer(cycle.policy)

    def step(self, name: str, act: Callable[[], T]) -> T:
        """Do a step, then record under the fencing token that it is done and how many seconds it took."""
        started = time.monotonic()
        with self._ports.traces.span(name, parent=self._span and self._span.traceparent) as span:
            result = act()
            if span is not None:
                self._tell(span, result)
        timings = {**self._cycle.timings, name: round(time.monotonic() - started, 3)}
        self._cycle = self._ports.cycles.advance(self._cycle, step=name, changes={"timings": timings, **_produced(result)})
        log.info("cycle step policy=%s slot=%d step=%s seconds=%.2f", self._cycle.policy, self._cycle.slot, name, timings[name])
        return result

    def _tell(self, span: Span, result: object) -> None:
        """What a step made; a batch with links to the turns that are in it."""
        span.set(**{f"ratchet__{name}": value for name, value in _produced(result).items()})
        if isinstance(result, BatchManifest):
            turns = self._ports.traced([item.inference_id for item in result.items])
            span.set(ratchet__turns=len(result.items), ratchet__traced_turns=len(turns))
            span.link(turns)

    def finish(self, status: CycleStatus, reason: str) -> None:
        """End the cycle with its reason."""
        cycle = self._cycle
        if self._span is not None:
            self._span.set(ratchet__status=status)
        self._ports.cycles.finish(cycle, status=status, reason=reason, now=self._ports.clock())
        log.info("cycle ended policy=%s slot=%d status=%s reason=%s", cycle.policy, cycle.slot, status, reason)
        if status is not CycleStatus.DONE:
            with self._ports.batches.cutting(cycle.policy) as session:
                session.give_back()

    def give_up(self) -> None:
        """Nobody resumes the update of a slot that failed: what it left goes, here or when the policy's next one begins."""
        try:
            forget_run(self._run_id, self._ports.training)
        except (Unavailable, OSError) as error:
            log.warning("checkpoints left to the next update run=%s: %s", self._run_id, error)

    @property
    def _run_id(self) -> str:
        return f"{self._cycle.policy}-{self._cycle.slot}"

    def pretrained(self) -> tuple[Version, TrainingRun] | None:
        """The pretrained version that waits, with the run that made it; a slot that has begun to learn finishes that first."""
        waiting = self._ports.pretrained(self._cycle.policy)
        if waiting is None or self._cycle.batch_id is not None:
            return None
        if waiting.champion_digest != self._pointer.digest:
            reason = "the champion it continues from was replaced while it waited: run `ratchet pretrain` again"
            self._ports.releases.stop(waiting.id, to=ReleaseState.ABORTED, reason=reason)
            return None
        version = self._ports.versions.find(waiting.policy, waiting.digest)
        run = self._ports.training.runs.get(version.run_id or "")
        assert run is not None, f"version {version.name} was pretrained and has no run"
        self._project(version, run)
        return version, run

    def learned(self) -> tuple[Version, TrainingRun]:
        """A new candidate from the slot's labels."""
        batch = self.step("batch", self.cut)
        self._ports.rehearse(self._pointer.digest, batch)
        run = self.step("train", lambda: self.update(batch))
        return self.step("register", lambda: self.register(run)), run

    def cut(self) -> BatchManifest:
        """The slot's batch; the same one after a resume. Raises `Held` when there is too little to learn from."""
        return cut_batch(
            self._ports.batches, policy=self._cycle.policy, slot=self._cycle.slot, champion=self._ahead() or self._pointer.digest,
            anchor=self._pointer.anchor, config=self._config.batching, now=self._ports.clock(),
        )  # fmt: skip

    def _ahead(self) -> str | None:
        """The candidate that the slot continues from; the champion where there is none."""
        return self._ports.ahead(self._cycle.policy)

    def update(self, batch: BatchManifest) -> TrainingRun:
        """The RL update, resumed where an earlier attempt left it. Raises `Held` with the guard's reason."""
        run = train(
            batch, run_id=self._run_id, parent=self._ports.versions.find(batch.policy, batch.champion),
            anchor=self._ports.versions.find(batch.policy, batch.anchor), config=self._config.training, ports=self._ports.training,
        )  # fmt: skip
        if run.status is RunStatus.HELD:
            assert run.hold_reason is not None
            raise Held(run.hold_reason, run.message or "the update refused")
        if run.status is not RunStatus.SUCCEEDED or run.candidate is None:
            raise Unavailable(run.message or f"training run {run.id} ended as {run.status} without a candidate; see its log")
        return run

    def register(self, run: TrainingRun) -> Version:
        """Name the candidate and record its lineage; MLflow follows when it can."""
        assert run.candidate is not None
        parent = self._ports.versions.find(run.policy, run.parent)
        step = parent.step + 1
        created = run.finished_at or run.started_at
        name = version_name(base=self._policy.base_name, kind=VersionKind.RL, created_at=created, step=step)
        version = Version(
            digest=run.candidate, policy=run.policy, name=self._free_name(name, run.candidate), kind=VersionKind.RL, parent=run.parent,
            step=step, run_id=run.id, created_at=created, base_model=parent.base_model, licence=parent.licence,
            optimizer_uri=run.metrics.get("optimizer_uri"), tags={"batch": run.batch_id, "code": self._ports.code, **self._context()},
        )  # fmt: skip
        self._ports.versions.add(version)
        self._project(version, run)
        return version

    def _context(self) -> dict[str, str]:
        """What a version's release goes on from, where this slot is traced."""
        return {} if self._span is None else {TRACEPARENT: self._span.traceparent}

    def open(self, candidate: Version) -> Release:
        """Open the candidate's release, or find the one an earlier attempt opened."""
        opener = PRETRAINER if candidate.kind is VersionKind.PRETRAIN else LOOP
        release = self._ports.releases.open(candidate, initiator=opener)
        return self._ports.releases.start_offline(release.id) if release.state is ReleaseState.TRAINED else release

    def judge(self, release: Release, candidate: Version, run: TrainingRun) -> list[GateResult]:
        """Ask every offline gate that has not answered yet, and record each answer."""
        champion = self._ports.versions.find(release.policy, release.champion_digest)  # not its parent, where it continues from a candidate
        case = Case(candidate=candidate, champion=champion, run=run, release=release)
        recorded = self._ports.releases.recorded(release.id)
        for gate, ask in self._ports.judges.items():
            if gate not in recorded:
                recorded[gate] = ask(case)
                self._ports.releases.record(release.id, recorded[gate])
        return list(recorded.values())

    def queue_or_stop(self, release: Release, verdicts: list[GateResult]) -> str:
        """Queue the candidate for the canary if no gate vetoes and the offline suite passed; otherwise the champion stays."""
        failed = [v for v in verdicts if v.verdict is Verdict.FAIL]
        # The off-policy estimate may veto or hint, never pass (facts/gates.md 4.3): uninformative is not a reason to stop.
        unsure = [v for v in verdicts if v.verdict is Verdict.INCONCLUSIVE and v.gate is not GateName.OFF_POLICY]
        if release.state is not ReleaseState.OFFLINE:
            return f"release {release.id} is already {release.state}"
        if failed or unsure:
            to = ReleaseState.REJECTED if failed else ReleaseState.INCONCLUSIVE
            reason = "; ".join(f"{v.gate}: {v.reason}" for v in failed or unsure)
            self._ports.releases.stop(release.id, to=to, reason=reason)
            return f"{release.version_name} {to.lower()}: {reason}"
        self._ports.releases.queue(release.id)
        return f"{release.version_name} queued for the canary"

    def _free_name(self, name: str, digest: str) -> str:
        """Two candidates of one parent on one day have the same step: the later ones get a suffix."""
        taken = {v.name for v in self._ports.versions.of_policy(self._cycle.policy) if v.digest != digest}
        candidates = [name, *(f"{name}.{i}" for i in range(2, len(taken) + 3))]
        return next(free for free in candidates if free not in taken)

    def _project(self, version: Version, run: TrainingRun) -> None:
        try:
            folder = self._ports.weights.path(version.digest)
            self._ports.registry.register(version, folder=folder, run=run, card=model_card(version, run))
        except Unavailable as error:
            # The registry is a projection: the loop goes on, and `pipelines.projection` repairs it later.
            log.warning("registry behind policy=%s version=%s: %s", version.policy, version.name, error)


def _produced(result: object) -> dict[str, str]:
    match result:
        case BatchManifest():
            return {"batch_id": result.id}
        case TrainingRun():
            return {"run_id": result.id}
        case Release():
            return {"release_id": result.id}
        case _:
            return {}
