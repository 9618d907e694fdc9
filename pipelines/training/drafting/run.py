"""One training of a draft head, from the answers to the record beside the version."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

import torch

from app.domain.ids import utc_now
from app.domain.ports import Beside, ProgressLog, WeightStore
from app.policy.decoding.draft_head import DraftHead, HeadDrafter, head_of
from app.policy.decoding.payoff import LONGEST
from app.policy.experts import routers
from app.policy.model import Policy, load_policy
from app.policy.storage.heads import HeadRecord, write_head
from pipelines.training.drafting.answers import LoggedAnswer, frequent, read, split, uniforms_of, usable
from pipelines.training.drafting.config import DraftingConfig
from pipelines.training.drafting.costs import costs_of
from pipelines.training.drafting.distil import distil, lessons_of
from pipelines.training.drafting.gate import Verdict, judge

log = logging.getLogger(__name__)
TASK = "drafting"
READING = 1 / 3
"""Share of the seconds that reading may take."""
TELL_EVERY_S = 2.0


class HeadWeights(WeightStore, Beside, Protocol):
    """Where versions lie, and heads beside them."""


@dataclass(frozen=True, kw_only=True)
class Made:
    """A head, kept or not."""

    head: DraftHead
    verdict: Verdict
    figures: dict[str, Any]


def draft(
    answers: Sequence[LoggedAnswer], *, policy: str, digest: str, weights: HeadWeights, progress: ProgressLog, config: DraftingConfig,
    costs: Mapping[int, float] | None = None, clock: Callable[[], datetime] = utc_now,
) -> HeadRecord:  # fmt: skip
    """Train a head for a version on its own answers (the newest first), judge it, and put head and record beside the version.

    A head that does not pass is not kept, nor one that was there before, and the record says why. `costs` replaces the measurement.
    """
    target = load_policy(weights.path(digest), digest=digest)
    kept = usable(answers, target, tokens=config.tokens)
    if (unfit := _unfit(target, kept, config)) is not None:
        record = HeadRecord(trained_for=digest, kept=False, reason=unfit, made_at=clock(), figures={"answers": len(kept)})
        return _write(weights, record, None)
    made = make_head(kept, target, policy=policy, progress=progress, config=config, costs=costs)
    verdict = made.verdict
    record = HeadRecord(trained_for=digest, kept=verdict.passes, reason=verdict.reason, made_at=clock(), figures=made.figures)
    return _write(weights, record, made.head if verdict.passes else None)


def make_head(
    answers: Sequence[LoggedAnswer], target: Policy, *, policy: str, progress: ProgressLog, config: DraftingConfig,
    costs: Mapping[int, float] | None = None,
) -> Made:  # fmt: skip
    """Read, distil and judge. Raises `BadInput` where there is nothing to learn from."""
    room = Room(policy=policy, progress=progress, seconds=config.seconds, steps=config.steps)
    learnt, judged = split(answers, held_out=config.held_out)
    known = read(target, _alternating(learnt, judged), go_on=room.reading(len(answers)))
    held = {answer.unit for answer in judged}
    lessons = lessons_of([answer for answer in known if answer.unit not in held])
    vocabulary, cover = frequent(learnt, most=config.vocabulary)
    trained, losses = distil(target, lessons, vocabulary, config, left=room.left)
    head = head_of(trained.tensors())  # as it will be stored: that is what is judged, and what its drafts cost
    took_s = room.elapsed
    drafter = HeadDrafter(head, target)
    costs = costs or costs_of(target, drafter, answers[0].prompt, longest=LONGEST)
    unseen, random = [answer for answer in known if answer.unit in held], torch.Generator().manual_seed(config.seed)
    verdict = judge(drafter, unseen, [uniforms_of(target, answer, random) for answer in unseen], costs, config)
    figures: dict[str, Any] = {
        **verdict.figures, "answers": len(known), "tokens": len(lessons.tokens_T), "vocabulary": len(vocabulary),
        "covered": round(cover, 4), "steps": len(losses), "loss": round(losses[-1], 4), "seconds": round(took_s, 1), "seed": config.seed,
    }  # fmt: skip
    return Made(head=head, verdict=verdict, figures=figures)


def _unfit(target: Policy, answers: Sequence[LoggedAnswer], config: DraftingConfig) -> str | None:
    """Why nothing is trained; None where it is."""
    if routers(target.model):
        return "engines draft nothing for a mixture of experts, whose routes are logged token by token: no head is trained"
    if len(answers) < config.least_answers:
        return (
            f"{len(answers)} answers of this version can be used, {config.least_answers} are the least: try again when it has served more"
        )
    return None


def _write(weights: HeadWeights, record: HeadRecord, head: DraftHead | None) -> HeadRecord:
    written = write_head(weights, record, head)
    log.info("draft head digest=%s kept=%s: %s", record.trained_for, record.kept, record.reason)
    return written


def _alternating(learnt: list[LoggedAnswer], judged: list[LoggedAnswer]) -> list[LoggedAnswer]:
    """Both sides in their shares, so that reading may end anywhere."""
    if not judged or not learnt:
        return learnt + judged
    every = max(2, round((len(learnt) + len(judged)) / len(judged)))
    mixed, rest = list[LoggedAnswer](), iter(learnt)
    for answer in judged:
        mixed += [answer, *(one for _, one in zip(range(every - 1), rest, strict=False))]
    return [*mixed, *rest]


@dataclass(kw_only=True)
class Room:
    """The time of a run, and where it says how far it is."""

    policy: str
    progress: ProgressLog
    seconds: float
    steps: int
    monotonic: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._began, self._told = self.monotonic(), 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return self.monotonic() - self._began

    def reading(self, total: int) -> Callable[[int], bool]:
        """Whether another answer may be read."""

        def go_on(done: int) -> bool:
            self._tell(READING * done / total, {"step": "reading", "answers": done})
            return self.elapsed < READING * self.seconds

        return go_on

    def left(self, step: int, loss: float) -> float:
        """The share of the training's time that is left."""
        share = min(1.0, max(0.0, 1 - (self.elapsed - READING * self.seconds) / (self.seconds * (1 - READING))))
        done = max(step / self.steps, 1 - share)
        self._tell(READING + (1 - READING) * done, {"step": "distilling", "loss": round(loss, 4)})
        return share

    def _tell(self, done: float, detail: dict[str, Any]) -> None:
        if self.elapsed - self._told >= TELL_EVERY_S or done >= 1:
            self._told = self.elapsed
            self.progress.report(self.policy, TASK, done, 1.0, detail)
