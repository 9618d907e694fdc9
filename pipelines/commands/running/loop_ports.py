"""The world of the loop process: every port of a cycle, and what keeps a slot from starting."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from app import wiring
from app.domain.ids import utc_now
from app.domain.learning.batches import BatchManifest
from app.domain.learning.corrections import Correction
from app.domain.policies import PolicyConfig
from app.domain.ports import Engines
from app.domain.release.gates import GateName, GateResult
from app.domain.release.releases import Release, ReleaseState
from app.domain.release.versions import VersionKind
from app.settings import Settings, owner_of
from app.telemetry.traces import NOWHERE, Traces
from pipelines.chain import AHEAD, ahead_of
from pipelines.config import LoopConfig
from pipelines.cycle import LOOP, PRETRAINER, Case, CyclePorts, Judge
from pipelines.evaluation.config import terms_of
from pipelines.evaluation.health import judge_health
from pipelines.evaluation.licence import judge_licence
from pipelines.evaluation.off_policy_gate import OffPolicyGate
from pipelines.evaluation.pretraining_health import judge_pretraining
from pipelines.evaluation.suites.execution import Examination
from pipelines.evaluation.suites.judge_model import open_judge
from pipelines.evaluation.suites.offline import OfflineGate
from pipelines.evaluation.suites.offline_config import OfflineConfig
from pipelines.evaluation.suites.rehearsal import Rehearsal
from pipelines.evaluation.suites.suites import load_suite
from pipelines.labelling.corrections import correction_of
from pipelines.labelling.follow_up.agreement import open_reader
from pipelines.labelling.rule_set import parse_rule_set, starting_toml
from pipelines.projection import Releases
from pipelines.training import TrainingPorts
from pipelines.training.elsewhere.states import open_states
from pipelines.training.elsewhere.storage import Storage
from pipelines.training.ray_actors import RayTrainers

MOVING = frozenset(
    {ReleaseState.TRAINED, ReleaseState.OFFLINE, ReleaseState.QUEUED, ReleaseState.CANARY, ReleaseState.APPROVED, ReleaseState.PROMOTING}
)
"""Releases that end by themselves. One that waits for people (READY, JUDGING) does not keep the loop from training."""


@dataclass(frozen=True, kw_only=True)
class LoopWorld:
    """What the loop process needs."""

    ports: CyclePorts
    close_orphans: Callable[[str], None]
    blocked: Callable[[str], str | None]
    thin: Callable[[str], str | None]
    warm: Callable[[], None]
    """Starts the training workers, which takes seconds that the first slot need not wait for."""


def loop_world(settings: Settings, config: LoopConfig, policies: dict[str, PolicyConfig], *, traces: Traces = NOWHERE) -> LoopWorld:
    """Plug the loop together."""
    ledger = wiring.release_ledger(settings)
    weights = wiring.open_weights(settings)
    progress = wiring.progress_log(settings)
    trainers = RayTrainers(wiring.ray_token(settings), Storage.of(weights=settings.weights, states=settings.states))
    training = TrainingPorts(
        trajectories=wiring.trajectories(settings), weights=weights, runs=wiring.run_store(settings), progress=progress,
        folder=settings.data / "training", trainers=trainers, states_elsewhere=open_states(settings.states),
        corrections=lambda batch: corrections_of(settings, config, policies, batch),
        pinned=partial(wiring.needed_weights(settings).states, rollbacks=config.gates.rollbacks_max),
    )  # fmt: skip
    batches, rehearsal = wiring.batch_store(settings), Rehearsal()

    def rehearse(champion: str, batch: BatchManifest) -> None:
        offline_gate(settings, config.offline, rehearsal=rehearsal).rehearse(policy=batch.policy, champion=champion, batch=batch.id)

    ports = CyclePorts(
        cycles=wiring.cycle_book(settings), batches=batches, versions=wiring.version_book(settings), weights=weights,
        releases=wiring.release_desk(settings, terms=terms_of(config.gates, owner=owner_of(settings.config)), traces=traces),
        registry=wiring.registry(settings), training=training,
        progress=progress, judges=judges_of(settings, config, policies, rehearsal=rehearsal), rehearse=rehearse,
        pretrained=lambda policy: pretrained_release(ledger, policy),
        clock=wiring.clock(settings), code=wiring.code_version(), ahead=lambda policy: ahead(policy)[0],
        traces=traces, traced=lambda turns: wiring.traced_turns(settings, turns) if traces.on else (),
    )  # fmt: skip
    known, chain = ports.versions, config.schedule.chain

    def ahead(policy: str) -> tuple[str | None, int]:
        """The candidate to continue from, and how many updates it is ahead of the champion."""
        if not chain:
            return None, 0
        judged = ledger.list(policy=policy, states=AHEAD)
        return ahead_of(ledger.pointer(policy).digest, judged, lambda digest: known.find(policy, digest).parent, chain=chain)

    def close_orphans(policy: str) -> None:
        for release in ledger.list(policy=policy, states={ReleaseState.TRAINED, ReleaseState.OFFLINE}):
            if release.initiator == LOOP:
                reason = "its cycle ended before every offline gate had answered"
                ports.releases.stop(release.id, to=ReleaseState.ABORTED, reason=reason)

    blocking = MOVING | {ReleaseState.READY, ReleaseState.JUDGING} if config.schedule.ready_blocks else MOVING

    def blocked(policy: str) -> str | None:
        waiting = pretrained_release(ledger, policy)
        moving = [release for release in ledger.list(policy=policy, states=blocking) if waiting is None or release.id != waiting.id]
        if chain and all(release.state in AHEAD for release in moving):
            depth = ahead(policy)[1]
            return f"{depth} updates are ahead of the champion already (chain = {chain})" if depth > chain else None
        return f"release {moving[0].version_name} is in {moving[0].state}" if moving else None

    count = wiring.trainable_labels(settings)

    def thin(policy: str) -> str | None:
        eligible = count(policy)
        enough = eligible >= config.batching.min_turns or pretrained_release(ledger, policy) is not None
        return None if enough else f"{eligible} of {config.batching.min_turns} labels"

    def warm() -> None:
        how = config.training
        trainers.warm(workers=how.workers, threads=how.threads, timeout_s=how.attempt_timeout_s)

    return LoopWorld(ports=ports, close_orphans=close_orphans, blocked=blocked, thin=thin, warm=warm)


def corrections_of(settings: Settings, config: LoopConfig, policies: dict[str, PolicyConfig], batch: BatchManifest) -> list[Correction]:
    """What people showed the batch's turns should have been, by the rule set that is active."""
    toml = wiring.rule_book(settings, starting_toml(config.labelling.rule_set, config=settings.config)).active(batch.policy)
    read = open_reader(config.labelling)
    rule_set = parse_rule_set(toml, read=read, signals=policies[batch.policy].signals, allowed=config.labelling.allowed_terms)
    before = batch.window_to - timedelta(days=config.batching.newcomer_days)
    shown = wiring.reactions(settings, [item.inference_id for item in batch.items], before=before)
    return [found for reaction in shown if (found := correction_of(reaction, rule_set)) is not None]


