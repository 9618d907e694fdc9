"""The second objective at work: what a step's turns learn from corrections, beside their rewards."""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from app.domain.learning.training import Datum, LossName, LossSpec
from app.domain.ports import Trainer
from pipelines.training.hindsight.config import HindsightConfig
from pipelines.training.hindsight.lessons import Lessons, served_datum, wanted_datum
from pipelines.training.samples import Sample


class Hindsight:
    """The lessons of an update, as the steps ask for them."""

    def __init__(self, config: HindsightConfig, lessons: Lessons, samples: Sequence[Sample]) -> None:
        self.config, self.lessons, self.samples = config, lessons, samples

    @property
    def is_silent(self) -> bool:
        """Whether nothing is learned from corrections."""
        return not self.lessons.weights

    def state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return asdict(self.lessons)

    def taught(self, datum: Datum, inference_id: str) -> Datum:
        """The turn with its teacher, where it has one."""
        teacher = self.lessons.teacher.get(inference_id)
        if teacher is None:
            return datum
        return replace(datum, teacher=tuple(teacher), pull=self.config.weight * self.lessons.weights[inference_id])

    def learn_pairs(self, trainer: Trainer, turns: Sequence[int], normaliser: float) -> float:
        """Add the gradient of the step's pairs; returns their loss. `sft` and `dpo` alone have pairs.

        The gradient of −log σ(h) is that of a cross-entropy whose weights are β·σ(−h) for the wanted tokens and −β·σ(−h) for the served.
        """
        loss = 0.0
        if not self.lessons.wanted:
            return loss
        for sample in (self.samples[index] for index in turns):
            name = sample.item.inference_id
            wanted = self.lessons.wanted.get(name)
            if wanted is None:
                continue
            weight = self.config.weight * self.lessons.weights[name]
            spec = LossSpec(name=LossName.CROSS_ENTROPY, normaliser=normaliser)
            if self.config.objective == "sft":
                loss += trainer.forward_backward([wanted_datum(sample, wanted, weight=weight)], spec).loss
                continue
            good, bad = (math.fsum(row) for row in trainer.forward([wanted_datum(sample, wanted), served_datum(sample)]).logprobs)
            margin = self.config.dpo_beta * ((good - self.lessons.reference[name][0]) - (bad - self.lessons.reference[name][1]))
            lost, falls = _lost(margin)
            loss += weight * lost / normaliser
            slope = weight * self.config.dpo_beta * falls
            trainer.forward_backward([wanted_datum(sample, wanted, weight=slope), served_datum(sample, weight=-slope)], spec)
        return loss

    def metrics(self, left_out: dict[str, int], authors: dict[str, str]) -> dict[str, Any]:
        """For the run's record: how many, whose, and how far teacher and policy are apart on the served tokens (nats per token)."""
        weights = self.lessons.weights
        by_author: dict[str, float] = {}
        for name, weight in weights.items():
            by_author[authors.get(name, "")] = by_author.get(authors.get(name, ""), 0.0) + weight
        return {
            "objective": self.config.objective, "used": len(weights), "people": len(by_author), "left_out": left_out,
            "largest_share": max(by_author.values(), default=0.0) / (sum(by_author.values()) or 1.0),
        }  # fmt: skip

    def teacher_gap(self) -> float | None:
        """Mean log π_T − log π_behaviour over the taught tokens; None without any."""
        of = {sample.item.inference_id: sample.logprobs for sample in self.samples}
        gaps = [far - old for name, row in self.lessons.teacher.items() for far, old in zip(row, of[name], strict=True)]
        return math.fsum(gaps) / len(gaps) if gaps else None


def _lost(margin: float) -> tuple[float, float]:
    """−log σ(h) and σ(−h), for an h of any size."""
    small = math.exp(-abs(margin))
    return max(-margin, 0.0) + math.log1p(small), (small if margin > 0.0 else 1.0) / (1.0 + small)
