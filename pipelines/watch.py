"""The watch: asks the live gates again every second or two, promotes on evidence, and takes back without asking.

TLDR: for every policy, first look for harm in everything that is being served, and only then move anything forward.

    tick ─▶ 1. champion, holdback   harm, fall, limits burnt while the reference is healthier?  ──▶ roll back
                                    limits burnt and nothing healthier: an incident  ──▶ alarm, nothing moves (ask the last good version)
            2. canary and whatever waits (READY, APPROVED, PROMOTING)
                                    harm? ──▶ abort + quarantine      data in doubt? ──▶ hold, void approvals
                                    stage done? ──▶ ramp              non-inferior? ──▶ READY (asks people)
               judged by people     enough votes? ──▶ READY, REJECTED     no answer in time ──▶ INCONCLUSIVE
            3. deadlines            nobody approved in time ──▶ EXPIRED
            4. approved             ──▶ PROMOTING ──▶ pointer swapped (champion before it keeps the holdback)
            5. queue                newest candidate, engines hold it, nobody is judged ──▶ CANARY; no traffic can judge it ──▶ JUDGING
            6. holdback             the slot is over ──▶ anchor keeps a few percent; anchor guard
            7. long-term holdout    begins, counts, ends (a report, no gate)

| waits for                | state     | unblocked by                                                     |
|--------------------------|-----------|------------------------------------------------------------------|
| an engine to hold it     | QUEUED    | the engines' ledger says `ready`                                 |
| a canary to end          | QUEUED    | any decision about that canary, at the latest `canary_max_s`     |
| units                    | CANARY    | traffic; without any: HOLD, then ABORT after `hold_max_s`        |
| people's votes           | JUDGING   | enough votes of enough people, or `people.longest_s`             |
| people                   | READY     | approve, reject, or `approval_expires_at`                        |
| an engine to hold it     | PROMOTING | the ledger; harm or an abort wins                                |

Nothing of this waits in a way that stops step 1 and 2: each is asked on every tick, in every state from CANARY to SUPERSEDED. The watch may
be killed at any point, and several may run: every act is one transaction that names the state and stage it was decided for, every decision
is made again from the database.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Protocol

import msgspec

from app.domain.errors import Quarantined, RatchetError, Refused, StaleGeneration
from app.domain.ports import Clock, ProgressLog
from app.domain.release.alarms import AlarmKind, open_of, why_still
from app.domain.release.gates import CanaryAction, GateName
from app.domain.release.releases import ENGINE_ALIVE, Pointer, Release, ReleaseState
from app.release.desk import ReleaseDesk
from pipelines.evaluation.config import GatesConfig
from pipelines.evaluation.counting.evidence import Evidence
from pipelines.evaluation.counting.subjects import (
    CanarySubject,
    EraSubject,
    EvidenceBook,
    frozen_config,
    is_about_engines,
)
from pipelines.evaluation.live.champion import decide_champion
from pipelines.evaluation.live.decide import Cause, Decision, decide
from pipelines.evaluation.live.guards import AnchorWatch
from pipelines.evaluation.live.holdout import HoldoutBook, HoldoutKeeper
from pipelines.evaluation.live.planning import plan_canary
from pipelines.evaluation.live.recording import Recorder, said_by
from pipelines.evaluation.statistics import power

log = logging.getLogger("ratchet.watch")
S = ReleaseState
ACTOR = "system:watch"
ASKING_SHARE = 0.10
"""Share of the people who ask the last good version in an incident of a champion without a holdback."""
JUDGED = (S.CANARY, S.READY, S.APPROVED, S.PROMOTING)


class ReleaseList(Protocol):
    """What there is to watch."""

    def list(self, *, policy: str | None = None, states: Collection[ReleaseState] = (), limit: int = 100) -> list[Release]: ...


@dataclass(frozen=True, kw_only=True)
class WatchPorts:
    """The world of the watch."""

    desk: ReleaseDesk
    releases: ReleaseList
    evidence: EvidenceBook
    holdouts: HoldoutBook
    progress: ProgressLog
    clock: Clock


@dataclass(kw_only=True)
class Watch:
    """Watches one policy."""

    policy: str
    config: GatesConfig
    """For what was not frozen with a release: the champion's watch and new canaries' traffic."""
    ports: WatchPorts
    _canaries: dict[str, CanarySubject] = field(default_factory=dict[str, CanarySubject])
    _era: EraSubject | None = None
    _anchor: AnchorWatch | None = None
    _holdout: HoldoutKeeper | None = None
    _said: dict[str, str] = field(default_factory=dict[str, str])
    _reminded: set[str] = field(default_factory=set[str])

    @property
    def _record(self) -> Recorder:
        return Recorder(policy=self.policy, config=self.config, book=self.ports.evidence, clock=self.ports.clock)

    def tick(self) -> None:
        """One round, in the order of the picture. What goes wrong with one release never stops the look at the others."""
        judged = self.ports.releases.list(policy=self.policy, states=JUDGED)
        by_traffic = [release for release in judged if release.config.get("by_people") is None]
        self._each([("champion", self._judge_champion), *((r.id, lambda r=r: self._judge(r)) for r in by_traffic)])
        asked = self.ports.releases.list(policy=self.policy, states=(S.JUDGING,))
        self._each([(r.id, lambda r=r: self._count_votes(r)) for r in asked])
        waiting = self.ports.releases.list(policy=self.policy, states=(S.READY, S.APPROVED, S.PROMOTING))
        self._each([(r.id, lambda r=r: self._advance(r)) for r in waiting])
        self._each([("queue", self._start_canary), ("holdback", self._keep_holdback), ("holdout", self._keep_holdout)])
        live = {r.id for r in judged}
        self._canaries = {key: subject for key, subject in self._canaries.items() if key in live}

    def _each(self, jobs: Iterable[tuple[str, Callable[[], None]]]) -> None:
        for name, job in jobs:
            try:
                job()
            except (StaleGeneration, Refused, Quarantined) as error:
                self._say(name, f"waits: {error}")
            except RatchetError as error:
                self._say(name, f"failed: {error}")

    def _say(self, subject: str, sentence: str) -> None:
        """Log what changed, once."""
        if self._said.get(subject) != sentence:
            self._said[subject] = sentence
            log.info("watch policy=%s subject=%s %s", self.policy, subject, sentence)

    # --- 1. the champion and its holdback

    def _judge_champion(self) -> None:
        pointer = self.ports.desk.pointer(self.policy)
        if pointer.release_id is None:
            return
        release, now = self.ports.desk.find(pointer.release_id), self.ports.clock()
        subject = self._era_subject(pointer, release)
        evidence = subject.evidence(release, now=now)
        decision = decide_champion(subject.config, evidence)
        self.ports.progress.report(self.policy, "holdback", evidence.units, evidence.units, decision.brief)
        if decision.action is CanaryAction.ABORT:
            self._take_back(release, decision, evidence)
        elif decision.cause is Cause.INCIDENT:
            self._raise_incident(release, pointer, decision, evidence)
        elif decision.action is CanaryAction.HOLD:
            if self.ports.desk.freeze(self.policy, AlarmKind.MONITORS, actor=ACTOR, reason=decision.reason, release_id=release.id):
                self._record_champion(release, decision, evidence)
            self._say("champion", decision.reason)
        else:
            self._bar_reference(pointer, decision)
        if decision.cause is not Cause.INCIDENT:
            self._end_incident(release, decision, evidence)

    def _record_champion(self, release: Release, decision: Decision, evidence: Evidence) -> None:
        """What raised an alarm, or ended it, for whoever wants to decide it again."""
        result = self._record.result(release, decision, evidence, GateName.HOLDBACK)
        self.ports.desk.record_live(release.id, result, action=decision.action, seen=release)

    def _take_back(self, release: Release, decision: Decision, evidence: Evidence) -> None:
        """Roll back to the version that was shown to be healthier, where one was; not where people are called already."""
        call = open_of(self.ports.desk.alarms(self.policy), AlarmKind.ROLLBACK_CAP)
        if call is not None and call.release_id == release.id:
            self._say("champion", f"people were called and have to decide: {decision.reason}")
            return
        result = self._record.result(release, decision, evidence, GateName.HOLDBACK)
        to = evidence.champion if evidence.champion != release.digest else None
        gone = self.ports.desk.roll_back(release.id, actor=ACTOR, reason=decision.reason, to=to, because=result, seen=release)
        if gone.state is S.CHAMPION:
            self._say("champion", f"people have to decide, too many rollbacks today: {decision.reason}")
            return
        log.warning("rolled_back policy=%s release=%s cause=%s reason=%s", self.policy, release.id, decision.cause, decision.reason)

    def _raise_incident(self, release: Release, pointer: Pointer, decision: Decision, evidence: Evidence) -> None:
        """Nothing moves; but where nobody is on another version, a tenth of the people ask the last good one whether it is healthier."""
        if self.ports.desk.raise_incident(self.policy, release_id=release.id, reason=decision.reason):
            log.warning("incident policy=%s release=%s reason=%s", self.policy, release.id, decision.reason)
            self._record_champion(release, decision, evidence)
        former = pointer.previous
        if pointer.holdback > 0.0 or former is None or former == pointer.digest:
            return
        if self.ports.evidence.engines_ready(self.policy, former, seen_since=self.ports.clock() - ENGINE_ALIVE):
            why = "an incident, and nobody is on another version: is the last good one healthier?"
            self.ports.desk.hold_back(self.policy, share=ASKING_SHARE, digest=None, reason=why, seen=pointer)

    def _end_incident(self, release: Release, decision: Decision, evidence: Evidence) -> None:
        """End an incident of limits when they are kept again, one of engines when they hold the champion again."""
        open_ = open_of(self.ports.desk.alarms(self.policy), AlarmKind.INCIDENT)
        if open_ is None:
            return
        if is_about_engines(open_.reason):
            over = self.ports.evidence.engines_ready(self.policy, release.digest, seen_since=self.ports.clock() - ENGINE_ALIVE)
            why = f"engines hold {release.version_name} again"
        else:
            over, why = decision.numbers["keeps_limits"], f"{release.version_name} keeps its limits again"
        if over and self.ports.desk.end_incident(self.policy, reason=why):
            log.info("incident_over policy=%s release=%s why=%s", self.policy, release.id, why)
            self._record_champion(release, decision, evidence)

    def _bar_reference(self, pointer: Pointer, decision: Decision) -> None:
        """The holdback's version exceeds an absolute limit and the champion is healthier: nobody stays on it."""
        if decision.numbers["reference_burnt"] and pointer.reference is not None:
            reference = pointer.reference
            former = [r for r in self.ports.releases.list(policy=self.policy, states=(S.SUPERSEDED,)) if r.digest == reference]
            for release in former[:1]:
                self.ports.desk.roll_back(release.id, actor=ACTOR, reason=decision.numbers["reference_burnt"][0], seen=release)

    def _era_subject(self, pointer: Pointer, release: Release) -> EraSubject:
        if self._era is None or self._era.era.generation != pointer.generation:
            era = next(era for era in self.ports.evidence.eras(self.policy) if era.generation == pointer.generation)
            config = frozen_config(release) if release.config.get("gates") else self.config
            self._era = EraSubject(release, era, config, self.ports.evidence)
        return self._era

    # --- 2. canaries and whatever waits

    def _judge(self, release: Release) -> None:
        subject = self._canaries.get(release.id)
        if subject is None:
            subject = self._canaries[release.id] = CanarySubject(release, self.ports.evidence)
        evidence = subject.evidence(release, now=self.ports.clock())
        decision = decide(subject.config, evidence)
        detail = {**decision.brief, "release": release.id, "stage": release.stage}
        self.ports.progress.report(self.policy, "canary", evidence.units, max(evidence.n_max.values(), default=0), detail)
        if decision.action is CanaryAction.ABORT:
            self._abort(release, decision, evidence)
        elif release.state is S.CANARY:
            self._move_canary(release, decision, evidence)
        else:
            self._doubt(release, decision, evidence)

    def _abort(self, release: Release, decision: Decision, evidence: Evidence) -> None:
        result, barred = self._record.result(release, decision, evidence, GateName.CANARY), decision.cause is not Cause.DATA
        self.ports.desk.abort(release.id, actor=ACTOR, reason=decision.reason, quarantine=barred, because=result, seen=release)
        log.warning("aborted policy=%s release=%s cause=%s reason=%s", self.policy, release.id, decision.cause, decision.reason)

    def _move_canary(self, release: Release, decision: Decision, evidence: Evidence) -> None:
        desk = self.ports.desk
        match decision.action:
            case CanaryAction.RAMP:
                result = self._record.result(release, decision, evidence, GateName.CANARY)
                desk.ramp(release.id, reason=decision.reason, because=result, seen=release)
            case CanaryAction.READY:
                desk.mark_ready(release.id, self._record.result(release, decision, evidence, GateName.CANARY), seen=release)
            case CanaryAction.INCONCLUSIVE:
                result = self._record.result(release, decision, evidence, GateName.CANARY)
                desk.stop(release.id, to=S.INCONCLUSIVE, reason=decision.reason, actor=ACTOR, because=result, seen=release)
            case _:
                self._record_change(release, decision, evidence)

    def _doubt(self, release: Release, decision: Decision, evidence: Evidence) -> None:
        """A release that waits for people: a doubt about its data takes approvals back, and its end asks for new ones."""
        last = self._record.said(release)
        if decision.action is CanaryAction.HOLD and last != said_by(decision):
            result = self._record.result(release, decision, evidence, GateName.CANARY)
            self.ports.desk.void(release.id, reason=decision.reason, because=result, seen=release)
        elif decision.action is CanaryAction.READY and last[:1] == (CanaryAction.HOLD,):
            self.ports.desk.rebind(release.id, self._record.result(release, decision, evidence, GateName.CANARY), seen=release)

    def _record_change(self, release: Release, decision: Decision, evidence: Evidence) -> None:
        """A decision that moves nothing is recorded when it says something else than before, and at the start of the canary."""
        if self._record.said(release) != said_by(decision):
            result = self._record.result(release, decision, evidence, GateName.CANARY)
            self.ports.desk.record_live(release.id, result, action=decision.action, seen=release)
        self._say(release.id, f"{decision.action} at stage {release.stage}: {decision.cause}")

    def _count_votes(self, release: Release) -> None:
        found = self.ports.desk.count_votes(release.id, seen=release)
        self.ports.progress.report(
            self.policy, "votes", len(found.numbers["said"]), release.config["people"]["votes"], {"reason": found.reason}
        )
        self._say(release.id, found.reason)

    # --- 3. and 4. people's answers

    def _advance(self, release: Release) -> None:
        desk, release = self.ports.desk, self.ports.desk.find(release.id)
        if release.state in (S.READY, S.APPROVED, S.PROMOTING) and self._is_late(release):
            desk.expire(release.id)
        elif release.state is S.READY and self._half_is_over(release) and desk.remind(release.id):
            log.info("reminded policy=%s release=%s", self.policy, release.id)
        elif release.state is S.APPROVED:
            release = desk.begin_promotion(release.id, seen=release)
        if release.state is S.PROMOTING and self._engine_holds(release):
            promoted = desk.promote(release.id)
            log.info("promoted policy=%s release=%s version=%s", self.policy, promoted.id, promoted.version_name)

    def _half_is_over(self, release: Release) -> bool:
        """Since it was READY or approved in part; the desk looks again, since its evidence was taken, and says it once."""
        if release.approval_expires_at is None or f"{release.id} {release.evidence_digest}" in self._reminded:
            return False
        over = self.ports.clock() >= release.changed_at + (release.approval_expires_at - release.changed_at) / 2
        if over:
            self._reminded.add(f"{release.id} {release.evidence_digest}")
        return over

    def _is_late(self, release: Release) -> bool:
        return release.approval_expires_at is not None and self.ports.clock() >= release.approval_expires_at

    # --- 5. the queue

    def _start_canary(self) -> None:
        queued = self.ports.releases.list(policy=self.policy, states=(S.QUEUED,))
        if not queued or self.ports.releases.list(policy=self.policy, states=(S.CANARY, S.JUDGING)):
            return
        release, desk, now = queued[0], self.ports.desk, self.ports.clock()
        failure = self.ports.evidence.engine_failure(self.policy, release.digest, seen_since=now - ENGINE_ALIVE)
        if failure is not None:
            desk.stop(release.id, to=S.ABORTED, reason=failure, actor=ACTOR, seen=release)
        elif not self._engine_holds(release):
            self._say(release.id, "waits for an engine to hold it")
        elif why := why_still(desk.alarms(self.policy), policy=self.policy, season_s=release.config.get("reentry_season_s", 0.0), now=now):
            self._say(release.id, f"waits: {why}")
        else:
            self._open_canary(release, now)

    def _open_canary(self, release: Release, now: datetime) -> None:
        champion = self.ports.desk.pointer(self.policy).digest
        plan = plan_canary(frozen_config(release), self.ports.evidence, policy=self.policy, champion=champion, now=now)
        if isinstance(plan, power.Refused) and release.config.get("people", {}).get("enabled"):
            asked = self.ports.desk.ask_people(release.id, because=plan.message, seen=release)
            log.info("people_asked policy=%s release=%s state=%s reason=%s", self.policy, release.id, asked.state, asked.reason)
            return
        if isinstance(plan, power.Refused):
            self.ports.desk.stop(release.id, to=S.REJECTED, reason=plan.message, actor=ACTOR, seen=release)
            log.warning("refused policy=%s release=%s %s", self.policy, release.id, plan.message)
            return
        self.ports.desk.start_canary(release.id, plan=msgspec.to_builtins(plan), stage=self._first_stage(release))
        log.info("canary_started policy=%s release=%s version=%s", self.policy, release.id, release.version_name)

    def _first_stage(self, release: Release) -> int:
        """The second stage where the off-policy estimate says that the candidate is no worse (a hint about speed, nothing more)."""
        hint = self.ports.desk.recorded(release.id).get(GateName.OFF_POLICY)
        return 1 if hint is not None and hint.evidence.get("hint") == "fast" and len(release.config["stages"]) > 1 else 0

    def _engine_holds(self, release: Release) -> bool:
        return self.ports.evidence.engines_ready(self.policy, release.digest, seen_since=self.ports.clock() - ENGINE_ALIVE)

    # --- 6. and 7. the holdback, the anchor and the long-term holdout

    def _keep_holdback(self) -> None:
        pointer = self.ports.desk.pointer(self.policy)
        over = self.ports.clock() - pointer.changed_at >= timedelta(seconds=self._holdback_s(pointer))
        if pointer.holdback > 0.0 and pointer.holdback_digest is None and over:
            kept = self.config.anchor_share if pointer.anchor != pointer.digest else 0.0
            why = "the slot after the promotion is over: the anchor keeps its share"
            self.ports.desk.hold_back(self.policy, share=kept, digest=pointer.anchor if kept else None, reason=why, seen=pointer)
        self._guard_anchor()

    def _holdback_s(self, pointer: Pointer) -> float:
        """How long the champion before keeps its share: long where no traffic judged the champion."""
        if pointer.release_id is None or pointer.holdback == 0.0:
            return self.config.holdback_s
        config = self.ports.desk.find(pointer.release_id).config
        return self.config.holdback_s if config.get("by_people") is None else float(config["people"]["holdback_s"])

    def _guard_anchor(self) -> None:
        if self._anchor is None:
            self._anchor = AnchorWatch(self.policy, self.config, self.ports.evidence)
        pointer = self.ports.desk.pointer(self.policy)
        alarm = self._anchor.ask(pointer, self.ports.desk.alarms(self.policy), now=self.ports.clock())
        if alarm is not None and pointer.release_id is not None and pointer.digest != pointer.anchor:
            log.warning("anchor_alarm policy=%s %s", self.policy, alarm)
            self.ports.desk.roll_back(pointer.release_id, actor=ACTOR, reason=alarm, to=pointer.anchor, alarm=AlarmKind.ANCHOR)
        elif self._anchor.gap():
            why = "two champions running earned more reward than the anchor and were not better at what it stands for"
            self.ports.desk.freeze(self.policy, AlarmKind.GAP, actor=ACTOR, reason=why, release_id=pointer.release_id)
            self._say("anchor", why)

    def _keep_holdout(self) -> None:
        p = self.ports
        self._holdout = self._holdout or HoldoutKeeper(self.policy, self.config, p.holdouts, p.evidence, p.desk, p.clock)
        self._holdout.tick()


def run_watch(
    watches: Iterable[Watch],
    stop: threading.Event,
    *,
    interval_s: float,
    stopping: Callable[[], bool] | None = None,
    looked: Callable[[str, float], None] = lambda policy, seconds: None,
) -> None:
    """Tick every policy until `stop` is set. A database that is gone ends this, and whoever called begins it again; nothing is lost.

    `stopping` is asked once a round (`stop.is_set` where nobody counts them); `looked` hears how long each policy's look took.
    """
    watches, stopping = list(watches), stopping or stop.is_set
    while not stopping():
        for watch in watches:
            began = time.monotonic()
            watch.tick()
            looked(watch.policy, time.monotonic() - began)
        stop.wait(interval_s)