def pretrained_release(ledger: Releases, policy: str) -> Release | None:
    """The oldest release that `ratchet pretrain` opened and no slot has brought through the offline gates yet."""
    waiting = ledger.list(policy=policy, states={ReleaseState.TRAINED, ReleaseState.OFFLINE})
    return next((release for release in reversed(waiting) if release.initiator == PRETRAINER), None)


@asynccontextmanager
async def connected(settings: Settings) -> AsyncGenerator[Engines]:
    """The engines, for the length of one event loop."""
    async with wiring.open_engines(settings) as engines:
        yield engines


WEEK_S = 604_800


def offline_gate(
    settings: Settings, config: OfflineConfig, *, sealed: bool = False, rehearsal: Rehearsal | None = None
) -> OfflineGate:  # fmt: skip
    """This week's open tasks of the configured suites over the engines, or their sealed split; paths are relative to the configuration."""
    folder = settings.config.parent if settings.config else settings.data
    week, chosen = int(utc_now().timestamp()) // WEEK_S, [s for s in config.suites if s.sealed_share > 0.0 or not sealed]
    return OfflineGate(
        config=config, suites=tuple(load_suite(suite, folder=folder, week=week, sealed=sealed) for suite in chosen),
        connect=lambda: connected(settings), scores=wiring.score_book(settings), progress=wiring.progress_log(settings),
        judge=open_judge(config), examination=examination(config), clock=utc_now, gate=GateName.SEALED if sealed else GateName.OFFLINE,
        pairs=wiring.pair_book(settings), rehearsal=rehearsal,
    )  # fmt: skip


def examination(config: OfflineConfig) -> Examination:
    """How answers are executed and graded."""
    return Examination.from_config(config, wiring.boxes(trusted=config.allow_weak_isolation))


def judges_of(
    settings: Settings, config: LoopConfig, policies: dict[str, PolicyConfig], *, rehearsal: Rehearsal | None = None
) -> dict[GateName, Judge]:  # fmt: skip
    """Every offline gate of a cycle, in the order in which they are asked."""
    offline_gate(settings, config.offline)  # a suite that cannot be read is refused now, not in five hours
    history = wiring.run_history(settings)
    off_policy = OffPolicyGate(
        config=config.gates, connect=lambda: connected(settings), turns=wiring.rewarded_turns(settings),
        trajectories=wiring.trajectories(settings), clock=utc_now,
    )  # fmt: skip

    def ask_health(case: Case) -> GateResult:
        if case.candidate.kind is VersionKind.PRETRAIN:
            return judge_pretraining(case.run, config=config.gates, now=utc_now())
        line = history(case.champion.policy, case.champion.digest)
        return judge_health(case.run, config=config.gates, now=utc_now(), history=line)

    def ask_offline(case: Case) -> GateResult:
        offline, policy = offline_gate(settings, config.offline, rehearsal=rehearsal), case.candidate.policy
        learned = wiring.learned_answers(settings, policy, batch=case.run.batch_id)
        return offline.decide(
            policy=policy, candidate=case.candidate.digest, champion=case.champion.digest, learned=learned, release=case.release.id,
            batch=case.run.batch_id,
        )  # fmt: skip

    def ask_off_policy(case: Case) -> GateResult:
        return off_policy.decide(policy=case.candidate.policy, candidate=case.candidate.digest, champion=case.champion.digest)

    def ask_licence(case: Case) -> GateResult:
        return judge_licence(case.candidate, policies[case.candidate.policy].deployment, now=utc_now())

    return {
        GateName.TRAINING_HEALTH: ask_health, GateName.OFFLINE: ask_offline, GateName.OFF_POLICY: ask_off_policy,
        GateName.LICENCE: ask_licence,
    }  # fmt: skip
