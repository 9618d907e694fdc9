"""Tokens fed ahead change nothing but the time: the same tokens, the same log-probabilities, whatever the drafts are."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from app.domain.telemetry.turns import FinishReason, SamplingParams
from app.policy.decoding.body import body_of
from app.policy.decoding.invariance import invariance
from app.policy.decoding.lookup import LONGEST_DRAFT, LONGEST_REST, NGRAM, REST_TOKENS, PromptLookup
from app.policy.decoding.packed.attending import attended
from app.policy.decoding.packed.between import activated, normed, placed
from app.policy.decoding.packed.body import PackedBody
from app.policy.decoding.sampling import Decoder, Generation, sample
from app.policy.model import Policy, load_policy
from app.policy.packing.panels import _multiply
from app.policy.packing.products import can_pack

VOCABULARY, LENGTH = 5, 3


class Drafter(PromptLookup):
    """Drafts what it is given, again and again."""

    def __init__(self, drafts: list[int]) -> None:
        super().__init__([])
        self.drafts, self.given = drafts, 0

    def draft(self, most: int) -> list[int]:
        self.given += bool(self.drafts[:most])
        return self.drafts[:most]

    def emitted(self, tokens: Any, *, drafted: int) -> None:
        del self.drafts[: len(tokens)]


@pytest.fixture(scope="module")
def policy(tiny_model: Path) -> Policy:
    return load_policy(tiny_model, dtype=torch.float32)


def run(
    policy: Policy, params: SamplingParams, drafts: list[int] | None, uniforms: list[float] | None = None
) -> tuple[Generation, Decoder]:
    decoder = Decoder(policy, max_rows=2)
    answer = decoder.submit([5, 6, 7], params)
    answer.lookup = Drafter(list(drafts)) if drafts is not None else None
    while decoder.busy:
        decoder.step()
    decoder.close()
    return answer, decoder


# --- enumerated ----------------------------------------------------------------------------------------------------------------------


class Table(nn.Module):
    """A model of five tokens: the next one depends on the last and on where it stands."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.randn(VOCABULARY, 16, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 1.5
        self.device = torch.device("cpu")
        text = SimpleNamespace(model_type="table", vocab_size=VOCABULARY)
        self.config = SimpleNamespace(get_text_config=lambda: text, max_position_embeddings=16)

    @property
    def base_model(self) -> Any:
        return lambda input_ids, position_ids, **_: SimpleNamespace(last_hidden_state=self.logits[input_ids, position_ids])

    def get_output_embeddings(self) -> nn.Module:
        return nn.Identity()

    def chances(self, last: int, position: int) -> Tensor:
        return torch.softmax(self.logits[last, position].double(), -1)


@pytest.mark.parametrize("drafts", [[], [1], [3, 3, 3], [0, 4]], ids=str)
def test_every_sequence_comes_exactly_as_often_as_the_target_says(policy: Policy, drafts: list[int]) -> None:
    """All 125 sequences of three: the middle of a sequence's share of the uniform numbers gives that sequence, and its log-probability,
    with drafts that are right, half right and wrong. (The shares are the target's probabilities, and fill the cube.)"""
    table = Table()
    five = Policy(digest="5" * 64, model=table, chat=policy.chat, context=16, end_tokens=frozenset())  # pyright: ignore[reportArgumentType]
    total = 0.0
    for wanted in itertools.product(range(VOCABULARY), repeat=LENGTH):
        uniforms, logprob, last = list[float](), 0.0, 2
        for place, token in enumerate(wanted):
            chances = table.chances(last, 2 + place)
            uniforms.append(float(chances[:token].sum() + chances[token] / 2))
            logprob, last = logprob + math.log(chances[token]), token
        decoder = Decoder(five, max_rows=1)
        answer = decoder.submit([0, 1, 2], SamplingParams(max_tokens=LENGTH))
        answer.lookup, answer.uniforms = Drafter([0, *drafts]), list(uniforms)  # the first one is drawn from the prompt
        while decoder.busy:
            decoder.step()
        assert tuple(answer.tokens) == wanted
        assert sum(answer.logprobs) == pytest.approx(logprob, abs=1e-5)
        total += math.exp(logprob)
    assert total == pytest.approx(1.0)


