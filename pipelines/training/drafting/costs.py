"""What drafting costs on this machine: a step that feeds 1 + k tokens of one row, and k drafts, over a step that feeds one."""

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from app.domain.telemetry.turns import SamplingParams
from app.policy.decoding.draft_head import HeadDrafter
from app.policy.decoding.lookup import PromptLookup
from app.policy.decoding.sampling import Decoder
from app.policy.model import Policy

ROUNDS, STEPS = 9, 8
ENOUGH_S, LEAST = 30.0, 3
"""Seconds after which no further round begins, and rounds that there are in any case."""


class Always(PromptLookup):
    """Drafts the same few tokens at every step: what they cost does not depend on which they are."""

    def __init__(self, length: int) -> None:
        super().__init__([])
        self.length = length

    def draft(self, most: int) -> list[int]:
        """Zeros."""
        return [0] * min(self.length, most)

    def emitted(self, tokens: Sequence[int], *, drafted: int) -> None:
        """Nothing is learnt from it."""


def costs_of(policy: Policy, drafter: HeadDrafter, prompt: Sequence[int], *, longest: int, rounds: int = ROUNDS) -> dict[int, float]:
    """By length of the draft, turn and turn about: medians over the rounds."""
    endless = replace(policy, end_tokens=frozenset())
    prompt = prompt[: max(1, policy.context - 4 * STEPS * (longest + 1))]
    found: dict[int, list[float]] = {length: [] for length in range(1, longest + 1)}
    began = time.monotonic()
    for done in range(rounds):
        if done >= LEAST and time.monotonic() - began > ENOUGH_S:
            break
        plain = _step_s(endless, prompt, 0, drafter)
        for length, ratios in found.items():
            ratios.append(_step_s(endless, prompt, length, drafter) / plain)
    return {length: median(ratios) for length, ratios in found.items()}


def _step_s(policy: Policy, prompt: Sequence[int], length: int, drafter: HeadDrafter) -> float:
    """Seconds of one step, drafting included: the median of a few."""
    decoder = Decoder(policy, max_rows=1)
    try:
        answer = decoder.submit(prompt, SamplingParams(max_tokens=2 * STEPS * (length + 1), seed=0))
        answer.lookup = Always(length) if length else None
        decoder.step()  # the prompt, and the first token
        state_1D = decoder.read(prompt)[-1:] if length else None
        times = list[float]()
        while decoder.busy and len(times) < STEPS:
            started = time.perf_counter()
            if state_1D is not None:
                drafter.draft(state_1D, [answer.newest], [[0.5] * length], [answer.sampling])
            decoder.step()
            times.append(time.perf_counter() - started)
    finally:
        decoder.close()
    return median(times)
