"""How far an engine's log-probabilities may be from those of what it samples before its turns are not trained on, from both sides."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from app.domain.telemetry.turns import SamplingParams
from app.policy.decoding.sampling import Generation, sample
from app.policy.model import Policy, load_policy
from app.policy.scoring.forward import token_logprobs
from app.serving.probe import PROMPTS, answers_strangely, mismatch, probe


@pytest.fixture(scope="module")
def policy(tiny_model: Path) -> Policy:
    return load_policy(tiny_model, dtype=torch.float32)


class Drawn:
    """Samples as the engine does, and says of each token what is `off` from the truth by its number."""

    def __init__(self, off: Callable[[int, int], float], *, times: int = 1) -> None:
        self._off, self._times = off, times
        self.asked: list[SamplingParams] = []
        self.tokens = 0

    def __call__(self, policy: Policy, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Generation]:
        self.asked.append(sampling)
        drawn = [generation for _ in range(self._times) for generation in sample(policy, prompts, sampling)]
        count, at = sum(len(generation.tokens) for generation in drawn), 0
        self.tokens = count
        for generation in drawn:
            with torch.inference_mode():
                true = token_logprobs(policy.model, generation.prompt, generation.tokens, temperature=sampling.temperature).tolist()
            generation.logprobs = [value + self._off(at + place, count) for place, value in enumerate(true)]
            at += len(true)
        return drawn


# KL of a gap g (scored − sampled) at every token is e^g − 1 − g: 0.00984 at 0.137 and 0.01027 at 0.14
@pytest.mark.parametrize(("off", "is_true"), [(0.0, True), (-0.137, True), (-0.14, False), (math.nan, False)])
def test_a_hundredth_of_a_nat_is_too_far(policy: Policy, off: float, is_true: bool) -> None:
    drawn = Drawn(lambda *_: off)
    found = probe(policy, draw=drawn)
    assert (found is None) is is_true
    if not is_true:
        assert found is not None
        assert "its log-probabilities are not those of what it samples (KL " in found
    [asked] = drawn.asked
    assert (asked.temperature, asked.top_p, asked.max_tokens, asked.seed) == (0.7, 1.0, 16, 0)
    assert len(PROMPTS) <= drawn.tokens <= 64


# one token that was said to be e times as likely as it is: its KL is (1/e − 1 + 1) / 80 = 0.005, below the bound of the mean
@pytest.mark.parametrize(("off", "is_true"), [(0.99, True), (1.01, False)])
def test_one_token_may_be_off_by_a_nat_and_no_more(policy: Policy, off: float, is_true: bool) -> None:
    drawn = Drawn(lambda place, count: off if place == count - 1 else 0.0, times=5)
    assert (probe(policy, draw=drawn) is None) is is_true
    assert drawn.tokens >= 80, "else the mean would notice it first"


def test_weights_that_were_not_rounded_are_not_measured(policy: Policy) -> None:
    assert mismatch(policy) is None


@pytest.mark.parametrize(("off", "is_strange"), [(0.0, False), (0.13, False), (0.15, True)])
def test_a_version_that_says_something_else_of_the_fixed_text_answers_strangely(policy: Policy, off: float, is_strange: bool) -> None:
    tokens = [5, 6, 7, 8, 9]
    with torch.inference_mode():
        true = token_logprobs(policy.model, tokens[:1], tokens[1:]).tolist()
    found = answers_strangely(policy, msgspec.json.encode({"tokens": tokens, "logprobs": [value - off for value in true]}))
    assert (found is not None) is is_strange


@pytest.mark.parametrize(("place", "is_strange"), [(63, True), (64, False)])
def test_a_version_made_from_another_is_asked_the_first_64_tokens(policy: Policy, place: int, is_strange: bool) -> None:
    tokens = [5 + n % 50 for n in range(80)]
    with torch.inference_mode():
        said = token_logprobs(policy.model, tokens[:1], tokens[1:]).tolist()
    said[place] -= 2.0
    assert (answers_strangely(policy, msgspec.json.encode({"tokens": tokens, "logprobs": said})) is not None) is is_strange