# --- on a model ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.7}, {"temperature": 0.0}, {"temperature": 1.3, "stop": ("e",)}], ids=str)
@pytest.mark.parametrize("kind", ["right", "wrong", "half right"])
def test_drafts_change_nothing_but_the_number_of_steps(policy: Policy, kind: str, sampling: dict[str, Any]) -> None:
    for seed in range(3):
        params = SamplingParams(max_tokens=12, seed=seed, **sampling)
        plain, _ = run(policy, params, None)
        right = list(plain.tokens)
        drafts = {"right": right, "wrong": [token ^ 1 for token in right], "half right": [t ^ (i % 2) for i, t in enumerate(right)]}[kind]
        found, decoder = run(policy, params, drafts)
        assert found.tokens == plain.tokens
        assert found.text == plain.text
        assert found.finish_reason is plain.finish_reason
        assert found.logprobs == pytest.approx(plain.logprobs, abs=1e-5)
        assert found.kept_log_mass == pytest.approx(plain.kept_log_mass, abs=1e-4)
        if len(right) > 3:
            assert (decoder.accepted > 0) == (kind != "wrong")


@pytest.mark.parametrize("last", [1, 2, 5])
def test_an_answer_ends_where_it_would_inside_a_draft(policy: Policy, last: int) -> None:
    """At the end of the context, at its length, at an end token: nothing is emitted behind it."""
    policy = replace(policy, end_tokens=frozenset())
    plain, _ = run(policy, SamplingParams(max_tokens=9, seed=4), None)
    drafts = [*plain.tokens, 1, 1, 1, 1]
    short, _ = run(policy, SamplingParams(max_tokens=last, seed=4), list(drafts))
    assert (short.tokens, short.finish_reason) == (plain.tokens[:last], FinishReason.LENGTH)
    narrow, _ = run(replace(policy, context=3 + last), SamplingParams(max_tokens=99, seed=4), list(drafts))
    assert (narrow.tokens, narrow.finish_reason) == (plain.tokens[:last], FinishReason.LENGTH)
    ending, _ = run(replace(policy, end_tokens=frozenset({plain.tokens[last - 1]})), SamplingParams(max_tokens=99, seed=4), list(drafts))
    assert ending.finish_reason is FinishReason.STOP
    assert ending.tokens == plain.tokens[: plain.tokens.index(plain.tokens[last - 1]) + 1]


def test_rows_with_and_without_drafts_share_a_step(policy: Policy) -> None:
    params = [SamplingParams(max_tokens=4 + 3 * index, seed=index) for index in range(3)]
    alone = [run(policy, each, None)[0] for each in params]
    decoder = Decoder(policy, max_rows=3)
    together = [decoder.submit([5, 6, 7], each) for each in params]
    for answer, known in zip(together[:2], alone, strict=False):
        answer.lookup = Drafter(list(known.tokens))
    while decoder.busy:
        decoder.step()
    assert [answer.tokens for answer in together] == [answer.tokens for answer in alone]
    assert decoder.accepted


# --- lookup --------------------------------------------------------------------------------------------------------------------------


def test_what_followed_the_last_time_is_drafted() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 5, 9, 1, 2, 3])
    assert lookup.draft(2) == [4, 5]
    assert lookup.draft(0) == []
    lookup.emitted([4], drafted=0)
    assert lookup.draft(9)[:2] == [5, 9]
    assert PromptLookup([1, 2]).draft(5) == []
    assert PromptLookup(range(50)).draft(5) == []


