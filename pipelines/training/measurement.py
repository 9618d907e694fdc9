"""What a run says about itself: plain numbers for the run's row, MLflow and gate G0.

Legend: every figure is over scored tokens unless its name says turns; logarithms are natural.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from app.domain.learning.batches import BatchManifest
from pipelines.training.guards import RatioReport
from pipelines.training.samples import Sample

RATIO_EDGES = (0.25, 0.5, 0.8, 0.9, 0.95, 0.99, 1.01, 1.05, 1.1, 1.25, 2.0, 4.0)
"""Bounds of the ratio histogram; the first and last bins are open."""


def ratio_histogram(logprobs: Sequence[float], behaviour: Sequence[float]) -> list[int]:
    """Tokens per bin of `RATIO_EDGES`, one more bin than edges."""
    counts = [0] * (len(RATIO_EDGES) + 1)
    edges = [math.log(edge) for edge in RATIO_EDGES]
    for new, old in zip(logprobs, behaviour, strict=True):
        counts[sum(new - old >= edge for edge in edges)] += 1
    return counts


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; NaN of nothing."""
    return math.fsum(values) / len(values) if values else math.nan


def beside_sampler(
    found: Mapping[int, tuple[Sequence[float], Sequence[float]]], samples: Sequence[Sample]
) -> tuple[list[float], list[float]]:
    """Log-probabilities of all tokens of the turns, as found now (beside their entropies, by index) and as their samplers logged them."""
    return [new for logprobs, _ in found.values() for new in logprobs], [old for index in found for old in samples[index].logprobs]


TAIL = 2.0


def kl_from_sampler(sampler: Sequence[float], new: Sequence[float]) -> float:
    """KL(sampler ‖ new) per token of tokens that the sampler drew: the mean of r − 1 − log r with r = new/sampler (k3), tails cut.

    The other direction would average sampler/new, whose mean under the sampler is 1 + χ²: one token that became unlikely decides it.
    Beyond r = e² the term goes on along its tangent: one token that the sampler drew at 1e-5 and that an update made likely would
    otherwise count for all others (measured with SmolLM2: 13 and 145 nats per token where the steps themselves had 0.07).
    """
    return mean(terms_from_sampler(sampler, new))


def terms_from_sampler(sampler: Sequence[float], new: Sequence[float]) -> list[float]:
    """What `kl_from_sampler` is the mean of, per token."""
    return [_divergence(b - a) for a, b in zip(sampler, new, strict=True)]


def _divergence(gap: float) -> float:
    near = min(gap, TAIL)
    return math.expm1(near) - near + math.expm1(TAIL) * (gap - near)


def kl_to_reference(sampler: Sequence[float], new: Sequence[float], reference: Sequence[float], *, cap: float = 10.0) -> float:
    """KL(new ‖ reference) per token of tokens that the sampler drew: the mean of ρ·(log new − log reference), ρ = new/sampler up to `cap`.

    Importance-weighted k1; unbiased but for the cap, so it may be slightly negative near zero.
    """
    return mean(terms_to_reference(sampler, new, reference, cap=cap))


def terms_to_reference(sampler: Sequence[float], new: Sequence[float], reference: Sequence[float], *, cap: float = 10.0) -> list[float]:
    """What `kl_to_reference` is the mean of, per token."""
    return [min(math.exp(min(n - s, 50.0)), cap) * (n - r) for s, n, r in zip(sampler, new, reference, strict=True)]


def batch_metrics(batch: BatchManifest) -> dict[str, Any]:
    """What the batch is: its rule set, the anchor, what it left out, and the share of its turns that the champion itself sampled."""
    return {
        "rule_set": batch.rule_set, "anchor": batch.anchor, "batch_left_out": batch.left_out,
        "on_policy_share": mean([float(item.version == batch.champion) for item in batch.items]),
    }  # fmt: skip


def turn_metrics(samples: Sequence[Sample], baselines: Sequence[float]) -> dict[str, Any]:
    """Rewards, baselines, advantages and lengths over turns, in all and per segment."""
    rewards = [sample.item.reward for sample in samples]
    lengths = [len(sample.logprobs) for sample in samples]
    above = [reward - baseline for reward, baseline in zip(rewards, baselines, strict=True)]
    segments: defaultdict[str, list[int]] = defaultdict(list)
    for place, sample in enumerate(samples):
        segments[sample.item.segment].append(place)
    return {
        "turns": len(samples),
        "tokens": sum(lengths),
        "reward_mean": mean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "ceiling_rate": mean([float(reward >= max(rewards) - 1e-9) for reward in rewards]),
        "baseline_mean": mean(list(baselines)),
        "advantage_mean": mean(above),
        "advantage_std": statistics.pstdev(above),
        "length_mean": mean([float(n) for n in lengths]),
        "length_std": statistics.pstdev(lengths),
        "length_max": max(lengths),
        "prompt_length_mean": mean([float(len(s.payload.prompt_tokens)) for s in samples]),
        "segments": {
            name: {
                "turns": len(places),
                "reward_mean": mean([rewards[p] for p in places]),
                "baseline_mean": mean([baselines[p] for p in places]),
                "length_mean": mean([float(lengths[p]) for p in places]),
            }
            for name, places in sorted(segments.items())
        },
    }  # fmt: skip


def step_metrics(report: RatioReport, *, loss: float, grad_norm: float, entropy: Sequence[float]) -> dict[str, Any]:
    """One Adam step."""
    return {"loss": loss, "grad_norm": grad_norm, "entropy": mean(entropy), **asdict(report)}


def steps_summary(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the Adam steps as single numbers, for charts over versions."""
    return {
        "steps": steps, "effective_share": min(step["effective_share"] for step in steps),
        **{name: mean([step[name] for step in steps]) for name in ("loss", "grad_norm", "entropy", "mean_ratio")},
    }  # fmt: skip
