"""Which waiting prompts are fed in one forward pass: short ones of nearly the same length that do not repeat each other."""

from collections.abc import Sequence

from app.policy.decoding.generation import Generation

PASS_TOKENS = 16
"""What a forward pass of its own costs beside its tokens, in tokens (SmolLM2 on AVX512-BF16: 10 on one thread, some 20 on two)."""


def shared(prompt: Sequence[int], other: Sequence[int]) -> int:
    """Length of the beginning two prompts share, short of the whole prompt: its last token must be fed to predict the first one."""
    limit = min(len(prompt) - 1, len(other))
    if prompt[:limit] == other[:limit]:
        return limit
    return next(index for index in range(limit) if prompt[index] != other[index])


def joins(other: Sequence[int], *, known: int, filling: Sequence[Generation], budget: int) -> bool:
    """Whether a prompt of which `known` tokens are in the cache is fed beside those that join now, instead of after them.

    It is where `budget` takes them all, nobody is padded by more than a pass costs, and what it could copy of one of them later is no more.
    """
    unfed = [len(other) - known, *(one.unfed for one in filling)]
    copied = max(shared(other, one.prompt) for one in filling)
    return len(unfed) * max(unfed) <= budget and max(unfed) - min(unfed) <= PASS_TOKENS and copied - known <= PASS_TOKENS