def test_drafts_grow_where_they_are_right_and_rest_where_they_are_not() -> None:
    lookup = PromptLookup(list(range(30)) + list(range(NGRAM)))
    first = len(lookup.draft(99))
    lookup.emitted([3, 4, 5, 6], drafted=3)
    assert first < len(lookup.draft(99)) == LONGEST_DRAFT
    rested = 0
    for expected in (REST_TOKENS, 2 * REST_TOKENS, 4 * REST_TOKENS):
        lookup.emitted([0], drafted=LONGEST_DRAFT)
        lookup.emitted([1], drafted=0)
        lookup.emitted([2], drafted=0)
        rested = 2
        while not lookup.draft(9):
            lookup.emitted([rested % 3], drafted=0)
            rested += 1
            assert rested <= LONGEST_REST
        assert expected <= rested <= expected + NGRAM


# --- bit for bit ---------------------------------------------------------------------------------------------------------------------


def test_the_packed_body_gives_the_same_bits_alone_in_company_at_once_and_drafted(tied_model: Path) -> None:
    found = invariance(load_policy(tied_model, dtype=torch.bfloat16), tokens=8)
    assert found.compared > 50
    if can_pack(torch.bfloat16):
        assert found.holds, found


def test_in_float32_it_gives_the_same_bits_as_well(tiny_model: Path) -> None:
    policy = load_policy(tiny_model, dtype=torch.float32)
    found = invariance(policy, tokens=12)
    assert found.compared > 50
    assert isinstance(body_of(policy.model), PackedBody) == can_pack(torch.float32)
    if can_pack(torch.float32):
        assert found.holds, found


@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
def test_nothing_is_compiled_while_it_samples(tied_model: Path, tiny_model: Path, kind: str) -> None:
    """Whatever is fed: rows alone and in company, prompts, drafts. To compile holds up every thread of an engine for seconds."""
    policy = load_policy(tied_model if kind == "bfloat16" else tiny_model, dtype=getattr(torch, kind))
    body_of(policy.model)
    loops = (normed, activated, placed, attended, _multiply)
    before = [len(loop.dispatcher.signatures) for loop in loops]
    invariance(policy, tokens=8)
    assert [len(loop.dispatcher.signatures) for loop in loops] == before
    assert all(before) or not can_pack(torch.float32)


class Sociable(nn.Module):
    """A head whose numbers depend on how many rows it is given, as a product's blocks may."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.numel() // hidden.shape[-1]
        tilt = torch.arange(self.head(hidden).shape[-1]) * 1e-4 * rows
        return self.head(hidden) + tilt


def test_a_machine_whose_bits_depend_on_company_is_told(tiny_model: Path) -> None:
    sociable = load_policy(tiny_model, dtype=torch.float32)
    head: Any = sociable.model.get_output_embeddings()
    sociable.model.set_output_embeddings(Sociable(head))
    found = invariance(sociable, tokens=8)
    assert found.differing_bits > 20
    assert not found.holds


@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
def test_the_packed_body_gives_the_same_bits_on_one_thread_and_on_two(tied_model: Path, tiny_model: Path, kind: str) -> None:
    policy = load_policy(tied_model if kind == "bfloat16" else tiny_model, dtype=getattr(torch, kind))
    before = torch.get_num_threads()
    prompts = [[5 + row, 9, *range(20, 20 + 7 * row)] for row in range(12)]
    params = [SamplingParams(max_tokens=10, seed=row) for row in range(12)]
    try:
        drawn: list[list[float]] = []
        for count in (1, 2):
            torch.set_num_threads(count)
            drawn.append([value for answer in sample(policy, prompts, params) for value in answer.logprobs])
    finally:
        torch.set_num_threads(before)
    assert len(drawn[0]) > 50
    assert len(set(drawn[0])) > 50 or kind == "bfloat16"
    if can_pack(getattr(torch, kind)):
        assert drawn[0] == drawn[1]
