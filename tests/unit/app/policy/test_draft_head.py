"""A draft head may be wrong, stale or a liar: answers are the same, and only time is lost; what is no head is refused in a sentence."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor

from app.domain.errors import BadInput
from app.domain.telemetry.turns import SamplingParams
from app.policy.decoding.draft_head import DraftHead, HeadDrafter, check_head, head_of
from app.policy.decoding.guessing import guessed
from app.policy.decoding.payoff import LONGEST, Pace, Payoff
from app.policy.decoding.sampling import Decoder, Generation
from app.policy.model import Policy, load_policy
from app.policy.packing.products import can_pack
from tests.fakes.toys import following, walk, write_toy
from tests.unit.app.policy.test_speculation import LENGTH, VOCABULARY, Table

HIDDEN = 128


class Liar:
    """Drafts by a rule of its own, whatever the states are."""

    def __init__(self, rule: Any) -> None:
        self.rule = rule

    def draft(
        self, states_ND: Tensor, tokens: Sequence[int], uniforms: Sequence[Sequence[float]], sampling: Sequence[SamplingParams]
    ) -> list[list[int]]:
        assert len(states_ND) == len(tokens) == len(uniforms) == len(sampling)
        return [[self.rule(token, place) for place in range(len(uniforms[0]))] for token in tokens]


class Eager(Payoff):
    """Never asks whether it pays."""

    def allows(self, rows: int) -> bool:
        return True

    def took(self, *, rows: int, seconds: float, emitted: int | None) -> None:
        assert rows > 0
        assert seconds > 0
        assert emitted is None or emitted >= rows


def a_head(*, hidden: int = HIDDEN, vocabulary: Sequence[int] = tuple(range(300)), seed: int = 0) -> DraftHead:
    head = DraftHead(hidden=hidden, inner=32, vocabulary=vocabulary)
    head.begin(torch.ones(hidden), seed=seed)
    return head.eval().requires_grad_(False)


def answered(policy: Policy, params: Sequence[SamplingParams], head: Any, *, rows: int = 1) -> tuple[list[Generation], Decoder]:
    decoder = Decoder(policy, max_rows=rows)
    decoder.drafting.equip(head)
    decoder.drafting.payoff = Eager()
    answers = [decoder.submit([5, 6, 40 + 3 * index], each) for index, each in enumerate(params)]
    while decoder.busy:
        decoder.step()
    decoder.close()
    return answers, decoder


@pytest.fixture(scope="module")
def policy(tiny_model: Path) -> Policy:
    return load_policy(tiny_model, dtype=torch.float32)


@pytest.fixture(scope="module")
def toy(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder = tmp_path_factory.mktemp("models") / "toy"
    write_toy(folder, tiny_model)
    return load_policy(folder, dtype=torch.float32)


# --- the answer stays the same -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", range(VOCABULARY))
def test_every_sequence_comes_exactly_as_often_as_the_target_says_whatever_a_head_drafts(policy: Policy, shift: int) -> None:
    """All 125 sequences of three, as in `test_speculation`, with a head that drafts another token at every place."""
    table = Table()
    five = Policy(digest="5" * 64, model=table, chat=policy.chat, context=16, end_tokens=frozenset())  # pyright: ignore[reportArgumentType]
    drafted = 0
    for wanted in itertools.product(range(VOCABULARY), repeat=LENGTH):
        uniforms, logprob, last = list[float](), 0.0, 2
        for place, token in enumerate(wanted):
            chances = table.chances(last, 2 + place)
            uniforms.append(float(chances[:token].sum() + chances[token] / 2))
            logprob, last = logprob + math.log(chances[token]), token
        decoder = Decoder(five, max_rows=1)
        decoder.drafting.equip(Liar(lambda token, place: (token + place + shift) % VOCABULARY))
        decoder.drafting.payoff = Eager()
        answer = decoder.submit([0, 1, 2], SamplingParams(max_tokens=LENGTH))
        answer.uniforms = list(uniforms)
        while decoder.busy:
            decoder.step()
        assert tuple(answer.tokens) == wanted
        assert sum(answer.logprobs) == pytest.approx(logprob, abs=1e-5)
        drafted += decoder.drafting.by_head.drafted
    assert drafted >= VOCABULARY**LENGTH


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.7}, {"temperature": 0.0}, {"temperature": 1.3, "stop": ("e",)}], ids=str)
@pytest.mark.parametrize("kind", ["random", "lying", "constant"])
def test_seeded_answers_are_the_same_with_any_head(policy: Policy, kind: str, sampling: dict[str, Any]) -> None:
    heads = {
        "random": HeadDrafter(a_head(), policy),
        "lying": Liar(lambda token, place: token ^ (place + 1)),
        "constant": Liar(lambda *_: 7),
    }
    params = [SamplingParams(max_tokens=16, seed=seed, **sampling) for seed in range(3)]
    plain, _ = answered(policy, params, None, rows=3)
    found, decoder = answered(policy, params, heads[kind], rows=3)
    assert [answer.tokens for answer in found] == [answer.tokens for answer in plain]
    assert [answer.text for answer in found] == [answer.text for answer in plain]
    for one, other in zip(found, plain, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert one.finish_reason is other.finish_reason
    assert decoder.drafting.by_head.drafted > 0 or max(len(answer.tokens) for answer in plain) < 4, "nothing is left to draft"


def test_a_head_changes_no_bit_where_the_machine_allows_that(tied_model: Path) -> None:
    packed = load_policy(tied_model, dtype=torch.bfloat16)
    params = [SamplingParams(max_tokens=12, seed=seed) for seed in range(3)]
    plain, _ = answered(packed, params, None, rows=3)
    found, decoder = answered(packed, params, HeadDrafter(a_head(), packed), rows=3)
    assert decoder.drafting.by_head.drafted
    if can_pack(torch.bfloat16):
        assert [answer.logprobs for answer in found] == [answer.logprobs for answer in plain]


class Oracle:
    """Knows the distribution of `Table` and nothing else: drafts as heads do, or the most probable token."""

    def __init__(self, table: Table, reach: float) -> None:
        self.table, self.reach, self.at = table, reach, 0

    def draft(
        self, states_ND: Tensor, tokens: Sequence[int], uniforms: Sequence[Sequence[float]], sampling: Sequence[SamplingParams]
    ) -> list[list[int]]:
        chances = self.table.chances(tokens[0], self.at)
        return [[int(guessed(torch.as_tensor(chances).log()[None], torch.tensor([uniforms[0][0]]), reach=self.reach))]]


@pytest.mark.parametrize(("reach", "least", "most"), [(1e-6, 1.0, 1.0), (1.0, 0.2, 0.6)], ids=["at the number", "most probable"])
def test_whoever_knows_the_target_and_the_number_is_always_right_and_the_most_probable_token_is_not(
    policy: Policy, reach: float, least: float, most: float
) -> None:
    table = Table()
    five = Policy(digest="5" * 64, model=table, chat=policy.chat, context=64, end_tokens=frozenset())  # pyright: ignore[reportArgumentType]
    decoder, oracle = Decoder(five, max_rows=1), Oracle(table, reach)
    decoder.drafting.equip(oracle)
    decoder.drafting.payoff = Eager()
    for seed in range(40):
        answer = decoder.submit([0, 1, 2], SamplingParams(max_tokens=6, seed=seed))
        while decoder.busy:
            oracle.at = 2 + len(answer.tokens)
            answer.pace = Pace()  # one token ahead, always
            decoder.step()
    share = decoder.drafting.by_head.accepted / decoder.drafting.by_head.drafted
    assert decoder.drafting.by_head.drafted >= 80
    assert least <= share <= most


def test_each_row_is_drafted_for_as_it_is_sampled_and_with_its_own_numbers(policy: Policy) -> None:
    drafter = HeadDrafter(a_head(seed=3), policy)
    states, tokens = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(7)) * 3, torch.tensor([5, 6, 7])
    uniforms = torch.tensor([[0.1, 0.9], [0.1, 0.9], [0.6, 0.2]])
    ways = [SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(temperature=0.5, top_p=0.5)]
    together = drafter.draft_all(states, tokens, uniforms, ways)
    for row in range(3):
        alone = drafter.draft_all(states[row : row + 1], tokens[row : row + 1], uniforms[row : row + 1], ways[row : row + 1])
        assert torch.equal(together[row], alone[0])
    same = [drafter.draft_all(states, tokens, numbers, [ways[1]] * 3) for numbers in (uniforms, 1 - uniforms)]
    assert torch.equal(*same), "at temperature 0 a number draws nothing"
    other = [drafter.draft_all(states, tokens, torch.full((3, 1), number), [ways[0]] * 3) for number in (0.01, 0.99)]
    assert not torch.equal(*other)


def test_a_head_that_is_right_saves_steps(toy: Policy) -> None:
    params = [SamplingParams(max_tokens=40, seed=1)]
    plain, slow = answered(toy, params, None)
    assert tuple(plain[0].tokens) == walk(40, 40)
    found, quick = answered(toy, params, Liar(lambda token, place: walk(token, place + 1)[-1]))
    assert found[0].tokens == plain[0].tokens
    assert quick.fed - quick.prompted < 45
    assert quick.drafting.by_head.accepted >= 25
    assert following(40) == 49
    assert slow.drafting.said() == {"lookup": {"drafted": 0, "accepted": 0, "acceptance": None}}


def test_lookup_comes_first_and_each_drafter_is_counted_by_itself(toy: Policy) -> None:
    decoder = Decoder(toy, max_rows=1)
    decoder.drafting.equip(Liar(lambda token, place: walk(token, place + 1)[-1]))
    decoder.drafting.payoff = Eager()
    decoder.submit([40, *walk(40, 70), 40], SamplingParams(max_tokens=60, seed=1))
    while decoder.busy:
        decoder.step()
    lookup, head = decoder.drafting.by_lookup, decoder.drafting.by_head
    assert lookup.accepted > 0
    assert (decoder.drafted, decoder.accepted) == (lookup.drafted + head.drafted, lookup.accepted + head.accepted)


# --- adaptive ------------------------------------------------------------------------------------------------------------------------


def test_an_answer_is_drafted_further_ahead_while_it_is_right() -> None:
    pace = Pace()
    lengths = []
    for _ in range(4):
        lengths.append(pace.length)
        pace.emitted(pace.length + 1, drafted=pace.length)
    assert lengths == [1, 2, 3, LONGEST]
    pace.emitted(1, drafted=3)
    for _ in range(8):
        assert pace.length == 1, "whether it pays is asked of all answers together"
        pace.emitted(1, drafted=1)
    pace.emitted(2, drafted=1)
    pace.emitted(9, drafted=0)
    assert pace.length == 2, "what lookup drafted says nothing"
    pace.emitted(2, drafted=2)
    assert pace.length == 1, "as far as it was right"


def fed(payoff: Payoff, *, cost: float, tokens: float, steps: int) -> int:
    """Steps in which it drafted, of so many; a plain one takes a second."""
    drafted = 0
    for _ in range(steps):
        if payoff.allows(1):
            payoff.took(rows=1, seconds=cost, emitted=round(tokens))
            drafted += 1
        else:
            payoff.took(rows=1, seconds=1.0, emitted=None)
    return drafted


def test_a_head_that_loses_is_switched_off_and_costs_less_than_three_per_cent() -> None:
    payoff, steps = Payoff(), 4000
    assert not payoff.allows(1), "nothing is known of this machine yet"
    drafted = fed(payoff, cost=1.4, tokens=1, steps=steps)
    assert payoff.state == "resting"
    assert payoff.gain == pytest.approx(1 / 1.4)
    assert drafted == 2 * Payoff.WINDOW
    assert steps / (steps + 0.4 * drafted) > 0.97
    assert fed(payoff, cost=1.4, tokens=1, steps=2000) == 0, "twice as long the second time"


def test_a_head_that_pays_goes_on_and_one_that_begins_to_lose_does_not() -> None:
    payoff = Payoff()
    drafted = fed(payoff, cost=1.4, tokens=3, steps=2000)
    assert drafted > 1800
    assert (payoff.state, payoff.gain) == ("drafting", pytest.approx(3 / 1.4))
    assert fed(payoff, cost=1.4, tokens=1, steps=2000) <= (Payoff.NEWEST + 1) * Payoff.WINDOW
    assert payoff.state == "resting"


def lucky(*, chance: float, cost: float, steps: int, seed: int) -> tuple[int, float]:
    """Of so many steps those that drafted, and how many times as long all of their tokens would take without."""
    payoff, random, drafted, took, tokens = Payoff(), Random(seed), 0, 0.0, 0
    for _ in range(steps):
        emitted, seconds = 1, random.uniform(0.95, 1.05)
        if payoff.allows(1):
            emitted, seconds, drafted = 1 + (random.random() < chance), seconds * cost, drafted + 1
            payoff.took(rows=1, seconds=seconds, emitted=emitted)
        else:
            payoff.took(rows=1, seconds=seconds, emitted=None)
        took, tokens = took + seconds, tokens + emitted
    return drafted, tokens / took


def test_a_small_gain_is_not_given_up_for_bad_luck_nor_a_small_loss_kept() -> None:
    """Of a head that is right at .25 of all places for 1.14 of a step's time (1.096), and one at .1 (.965)."""
    pays, loses = ([lucky(chance=chance, cost=1.14, steps=2000, seed=seed) for seed in range(40)] for chance in (0.25, 0.1))
    assert fmean(drafted for drafted, _ in pays) > 0.8 * 2000
    assert fmean(gain for _, gain in pays) > 1.06
    assert fmean(drafted for drafted, _ in loses) < 0.2 * 2000
    assert min(gain for _, gain in loses) > 0.98


