"""Turns as training reads them: the batch's items with their tokens, or the reason why one cannot be used. Never a guess.

Fed by a batch manifest and the payload segments / feeds the plan and the advantages.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from app.domain.learning.batches import BatchItem, BatchManifest, TurnPayload
from app.domain.learning.rewards import Exclusion
from app.domain.ports import TrajectoryStore
from app.domain.telemetry.turns import Form
from app.policy.distribution import GREEDY_BELOW
from app.policy.model import load_grammars
from pipelines.training.estimators import RewardedTurn


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the model can read."""

    vocabulary: int
    max_tokens: int
    allow: Callable[[Form, Sequence[int]], bool] = lambda form, tokens: False
    """Whether tokens could have been drawn under a form (`app.policy.decoding.grammars`)."""


def limits_of(folder: Path, *, max_tokens: int) -> Limits:
    """Those of a snapshot's model, and no sequence longer than `max_tokens`."""
    config = json.loads((folder / "config.json").read_text())
    context = int(config.get("max_position_embeddings", max_tokens))
    return Limits(vocabulary=int(config["vocab_size"]), max_tokens=min(max_tokens, context), allow=load_grammars(folder).allow)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One readable turn with its reward."""

    item: BatchItem
    payload: TurnPayload
    logprobs: tuple[float, ...]
    opening: tuple[int, ...] = ()
    """The prompt that its episode began with, as far as the batch has it; empty for its own."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and completion, [P + T]."""
        return self.payload.tokens

    def rewarded(self) -> RewardedTurn:
        """What the baseline may look at."""
        prompt = hashlib.sha256(str(self.opening or self.payload.prompt_tokens).encode()).hexdigest()
        item = self.item
        return RewardedTurn(
            unit=item.episode_id, reward=item.reward, segment=item.segment, prompt=prompt, channels=item.channels, group=item.group
        )


def read_samples(
    batch: BatchManifest, trajectories: TrajectoryStore, limits: Limits, *, has_weights: Callable[[str], bool] = lambda digest: False
) -> tuple[list[Sample], dict[str, int]]:
    """The readable turns in the manifest's order, and the count per reason of the others. What top-k and top-p kept can be worked out
    for turns of versions whose weights are there (`pipelines.training.numerics.nucleus`)."""
    there = cache(has_weights)
    payloads = trajectories.read((item.payload_segment, item.inference_id) for item in batch.items if item.payload_segment)
    samples: list[Sample] = []
    left_out: Counter[str] = Counter()
    for item in batch.items:
        payload = payloads.get(item.inference_id)
        reason = _unusable(item, payload, limits, there)
        if reason is not None:
            left_out[reason.value] += 1
            continue
        assert payload is not None
        assert payload.logprobs is not None
        samples.append(Sample(item=item, payload=payload, logprobs=payload.logprobs))
    return _with_openings(samples), dict(left_out)


def _with_openings(samples: list[Sample]) -> list[Sample]:
    """Each with the prompt of the first turn of its episode."""
    openings: dict[str, tuple[int, ...]] = {}
    for sample in sorted(samples, key=lambda sample: (sample.payload.finished_at, sample.item.inference_id)):
        openings.setdefault(sample.item.episode_id, tuple(sample.payload.prompt_tokens))
    return [replace(sample, opening=openings[sample.item.episode_id]) for sample in samples]


def _unusable(item: BatchItem, payload: TurnPayload | None, limits: Limits, has_weights: Callable[[str], bool]) -> Exclusion | None:
    """Why the turn cannot be trained on, or None."""
    if payload is None:
        return Exclusion.PAYLOAD_MISSING
    if item.version and payload.version != item.version:
        return Exclusion.UNKNOWN_VERSION
    if not payload.completion_tokens or not payload.prompt_tokens:
        return Exclusion.EMPTY_COMPLETION
    if not _honest(payload):
        return Exclusion.NO_LOGPROBS
    if payload.temperature < GREEDY_BELOW or (payload.is_cut and not _has_kept_mass(payload, has_weights)):
        return Exclusion.NO_RATIO
    if len(payload.prompt_tokens) + len(payload.completion_tokens) > limits.max_tokens:
        return Exclusion.TOO_LONG
    if not all(0 <= token < limits.vocabulary for token in payload.tokens):
        return Exclusion.TOKENS_OUT_OF_RANGE
    if payload.shape is not None and payload.shape.form is not None and not limits.allow(payload.shape.form, payload.completion_tokens):
        return Exclusion.NO_RATIO
    return None


def _honest(payload: TurnPayload) -> bool:
    """One finite log-probability per sampled token, none of them above zero (rounding aside)."""
    logprobs = payload.logprobs
    if logprobs is None or len(logprobs) != len(payload.completion_tokens):
        return False
    return all(math.isfinite(logprob) and logprob <= 1e-3 for logprob in logprobs)


def _has_kept_mass(payload: TurnPayload, has_weights: Callable[[str], bool]) -> bool:
    """One finite log mass per sampled token, none of them above zero (rounding aside); or none at all, and the weights to find them."""
    masses = payload.kept_log_mass
    if masses is None:
        return has_weights(payload.version)
    return len(masses) == len(payload.completion_tokens) and all(math.isfinite(mass) and mass <= 1e-3 for mass in masses)
