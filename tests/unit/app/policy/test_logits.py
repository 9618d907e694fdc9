"""Processors of one row's logits: they change that row alone, are told what was drawn, and what is logged is theirs."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from app.domain.telemetry.turns import FinishReason, SamplingParams
from app.policy.decoding.sampling import Decoder, Generation
from app.policy.model import Policy, load_policy
from app.policy.scoring.forward import token_logprobs


class Digits:
    """Lets every second token come only from a small set; remembers what it was told."""

    def __init__(self, allowed: set[int]) -> None:
        self.allowed = allowed
        self.told: list[int] = []

    def __call__(self, logits_V: Tensor) -> Tensor:
        if len(self.told) % 2:
            return logits_V
        barred = torch.ones_like(logits_V, dtype=torch.bool)
        barred[list(self.allowed)] = False
        return logits_V.masked_fill_(barred, -torch.inf)

    def accept(self, token: int) -> None:
        self.told.append(token)

    @property
    def is_done(self) -> bool:
        return False


class Ending(Digits):
    """Says after three tokens that it is done."""

    @property
    def is_done(self) -> bool:
        return len(self.told) == 3


class Broken(Digits):
    """Fails after two tokens."""

    def __call__(self, logits_V: Tensor) -> Tensor:
        if len(self.told) == 2:
            raise LookupError("no such rule")
        return logits_V


@pytest.fixture(scope="module")
def policy(tiny_model: Path) -> Policy:
    return load_policy(tiny_model, dtype=torch.float32)


def drawn(policy: Policy, processors: list[Digits | None], **sampling: float) -> list[Generation]:
    prompt = policy.chat.prompt([{"role": "user", "content": "def f(x):"}])
    decoder = Decoder(policy, max_rows=4)
    params = SamplingParams(max_tokens=8, seed=5, **sampling)  # pyright: ignore[reportArgumentType] - numbers
    generations = [decoder.submit(prompt, params, processor=processor) for processor in processors]
    while decoder.busy:
        decoder.step()
    decoder.close()
    return generations


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_a_processor_rules_its_own_row_and_no_other(policy: Policy, top_p: float) -> None:
    rule = Digits({40, 41, 42})
    alone, ruled = drawn(policy, [None], top_p=top_p)[0], drawn(policy, [None, rule], top_p=top_p)
    assert ruled[0].tokens == alone.tokens
    assert rule.told == ruled[1].tokens
    assert set(ruled[1].tokens[::2]) <= rule.allowed


def test_what_is_logged_is_of_the_distribution_that_was_drawn_from(policy: Policy) -> None:
    """Only what top-p kept of it is logged beside it: what the processor did is worked out again by whoever scores."""
    rule = Digits({40, 41, 42})
    ruled, cut = drawn(policy, [None, rule], temperature=0.8)[1], drawn(policy, [None, Digits({40, 41, 42})], temperature=0.8, top_p=0.7)[1]
    with torch.no_grad():
        plain = token_logprobs(policy.model, ruled.prompt, ruled.tokens, temperature=0.8)
    assert torch.allclose(torch.tensor(ruled.logprobs)[1::2], plain[1::2], atol=2e-5)
    assert (torch.tensor(ruled.logprobs)[::2] - plain[::2]).min() > 0.5, "three tokens of the vocabulary"
    assert not ruled.kept_log_mass
    assert min(cut.kept_log_mass) >= math.log(0.7) - 1e-6


def test_an_answer_ends_where_its_processor_says_that_nothing_may_follow(policy: Policy) -> None:
    ended, other = drawn(policy, [Ending(set(range(500))), None])
    assert (len(ended.tokens), ended.finish_reason) == (3, FinishReason.STOP)
    assert len(other.tokens) > 3


@pytest.mark.parametrize("processor", [Broken({1}), Digits(set())], ids=["broken", "nothing left"])
def test_a_processor_that_fails_ends_its_own_answer_alone(policy: Policy, processor: Digits) -> None:
    ended, other = drawn(policy, [processor, None])
    assert ended.finish_reason is FinishReason.ERROR
    assert len(ended.tokens) == len(processor.told) < 8
    assert other.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
    assert other.tokens == drawn(policy, [None])[0].tokens
