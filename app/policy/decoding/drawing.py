"""One token per position, from the distributions they have, and the log-probability of each.

Shapes: N positions, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from app.domain.telemetry.turns import SamplingParams
from app.policy.distribution import draw, nucleus_logprobs


@dataclass(frozen=True, slots=True)
class Drawn:
    """What became of a position."""

    token: int
    logprob: float
    """Of the distribution it was drawn from."""
    kept_log_mass: float | None
    """Log of what top-k and top-p kept; None where neither was asked for."""
    spread_V: Tensor
    """Log-probabilities of everything that could have been drawn."""


def alike(sampling: Sequence[SamplingParams]) -> Iterator[tuple[SamplingParams, list[int]]]:
    """Positions of the same temperature, top-k and top-p, which are computed together."""
    groups: dict[tuple[float, float, int], list[int]] = {}
    for index, params in enumerate(sampling):
        groups.setdefault((params.temperature, params.top_p, params.top_k or 0), []).append(index)
    for members in groups.values():
        yield sampling[members[0]], members


def cut(logits_NV: Tensor, params: SamplingParams) -> Tensor:
    """Log-probabilities [N, V] of what can be drawn so."""
    return nucleus_logprobs(logits_NV, temperature=params.temperature, top_p=params.top_p, top_k=params.top_k or 0)


def draw_all(logits_NV: Tensor, uniforms: Sequence[float], sampling: Sequence[SamplingParams]) -> list[Drawn]:
    """One of each position, with its own number and as it is to be drawn."""
    found: dict[int, Drawn] = {}
    for params, members in alike(sampling):
        logits = logits_NV if len(members) == len(sampling) else logits_NV[members]
        logprobs = cut(logits, params)
        uniform = torch.tensor([uniforms[index] for index in members], dtype=torch.float64, device=logits.device)
        tokens = draw(logprobs, uniform)
        drawn = logprobs.gather(1, tokens[:, None])[:, 0]
        kept: list[float | None] = [None] * len(members)
        if params.is_cut:
            whole = nucleus_logprobs(logits, temperature=params.temperature, top_p=1.0).gather(1, tokens[:, None])[:, 0]
            kept = (whole - drawn).tolist()
        for place, (index, token, logprob) in enumerate(zip(members, tokens.tolist(), drawn.tolist(), strict=True)):
            found[index] = Drawn(token, logprob, kept[place], logprobs[place])
    return [found[index] for index in range(len(sampling))]
