"""The answers that a head learns from and those it is judged on, and what the version computed to write them.

Shapes: T tokens of an answer, D hidden size.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from app.domain.telemetry.turns import SamplingParams
from app.policy.decoding.drawing import cut
from app.policy.decoding.sampling import Decoder
from app.policy.decoding.scores import AT_ONCE
from app.policy.distribution import drawing
from app.policy.model import Policy

SHORTEST = 3
"""Tokens: of fewer nothing can be drafted."""


@dataclass(frozen=True, kw_only=True)
class LoggedAnswer:
    """One answer that the version sampled, as it was logged."""

    unit: str
    """Who asked: the actor's pseudonym, or the episode."""
    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, kw_only=True)
class ReadAnswer:
    """The same with the version's states: `states_TD[t]` is what token t was drawn from."""

    unit: str
    tokens_T: Tensor
    states_TD: Tensor
    """In bfloat16, because there are many."""
    sampling: SamplingParams = field(default_factory=SamplingParams)


def usable(answers: Sequence[LoggedAnswer], policy: Policy, *, tokens: int) -> list[LoggedAnswer]:
    """Those that this model can have written, up to so many tokens of completions; in their order."""
    found: list[LoggedAnswer] = []
    for answer in answers:
        whole = (*answer.prompt, *answer.completion)
        if answer.prompt and len(answer.completion) >= SHORTEST and len(whole) <= policy.context:
            if not all(0 <= token < policy.vocabulary for token in whole):
                continue
            tokens -= len(answer.completion)
            if tokens < 0:
                break
            found.append(answer)
    return found


def split(answers: Sequence[LoggedAnswer], *, held_out: float) -> tuple[list[LoggedAnswer], list[LoggedAnswer]]:
    """To learn from, and of held-out people: by a hash of who asked, so that nobody is on both sides, today and next time."""

    def is_held_out(answer: LoggedAnswer) -> bool:
        return int.from_bytes(hashlib.sha256(f"drafting:{answer.unit}".encode()).digest()[:8]) < held_out * 2**64

    return [answer for answer in answers if not is_held_out(answer)], [answer for answer in answers if is_held_out(answer)]


def frequent(answers: Sequence[LoggedAnswer], *, most: int) -> tuple[list[int], float]:
    """The most frequent tokens of the answers, in ascending order, and which share of all they are."""
    counts = Counter(token for answer in answers for token in answer.completion)
    kept = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:most]
    return sorted(token for token, _ in kept), sum(count for _, count in kept) / max(1, counts.total())


def read(policy: Policy, answers: Sequence[LoggedAnswer], *, go_on: Callable[[int], bool]) -> list[ReadAnswer]:
    """One forward pass each, by the body that samples; ends where `go_on`, told how many were read, says no."""
    decoder, found = Decoder(policy, max_rows=1, draft_rows=0), list[ReadAnswer]()
    try:
        for answer in answers:
            if not go_on(len(found)):
                break
            states_TD = decoder.read([*answer.prompt, *answer.completion[:-1]])[len(answer.prompt) - 1 :]
            # a copy made outside of inference mode may be trained on
            states_TD = states_TD.to("cpu", torch.bfloat16).clone()
            found.append(
                ReadAnswer(unit=answer.unit, tokens_T=torch.tensor(answer.completion), states_TD=states_TD, sampling=answer.sampling)
            )
    finally:
        decoder.close()
    return found


@torch.inference_mode()
def uniforms_of(policy: Policy, answer: ReadAnswer, random: torch.Generator) -> Tensor:
    """Numbers [T] that the answer's tokens may have been drawn with: they are not logged, and all that draw a token are alike."""
    head, found = cast("Any", policy.model.get_output_embeddings()), list[Tensor]()
    for first in range(0, len(answer.tokens_T), AT_ONCE):
        states_ND, tokens_N = (values[first : first + AT_ONCE] for values in (answer.states_TD, answer.tokens_T))
        logprobs_NV = cut(head(states_ND.to(policy.model.device, policy.model.dtype)).float().cpu(), answer.sampling)
        found.append(drawing(logprobs_NV, tokens_N, torch.rand(len(tokens_N), generator=random, dtype=torch.float64)))
    return torch.cat(found)
