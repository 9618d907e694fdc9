"""Prompts that are fed in one forward pass: which, and that they are answered as they are alone."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from app.domain.telemetry.turns import SamplingParams
from app.policy.decoding.body import Body
from app.policy.decoding.generation import Generation
from app.policy.decoding.joining import joins, shared
from app.policy.decoding.keyvalues import Fed, KeyValues
from app.policy.decoding.sampling import Decoder, sample
from app.policy.model import Policy, load_policy


@pytest.fixture(scope="module")
def policy(tiny_model: Path) -> Policy:
    return load_policy(tiny_model, dtype=torch.float32)


def joining(policy: Policy, length: int, *, cached: int = 0, token: int = 7) -> Generation:
    generation = Decoder(policy).submit([token] * length, SamplingParams(max_tokens=1))
    generation.cached = cached
    return generation


class Noting:
    """A body that writes down what goes through it."""

    def __init__(self, body: Body) -> None:
        self.body, self.cache, self.found = body, body.cache, list[tuple[int, int]]()

    def __call__(self, parts: Sequence[Fed], cache: KeyValues) -> list[Tensor]:
        self.found.extend((len(fed.tokens_nQ), fed.tokens_nQ.shape[1]) for fed in parts)
        return self.body(parts, cache)


@contextmanager
def passes(decoder: Decoder) -> Iterator[list[tuple[int, int]]]:
    """Rows and tokens of each part that goes through the body."""
    body = decoder._body
    decoder._body = noting = Noting(body)
    try:
        yield noting.found
    finally:
        decoder._body = body


@pytest.mark.parametrize(
    ("one", "other", "length"),
    [
        ([1, 2, 3], [1, 2, 3], 2),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2], [1, 2, 3], 1),
        ([1, 2, 3], [1, 9, 3], 1),
        ([4, 2], [1, 2], 0),
        ([4], [4], 0),
    ],
)
def test_what_two_prompts_share_is_short_of_the_last_token(one: list[int], other: list[int], length: int) -> None:
    assert shared(one, other) == length


@pytest.mark.parametrize(
    ("length", "known", "budget", "does"),
    [
        (40, 0, 80, True), (40, 0, 79, False),  # both of them as long as the longer one
        (56, 0, 112, True), (57, 0, 200, False), (24, 0, 200, True), (23, 0, 200, False),  # padded by as much as a pass costs
        (80, 40, 80, True), (57, 1, 200, True),  # what is in the cache is not fed
    ],
)  # fmt: skip
def test_a_prompt_is_fed_beside_another_where_a_pass_of_its_own_costs_more(
    policy: Policy, length: int, known: int, budget: int, does: bool
) -> None:
    assert joins([8] * length, known=known, filling=[joining(policy, 40)], budget=budget) == does


def test_a_third_one_is_no_further_from_either(policy: Policy) -> None:
    two = [joining(policy, 40), joining(policy, 50)]
    assert [joins([8] * length, known=0, filling=two, budget=200) for length in (33, 34, 56, 57)] == [False, True, True, False]
    assert joins([8] * 100, known=60, filling=[joining(policy, 100, cached=60)], budget=80), "of each what is left to feed"


@pytest.mark.parametrize(("common", "known", "does"), [(16, 0, True), (17, 0, False), (17, 1, True), (0, 0, True)])
def test_a_prompt_that_could_copy_more_of_another_than_a_pass_costs_waits_for_it(
    policy: Policy, common: int, known: int, does: bool
) -> None:
    assert joins([*[7] * common, *[8] * (40 - common)], known=known, filling=[joining(policy, 40)], budget=200) == does


def test_short_prompts_are_fed_at_once_and_as_many_as_have_a_row(policy: Policy) -> None:
    decoder = Decoder(policy, max_rows=3, draft_rows=0)
    for number, length in enumerate((10, 12, 9, 11)):
        decoder.submit([10 + number] * length, SamplingParams(max_tokens=3, seed=number))
    with passes(decoder) as found:
        assert len(decoder.step()) == 3
    assert found == [(3, 12)]
    assert (decoder.prompted, decoder.fed) == (31, 36), "what pads a row is fed and is nobody's prompt"
    while decoder.busy:
        decoder.step()


def test_those_who_ask_the_same_are_fed_once(policy: Policy) -> None:
    decoder = Decoder(policy, max_rows=4, draft_rows=0)
    for number in range(4):
        decoder.submit([*range(20, 60)], SamplingParams(max_tokens=2, seed=number))
    with passes(decoder) as found:
        decoder.step()
    assert found == [(1, 40)]
    decoder.close()


def test_prompts_are_answered_together_as_alone_wherever_each_begins(policy: Policy) -> None:
    begun = [*range(20, 70)]
    asked = [[*begun[:30], *[100 + number] * (15 + number)] for number in range(3)] + [[*begun[:12], *[200] * 9], [*[201] * 20]]
    params = [SamplingParams(max_tokens=6, seed=number) for number in range(len(asked))]
    decoder = Decoder(policy, max_rows=8, draft_rows=0)
    resident = decoder.submit(begun, SamplingParams(max_tokens=20, seed=9))
    decoder.step()
    together = [decoder.submit(prompt, each) for prompt, each in zip(asked, params, strict=True)]
    with passes(decoder) as found:
        decoder.step()
    assert found == [(1, 1), (5, 20)], "the three and the fourth from what they share with the resident one, the fifth from its beginning"
    while decoder.busy:
        decoder.step()
    for one, prompt, each in zip([*together, resident], [*asked, begun], [*params, resident.sampling], strict=True):
        (alone,) = sample(policy, [prompt], each)
        assert one.tokens == alone.tokens
        assert one.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def test_a_prompt_that_is_padded_at_the_end_of_the_context_is_answered_as_alone(tiny_model: Path) -> None:
    packed = load_policy(tiny_model)
    asked = [[3] * (packed.context - 2), [4] * (packed.context - 17)]
    params = SamplingParams(max_tokens=2, seed=1)
    decoder = Decoder(packed, chunk=2 * packed.context, draft_rows=0)
    together = [decoder.submit(prompt, params) for prompt in asked]
    while decoder.busy:
        decoder.step()
    for one in together:
        (alone,) = sample(packed, [one.prompt], params)
        assert one.tokens == alone.tokens
        assert one.logprobs == pytest.approx(alone.logprobs, abs=0.02)


def test_a_prompt_that_the_cache_holds_is_not_fed_beside_another(policy: Policy) -> None:
    decoder = Decoder(policy, max_rows=4, draft_rows=0, prompt_cache_bytes=1 << 24)
    known, new = [5] * 20, [6] * 20
    decoder.submit(known, SamplingParams(max_tokens=1, seed=1))
    while decoder.busy:
        decoder.step()
    decoder.submit(new, SamplingParams(max_tokens=2, seed=1))
    decoder.submit(known, SamplingParams(max_tokens=2, seed=1))
    with passes(decoder) as found:
        decoder.step()
    assert found == [(1, 20)], "its last token is fed beside the other's newest one"
    assert decoder.prompted == 40
    decoder.close()


@pytest.mark.parametrize("later", [False, True], ids=["together", "a step later"])
def test_who_goes_on_with_a_prompt_that_is_asked_again_is_answered_as_alone(policy: Policy, *, later: bool) -> None:
    """A prompt that the cache holds is a row before its last token is fed: there are no keys and values of that one to copy yet."""
    first, rest = [*range(20, 50)], [*range(60, 75)]
    decoder = Decoder(policy, max_rows=8, draft_rows=0, prompt_cache_bytes=1 << 24)
    decoder.submit(first, SamplingParams(max_tokens=1, seed=1))
    while decoder.busy:
        decoder.step()
    again = decoder.submit(first, SamplingParams(max_tokens=6, seed=2))
    if later:
        decoder.submit([*range(80, 90)], SamplingParams(max_tokens=6, seed=4))
        decoder.step()
    goes_on = decoder.submit([*first, *rest], SamplingParams(max_tokens=6, seed=3))
    while decoder.busy:
        decoder.step()
    from_cache = decoder.submit([*first, *rest], SamplingParams(max_tokens=6, seed=3))
    while decoder.busy:
        decoder.step()
    for one in (again, goes_on, from_cache):
        (alone,) = sample(policy, [one.prompt], one.sampling)
        assert one.tokens == alone.tokens
        assert one.logprobs == pytest.approx(alone.logprobs, abs=1e-5)
    decoder.close()