def test_one_step_that_another_program_held_up_switches_nothing_off() -> None:
    payoff = Payoff()
    fed(payoff, cost=1.2, tokens=2, steps=Payoff.PLAIN + Payoff.WINDOW - 1)
    payoff.took(rows=1, seconds=1000.0, emitted=2)
    assert payoff.state == "drafting"


# --- refused -------------------------------------------------------------------------------------------------------------------------


def test_a_stored_head_drafts_what_it_drafted(policy: Policy) -> None:
    head = a_head()
    again = head_of(head.tensors())
    states, tokens = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(5)), torch.tensor([5, 6, 7, 8])
    asked = torch.rand(4, 3), [SamplingParams()] * 4
    drafted = HeadDrafter(again, policy).draft_all(states, tokens, *asked)
    assert drafted.shape == (4, 3)
    assert torch.equal(drafted, HeadDrafter(head_of(again.tensors()), policy).draft_all(states, tokens, *asked))


@pytest.mark.parametrize(
    ("head", "sentence"),
    [
        (a_head(hidden=64), "states of 64 numbers, the model's have 128"),
        (a_head(vocabulary=[3, 512]), "outside of the model's vocabulary of 512"),
        (a_head(vocabulary=[-1, 3]), "outside of the model's vocabulary"),
    ],
)
def test_a_head_of_another_model_is_refused_with_the_cure(policy: Policy, head: DraftHead, sentence: str) -> None:
    with pytest.raises(BadInput, match=f"{sentence}.*ratchet model draft"):
        HeadDrafter(head, policy)


