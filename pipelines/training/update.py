"""The work of one run, step by step; see `pipelines.training.run` for the picture."""

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from app.domain.learning.batches import BatchManifest
from app.domain.learning.training import AdamParams, Datum, ForwardBackward, LossSpec
from app.domain.ports import Trainer
from app.domain.release.versions import Version
from app.policy.chat import Chat
from pipelines.training import guards
from pipelines.training.checkpoint import Restored
from pipelines.training.config import TrainingConfig
from pipelines.training.estimators import Estimator
from pipelines.training.estimators.choice import estimator_of
from pipelines.training.guards import Estimate, estimate, ratio_report
from pipelines.training.hindsight.lessons import Lessons, read_lessons, score_lessons
from pipelines.training.hindsight.objective import Hindsight
from pipelines.training.judgement import RETREATS, JudgedTurn, Judgement, compare, wish_for_renewal
from pipelines.training.measurement import (
    batch_metrics,
    beside_sampler,
    ratio_histogram,
    step_metrics,
    steps_summary,
    terms_from_sampler,
    turn_metrics,
)
from pipelines.training.numerics.advantage import above_expectation, advantages, penalty, to_go
from pipelines.training.numerics.nucleus import with_masses, work_out_masses
from pipelines.training.plan import Step, by_index, by_name, cut_micro_batches, plan_steps
from pipelines.training.ports import TrainingPorts
from pipelines.training.progress import Progress, UpdateResult
from pipelines.training.publication import publish
from pipelines.training.samples import Sample, limits_of, read_samples
from pipelines.training.states import RUNS, Inherited, shape_of
from pipelines.training.stopwatch import Laps, Stopwatch
from pipelines.training.trainer import TrainerSetup

log = logging.getLogger(__name__)

LONG_ROW = 4
"""From how many micro-batches' tokens on a row, which is a turn that goes alone, is computed layer by layer."""
Scored = dict[int, tuple[Sequence[float], Sequence[float]]]
"""Log-probabilities and entropies [T] by index of the turn."""


