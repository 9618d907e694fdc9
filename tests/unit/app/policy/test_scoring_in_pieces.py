"""What is scored is read in pieces: the same log-probabilities whatever their size, and steps between them disturb nothing."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.domain.telemetry.turns import SamplingParams
from app.policy.decoding.sampling import Decoder
from app.policy.decoding.scores import AT_ONCE
from app.policy.model import Policy, load_policy
from app.policy.tiny_moe import Architecture, write_tiny_moe
from tests.unit.app.policy.test_joining import passes
from tests.unit.app.policy.test_packing import FLOAT32_ALIKE

WHOLE = 2048
TOKENS = st.lists(st.integers(0, 511), min_size=1, max_size=150)


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Policy:
    return load_policy(tiny_model, dtype=torch.float32)


@pytest.fixture(scope="module")
def packed(tiny_model: Path) -> Policy:
    return load_policy(tiny_model, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder = tmp_path_factory.mktemp("models") / "moe"
    write_tiny_moe(folder, Architecture.QWEN3_MOE)
    return load_policy(folder, dtype=torch.float32)


def in_pieces(policy: Policy, prompt: list[int], completion: list[int], size: int, *, top_k: int = 0) -> list[float]:
    decoder = Decoder(policy, chunk=size)
    try:
        return decoder.score(prompt, completion, temperature=0.9, top_p=1.0, top_k=top_k)
    finally:
        decoder.close()


@given(prompt=TOKENS, completion=TOKENS, size=st.integers(1, 300))
@settings(max_examples=40)
def test_what_one_pass_gives_of_weights_as_they_are_served(packed: Policy, prompt: list[int], completion: list[int], size: int) -> None:
    found, whole = (in_pieces(packed, prompt, completion, most) for most in (size, WHOLE))
    assert found == pytest.approx(whole, abs=0.02)


@given(prompt=TOKENS, completion=TOKENS, size=st.integers(1, 300), top_k=st.sampled_from([0, 40]))
@settings(max_examples=40)
def test_within_rounding_what_one_pass_gives_everywhere(
    plain: Policy, prompt: list[int], completion: list[int], size: int, top_k: int
) -> None:
    found, whole = (in_pieces(plain, prompt, completion, most, top_k=top_k) for most in (size, WHOLE))
    assert found == pytest.approx(whole, abs=2e-5)
    if FLOAT32_ALIKE:
        assert found == whole


@pytest.mark.parametrize("size", [1, 5, 64, WHOLE])
def test_a_mixture_of_experts_is_scored_in_pieces_too(mixed: Policy, size: int) -> None:
    prompt, completion = [*range(20)], [*range(30, 110)]
    assert in_pieces(mixed, prompt, completion, size) == pytest.approx(in_pieces(mixed, prompt, completion, WHOLE), abs=2e-5)


@pytest.mark.parametrize(("length", "size"), [(1, 8), (70, 8), (70, 200), (300, 150)])
def test_a_piece_is_one_pass_of_so_many_tokens_or_the_scores_of_a_few_positions(plain: Policy, length: int, size: int) -> None:
    prompt, completion = [5] * 40, [(7 * n) % 512 for n in range(length)]
    scored, at_once = [0], list[tuple[int, int]]()
    head, decoder = plain.model.get_output_embeddings(), Decoder(plain, chunk=size)
    assert head is not None
    hook = head.register_forward_pre_hook(lambda _, given: scored.append(len(given[0])))
    with passes(decoder) as fed:
        for _ in decoder.scored(prompt, completion, temperature=1.0, top_p=1.0):
            at_once.append((sum(rows * tokens for rows, tokens in fed), sum(scored)))
            fed[:], scored[:] = [], [0]
    hook.remove()
    assert all((tokens == 0) != (positions == 0) for tokens, positions in at_once)
    assert max(tokens for tokens, _ in at_once) == min(size, len(prompt) + length - 1)
    assert max(positions for _, positions in at_once) == min(size, length, AT_ONCE)
    assert tuple(map(sum, zip(*at_once, strict=True))) == (len(prompt) + length - 1, length)


@pytest.mark.parametrize("which", ["plain", "packed", "mixed"])
def test_steps_between_two_pieces_disturb_neither_the_answer_nor_the_scores(request: pytest.FixtureRequest, which: str) -> None:
    policy: Policy = request.getfixturevalue(which)
    params, prompts = SamplingParams(max_tokens=30, seed=4), [[5, 6, 7], [9] * 20]

    def sampled(*scored: int) -> tuple[list[Any], list[float]]:
        decoder = Decoder(policy, max_rows=2, chunk=8, draft_rows=0)
        answers = [decoder.submit(prompt, params, record_experts=True) for prompt in prompts]
        pieces = decoder.scored([*scored[:9]], [*scored[9:]], temperature=1.0, top_p=1.0) if scored else iter(())
        found: list[float] = []
        while decoder.busy:
            decoder.step()
            found += next(pieces, [])
        found += chain.from_iterable(pieces)
        decoder.close()
        return [(answer.tokens, answer.experts) for answer in answers], found

    alone, (beside, found) = sampled()[0], sampled(*range(60))
    assert beside == alone
    assert found == pytest.approx(Decoder(policy, chunk=8).score([*range(9)], [*range(9, 60)], temperature=1.0, top_p=1.0), abs=1e-6)