def test_a_head_of_no_numbers_is_refused_and_would_only_be_slow(policy: Policy) -> None:
    head = a_head()
    head.down.weight.fill_(math.nan)
    with pytest.raises(BadInput, match="not finite"):
        check_head(head, policy)
    drafter = HeadDrafter(a_head(), policy)
    drafted = drafter.draft_all(torch.full((2, HIDDEN), math.nan), torch.tensor([5, 6]), torch.rand(2, 2), [SamplingParams()] * 2)
    assert bool(((drafted >= 0) & (drafted < 300)).all())


@pytest.mark.parametrize("broken", ["lacking", "other shape", "foreign"])
def test_tensors_that_are_no_head_are_refused(broken: str) -> None:
    tensors = a_head().tensors()
    if broken == "lacking":
        del tensors["join.weight"]
    elif broken == "other shape":
        tensors["after"] = torch.ones(3)
    else:
        tensors = {"weight": torch.ones(2, 2)}
    with pytest.raises(BadInput, match="no draft head"):
        head_of(tensors)


def test_an_answer_ends_where_it_would_while_a_head_drafts(toy: Policy) -> None:
    right = Liar(lambda token, place: walk(token, place + 1)[-1])
    for last in range(1, 8):
        found, _ = answered(toy, [SamplingParams(max_tokens=last, seed=1)], right)
        assert tuple(found[0].tokens) == walk(40, last)
        found, _ = answered(replace(toy, context=3 + last), [SamplingParams(max_tokens=99, seed=1)], right)
        assert tuple(found[0].tokens) == walk(40, last)