class Update:
    """One attempt. `metrics` can be read at any time; a held run keeps what was known when it was held."""

    def __init__(
        self, *, batch: BatchManifest, run_id: str, parent: Version, anchor: Version, config: TrainingConfig, ports: TrainingPorts
    ) -> None:
        self.batch, self.parent, self.anchor, self.config, self.ports = batch, parent, anchor, config, ports
        self.folder = ports.folder / RUNS / run_id
        self.parent_folder = ports.weights.path(parent.digest)
        self.metrics: dict[str, Any] = {}
        self.progress = Progress()
        self.samples: list[Sample] = []
        self.baselines: list[float] = []
        self.hindsight = Hindsight(config.hindsight, Lessons(), ())
        self.done, self.total = 0, 1
        self.computing = Stopwatch()
        self.restored: Restored = ports.states.newest_checkpoint(run_id)
        self.before = Estimate(mean=0.0, error=0.0)
        """KL(champion ‖ anchor)."""
        self.moved = 0.0
        """By how much its own update moved the champion away from this anchor, as that measured it."""
        self.beta = config.kl_beta
        self.drifts: list[list[float] | None] = []
        """Each turn's drift from the anchor to its end, above expectation, per token."""

    def make(self) -> UpdateResult:
        """Read, learn, judge, publish. Raises `Held` and `Unavailable`."""
        laps = Laps()
        self.metrics["parts_s"] = laps.seconds
        self.inherited = self._begun()
        estimator = self._read()
        laps.end("read")
        steps = self._plan()
        setup = self._setup()
        with self.ports.trainers.opened(setup, workers=self.config.workers, timeout_s=self.config.attempt_timeout_s) as trainer:
            laps.end("open")
            self._prepare(trainer, steps)
            laps.end("prepare")
            self._steer()
            self.progress.dtype = self.metrics["dtype"] = trainer.precision()
            saved_at = time.monotonic()
            for number in range(self.progress.next_step, len(steps)):
                if steps[number].turns and not self._step(trainer, steps[number], number):
                    break
                if time.monotonic() - saved_at >= self.config.checkpoint_every_s and number + 1 < len(steps):
                    self.ports.states.write_checkpoint(self.folder.name, trainer, vars(self.progress), step=number + 1)
                    saved_at = time.monotonic()
            laps.end("steps")
            judged = self._judge(trainer, steps[0])
            laps.end("judge")
            candidate = self._publish(trainer)
            laps.end("publish")
        state = estimator.remember([sample.rewarded() for sample in self.samples], drift=judged.drift)
        state["moved"] = {"anchor": self.anchor.digest, "kl": judged.anchor.mean - judged.anchor_before.mean}
        return UpdateResult(candidate=candidate, metrics=self.metrics, tracker=state)

    # --- before the first step ------------------------------------------------------------------------------------------------

    def _begun(self) -> Inherited:
        """What the parent left; for a resumed update what it began from. Where that is gone it begins again, from what there is."""
        now = self.ports.states.inherited(self.parent, shape=shape_of(self.config))
        began = (self.restored.progress or {}).get("began")
        known = now.since(began) if began else now
        if known is None:
            log.warning("training run=%s begins again: the state it had begun from is %s", self.folder.name, now.kind.value)
            self.ports.states.end_run(self.folder.name)
            self.restored = replace(self.restored, folder=None, progress=None)
        self.progress.began = (known or now).for_a_checkpoint()
        return known or now

    def _read(self) -> Estimator:
        """Turns, baselines and the metrics that need no model."""
        there = self.ports.weights.exists
        limits = limits_of(self.parent_folder, max_tokens=self.config.max_tokens)
        self.samples, left_out = read_samples(self.batch, self.ports.trajectories, limits, has_weights=there)
        self.metrics |= {"left_out": left_out, **batch_metrics(self.batch)}
        guards.check_turns(len(self.samples), self.config.guards)
        memory = self.ports.runs.tracker(self.parent.digest)
        estimator = estimator_of(self.batch, self.config, memory)
        if memory is not None and memory.get("moved", {}).get("anchor") == self.anchor.digest:
            self.moved = memory["moved"]["kl"]
        turns = [sample.rewarded() for sample in self.samples]
        self.baselines = estimator.baselines(turns)
        self.metrics |= turn_metrics(self.samples, self.baselines)
        self.metrics["terms"] = self.ports.runs.term_means(self.batch.id)
        self.metrics["labels_used_share"] = self.ports.runs.labels_used_share(self.batch.id)
        self.metrics["term_shares"] = self.ports.runs.term_shares(self.batch.id)
        self._read_corrections()
        if self.hindsight.is_silent:
            guards.check_rewards([turn.reward - baseline for turn, baseline in zip(turns, self.baselines, strict=True)])
        return estimator

    def _plan(self) -> tuple[Step, ...]:
        """The killed attempt's plan where there is one: planned anew, whoever was erased since would move all others."""
        if self.restored.progress is not None and self.restored.progress.get("plan"):
            return by_index(self.restored.progress["plan"], self.samples)
        steps = plan_steps(
            self.samples, turns_per_step=self.config.turns_per_step, seed=self.config.seed + self.batch.slot,
            micro_batch_tokens=self.config.micro_batch_tokens * self.config.workers,
        )  # fmt: skip
        self.progress.plan = by_name(steps, self.samples)
        return steps

    def _read_corrections(self) -> None:
        """What people showed these turns should have been; a resumed run goes on with what it had read."""
        config, known = self.config.hindsight, self.restored.progress
        if config.objective == "none":
            return
        if known is not None:
            self.hindsight = Hindsight(config, Lessons(**known["lessons"]), self.samples)
            self.metrics["corrections"] = known["corrections"]
            return
        shown = self.ports.corrections(self.batch)
        if not shown:
            return
        chat, most = Chat.load(self.parent_folder), limits_of(self.parent_folder, max_tokens=self.config.max_tokens).max_tokens
        lessons, left_out = read_lessons(shown, self.samples, config=config, chat=chat, max_tokens=most)
        self.hindsight = Hindsight(config, lessons, self.samples)
        authors = {correction.inference_id: correction.author or "" for correction in shown}
        self.progress.corrections = self.metrics["corrections"] = self.hindsight.metrics(left_out, authors)

    def _setup(self) -> TrainerSetup:
        config = self.config
        base = self.ports.weights.path(self.inherited.base) if self.inherited.base else self.parent_folder
        begun = str((self.restored.progress or {}).get("dtype", ""))
        return TrainerSetup(
            snapshot=self.parent_folder, base=base, scratch=self.folder, dtype=begun or config.dtype, threads=config.threads,
            lora=config.lora, activations=config.activations, share_prefixes=config.share_prefixes, router_replay=config.router_replay,
            communication=config.communication, offload=config.offload, most_tokens_kept=LONG_ROW * config.micro_batch_tokens,
        )  # fmt: skip

    def _prepare(self, trainer: Trainer, steps: Sequence[Step]) -> None:
        """Resume from the newest whole checkpoint; or score everything under the anchor and start from the parent."""
        restored = self.restored
        self._tell_inheritance()
        self.total = sum(len(step.micro_batches) for step in steps)
        if restored.folder is not None and restored.progress is not None:
            self.progress = Progress(**restored.progress)
            self.done = sum(len(step.micro_batches) for step in steps[: self.progress.next_step])
            self.metrics["resumed_from_step"] = self.progress.next_step
            self.samples = with_masses(self.samples, self.progress.kept)
            trainer.load_state_with_optimizer(restored.folder)
            return
        most = self.config.micro_batch_tokens * self.config.workers
        with self.computing.running():
            self.progress.kept = work_out_masses(trainer, self.samples, path_of=self.ports.weights.path, micro_batch_tokens=most)
        self.samples = with_masses(self.samples, self.progress.kept)
        self.metrics["masses_worked_out"] = len(self.progress.kept)
        if self.anchor.digest != self.parent.digest:
            # With a penalty every token needs its log π_ref; without one only the turns on which the KL budget is checked do.
            everything = [micro for step in steps for micro in step.micro_batches]
            self._score_anchor(trainer, everything if self.config.kl_beta > 0 else self._judged(steps[0]))
        self._start_from_parent(trainer)
        with self.computing.running():
            score_lessons(trainer, self.hindsight.lessons, self.samples, most=most)
        self.progress.lessons = self.hindsight.state()
        if not self.hindsight.is_silent:
            self.metrics["corrections"]["teacher_gap"] = self.hindsight.teacher_gap()

    def _score_anchor(self, trainer: Trainer, micro_batches: Sequence[tuple[int, ...]]) -> None:
        trainer.load_state(self.ports.weights.path(self.anchor.digest))
        self.total += len(micro_batches)
        for micro in micro_batches:
            with self.computing.running():
                found = trainer.forward([self._datum(index, advantage=()) for index in micro])
            for index, logprobs in zip(micro, found.logprobs, strict=True):
                self.progress.anchor[self.samples[index].item.inference_id] = list(logprobs)
            self._tell("anchor", found)

    def _judged(self, first: Step) -> tuple[tuple[int, ...], ...]:
        """The turns on which the finished candidate is compared: of the first step, because the parent itself scored those."""
        scores = [known for known in (self.progress.start, self.progress.anchor) if known]
        scored = [index for index in first.turns if all(self.samples[index].item.inference_id in known for known in scores)]
        by_age = sorted(scored, key=lambda index: (self.samples[index].item.version != self.batch.champion, index))
        chosen = sorted(by_age[: self.config.final_pass_turns or None])  # the champion's own turns first: it is compared on what it says
        return cut_micro_batches(self.samples, chosen, self.config.micro_batch_tokens * self.config.workers)

    def _steer(self) -> None:
        """How far the champion is from the anchor, over every turn that was scored under it, and so how much more the anchor pulls."""
        scored = [(sample.logprobs, self.progress.anchor.get(sample.item.inference_id)) for sample in self.samples]
        drifts = [to_go(old, far) if far is not None else None for old, far in scored]
        self.drifts = above_expectation(drifts, [sample.item.episode_id for sample in self.samples])
        away = [[old - far for old, far in zip(old, far, strict=True)] for old, far in scored if far is not None]
        if away:
            self.before = estimate(away)
        config = self.config
        target = config.kl_target * config.guards.max_kl_anchor
        coming = self.before.mean + config.kl_look_ahead * self.moved
        self.beta = penalty(coming, target=target, least=config.kl_beta, most=config.kl_beta_max)
        self.metrics |= {"kl_beta": self.beta, "kl_anchor_coming": coming}

    def _start_from_parent(self, trainer: Trainer) -> None:
        """With the parent's masters and optimizer state, where they are whole and of the same kind of training."""
        trainer.load_state(self.parent_folder)
        if self.inherited.start is not None:
            trainer.load_state_with_optimizer(self.inherited.start)

    def _tell_inheritance(self) -> None:
        found = self.inherited
        self.metrics["optimizer"] = found.kind.value
        self.metrics["damaged_checkpoints"] = [*self.restored.damaged, *found.damaged]
        if found.loss is not None:
            log.warning("lineage run=%s policy=%s state=%s: %s", self.folder.name, self.batch.policy, found.kind.value, found.loss)
            self.metrics["alarms"] = [found.loss]

    # --- the steps ------------------------------------------------------------------------------------------------------------------

    def _step(self, trainer: Trainer, step: Step, number: int) -> bool:
        """Accumulate the gradient over the step's micro-batches, look at the ratios, then let Adam act; False where the steps before it
        have already left the budget, as these turns, which they did not see, show."""
        spec = LossSpec(
            normaliser=len(step.turns) * self.config.loss_tokens, correction=self.config.correction.name,
            clip_low=self.config.correction.low, clip_high=self.config.correction.high,
            delta=self.config.correction.delta, teacher_clip=self.config.hindsight.clip,
        )  # fmt: skip
        found: Scored = {}
        loss = 0.0
        for micro in step.micro_batches:
            more = self.config.sum_gradients == "last" and micro is not step.micro_batches[-1]
            with self.computing.running():
                answer = trainer.forward_backward([self._datum(index) for index in micro], replace(spec, more_follows=more))
            loss += answer.loss
            guards.check_finite("loss", answer.loss)
            found |= dict(zip(micro, zip(answer.logprobs, answer.entropy, strict=True), strict=True))
            self._tell("update", answer)
        new, old = beside_sampler(found, self.samples)
        report = ratio_report(new, old)
        if number == 0:
            self.progress.histogram = ratio_histogram(new, old)
            self.progress.start = {self.samples[i].item.inference_id: [list(a), list(b)] for i, (a, b) in found.items()}
            self._check_mismatch(found)
            guards.check_ratio(report, self.config.guards)
        elif not self._inside(trainer, found):
            self.metrics["stopped_at_step"] = number
            return False
        with self.computing.running():
            loss += self.hindsight.learn_pairs(trainer, step.turns, spec.normaliser)
            outcome = trainer.optim_step(self._adam())
        guards.check_finite("gradient's norm", outcome.grad_norm)
        entropy = [value for _, entropies in found.values() for value in entropies]
        self.progress.steps.append(step_metrics(report, loss=loss, grad_norm=outcome.grad_norm, entropy=entropy))
        self.progress.next_step = number + 1
        self.metrics["steps"] = self.progress.steps
        return True

    def _inside(self, trainer: Trainer, found: Scored) -> bool:
        """Whether the steps so far are within budget and ratio bounds on the champion's own turns here, which they did not see. Out of the
        bounds, the weights go back towards the parent as far as that takes. One turn shows no spread: the finished candidate does."""
        own = self._own(found)
        if len(own) < 2:
            return True
        kept = guards.share_within(ratio_report(*beside_sampler(own, self.samples)), self.config.guards)
        if kept < 1:
            trainer.retreat(kept, self.inherited.start or self.parent_folder)
            self.metrics["kept"] = kept
        terms = [terms_from_sampler(self.samples[index].logprobs, logprobs) for index, (logprobs, _) in own.items()]
        return kept == 1 and estimate(terms).upper <= self.config.guards.max_kl_champion

    def _own(self, found: Scored) -> Scored:
        """What the champion itself sampled: older versions' turns were away from it before the first step, which is no movement of ours."""
        return {index: rows for index, rows in found.items() if self.samples[index].item.version == self.batch.champion}

    def _check_mismatch(self, found: Scored) -> None:
        """On what the champion itself sampled; turns of older versions differ because the weights do, and the ratio guards judge them."""
        own = self._own(found)
        if not own:
            return
        report = ratio_report(*beside_sampler(own, self.samples))
        self.metrics |= {"mismatch": report.kl, "mismatch_p99": report.p99_gap}
        rounded = Counter(precision for index in own if (precision := self.samples[index].payload.precision))
        guards.check_mismatch(report, self.config.guards, rounded=rounded)

    def _adam(self) -> AdamParams:
        config = self.config
        rate = config.lora.learning_rate if config.lora else config.learning_rate
        return AdamParams(
            learning_rate=rate, beta1=config.beta1, beta2=config.beta2, eps=config.eps,
            weight_decay=config.weight_decay, max_grad_norm=config.max_grad_norm,
        )  # fmt: skip

    def _datum(self, index: int, *, advantage: tuple[float, ...] | None = None) -> Datum:
        """One turn; without an advantage given it is learned from: from its reward, and from its teacher where it has one."""
        sample = self.samples[index]
        if advantage is None:
            scale = 1.0 if self.hindsight.is_silent else self.config.hindsight.scalar_weight
            learned = advantages(
                reward=scale * sample.item.reward, baseline=scale * self.baselines[index], count=len(sample.logprobs), beta=self.beta,
                drift=self.drifts[index],
            )  # fmt: skip
            return self.hindsight.taught(self._datum(index, advantage=learned), sample.item.inference_id)
        payload = sample.payload
        return Datum(
            tokens=sample.tokens, first_scored=len(payload.prompt_tokens), logprobs=sample.logprobs, advantages=advantage,
            temperature=payload.temperature, kept_log_mass=payload.kept_log_mass or (), shape=payload.shape,
            routes=payload.routed_experts if self.config.router_replay.enabled else None,
        )  # fmt: skip

    def _tell(self, what: str, found: ForwardBackward) -> None:
        self.done += 1
        detail = {"phase": what, "loss": found.loss, "tokens": found.tokens, "run": self.folder.name}
        self.ports.progress.report(self.batch.policy, "training", self.done, self.total, detail)

    # --- after the last step ----------------------------------------------------------------------------------------------------------

    def _judge(self, trainer: Trainer, first: Step) -> Judgement:
        """Compare the finished candidate with champion and anchor on turns of the first step; outside a budget, go back."""
        found = {"ratio_histogram": self.progress.histogram, "compute_s": round(self.computing.seconds, 3)}
        self.metrics |= {"kept": 1.0} | self.metrics | found | steps_summary(self.progress.steps)
        judged = self._compare(trainer, first)
        for _ in range(RETREATS):
            kept = judged.kept(self.config.guards)
            if kept is None:
                break
            trainer.retreat(kept, self.inherited.start or self.parent_folder)
            self.metrics["kept"] *= kept
            judged = self._compare(trainer, first)
        judged.check(self.config.guards)
        wish = wish_for_renewal(judged, self.config, beta=self.beta, policy=self.batch.policy)
        if wish is not None:
            log.warning("anchor_budget run=%s policy=%s: %s", self.folder.name, self.batch.policy, wish)
            self.metrics["alarms"] = [*self.metrics.get("alarms", []), wish]
        return judged

    def _compare(self, trainer: Trainer, first: Step) -> Judgement:
        turns: list[JudgedTurn] = []
        for micro in self._judged(first):
            with self.computing.running():
                answer = trainer.forward([self._datum(index, advantage=()) for index in micro])
            for index, logprobs, entropies in zip(micro, answer.logprobs, answer.entropy, strict=True):
                identity = self.samples[index].item.inference_id
                before, entropy = self.progress.start[identity]
                anchor = self.progress.anchor.get(identity, before)
                turns.append(
                    JudgedTurn(champion=before, anchor=anchor, candidate=logprobs, entropy_before=entropy, entropy_after=entropies)
                )
        guards.check_compared(len(turns))
        judged = compare(turns, before=self.before)
        self.metrics |= judged.metrics(self.config.guards)
        return judged

    def _publish(self, trainer: Trainer) -> str:
        """Hand the snapshot to the store; keep the optimizer under the candidate's digest."""
        digest = publish(trainer, self.folder / "candidate", parent=self.parent, like=self.parent_folder, weights=self.ports.weights)
        base = None if self.config.lora is None else self.inherited.base or self.parent.digest
        self.metrics["optimizer_uri"] = self.ports.states.keep(
            trainer, policy=self.batch.policy, digest=digest, shape=shape_of(self.config), base=base
        )
        return digest
