"""Temperature, top-p and drawing, on numbers small enough to work out by hand."""

import math

import pytest
import torch

from app.policy.distribution import draw, kept_log_mass, nucleus_logprobs

LOGITS = torch.tensor([[math.log(0.5), math.log(0.3), math.log(0.2)]])


def test_temperature_one_and_top_p_one_are_the_softmax() -> None:
    assert nucleus_logprobs(LOGITS, temperature=1.0, top_p=1.0).exp()[0].tolist() == pytest.approx([0.5, 0.3, 0.2])


def test_temperature_raises_probabilities_to_its_inverse() -> None:
    # T = 0.5 squares: 0.25, 0.09, 0.04 of 0.38
    found = nucleus_logprobs(LOGITS, temperature=0.5, top_p=1.0).exp()[0].tolist()
    assert found == pytest.approx([25 / 38, 9 / 38, 4 / 38])
    # T = 2, the highest that may be asked for, takes roots: of 16, 4 and 1 of 21 they are 4, 2 and 1 of 7
    logits = torch.tensor([[math.log(16 / 21), math.log(4 / 21), math.log(1 / 21)]])
    assert nucleus_logprobs(logits, temperature=2.0, top_p=1.0).exp()[0].tolist() == pytest.approx([4 / 7, 2 / 7, 1 / 7])


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1e-300, [1.0, 0.0, 0.0]), (1e-45, [1.0, 0.0, 0.0]), (0.4, [1.0, 0.0, 0.0]), (0.6, [0.625, 0.375, 0.0]), (0.85, [0.5, 0.3, 0.2])],
)
def test_the_nucleus_is_the_smallest_set_that_reaches_top_p(top_p: float, kept: list[float]) -> None:
    assert nucleus_logprobs(LOGITS, temperature=1.0, top_p=top_p).exp()[0].tolist() == pytest.approx(kept)


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept", "mass"),
    [
        (1, 1.0, [1.0, 0.0, 0.0], 0.5), (2, 1.0, [0.625, 0.375, 0.0], 0.8), (3, 1.0, [0.5, 0.3, 0.2], 1.0), (9, 1.0, [0.5, 0.3, 0.2], 1.0),
        (0, 0.6, [0.625, 0.375, 0.0], 0.8), (2, 0.6, [1.0, 0.0, 0.0], 0.5),  # of the two that are left the first has 0.625
    ],
)  # fmt: skip
def test_top_k_keeps_the_likeliest_and_top_p_cuts_what_that_left(top_k: int, top_p: float, kept: list[float], mass: float) -> None:
    assert nucleus_logprobs(LOGITS, temperature=1.0, top_p=top_p, top_k=top_k).exp()[0].tolist() == pytest.approx(kept)
    rows = torch.log_softmax(LOGITS, -1).expand(2, 3)  # beside one that nothing cuts
    found = kept_log_mass(rows, torch.tensor([top_p, 1.0]), torch.tensor([top_k, 0]))
    assert found.exp().tolist() == pytest.approx([mass, 1.0])


def test_tokens_as_likely_as_the_last_one_kept_stay() -> None:
    logits = torch.tensor([[0.4, 0.2, 0.2, 0.2]]).log()
    assert nucleus_logprobs(logits, temperature=1.0, top_p=1.0, top_k=2).exp()[0].tolist() == pytest.approx([0.4, 0.2, 0.2, 0.2])


def test_a_large_vocabulary_keeps_the_same_nucleus_as_sorting_all_of_it() -> None:
    logits = torch.randn(4, 20_000, generator=torch.Generator().manual_seed(1)) * torch.tensor([[0.1], [1.0], [3.0], [8.0]])
    for top_p in (0.3, 0.9, 0.999):
        found = nucleus_logprobs(logits, temperature=1.0, top_p=top_p)
        probability = torch.softmax(logits, -1)
        ordered, order = probability.sort(-1, descending=True)
        kept = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, ordered.cumsum(-1) - ordered < top_p)
        expected = torch.where(kept, probability, 0.0)
        assert torch.allclose(found.exp(), expected / expected.sum(-1, keepdim=True), atol=1e-6)


def test_drawing_inverts_the_cumulative_distribution() -> None:
    logprobs = LOGITS.expand(5, 3)
    uniform = torch.tensor([0.0, 0.49, 0.51, 0.79, 1 - 2**-53], dtype=torch.float64)
    assert draw(logprobs, uniform).tolist() == [0, 0, 1, 1, 2]


def test_a_token_without_probability_is_never_drawn() -> None:
    logprobs = torch.log(torch.tensor([[0.0, 1.0, 0.0]])).expand(3, 3)
    assert draw(logprobs, torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)).tolist() == [1, 1, 1]


def test_drawn_frequencies_are_the_probabilities() -> None:
    uniform = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    counts = torch.bincount(draw(LOGITS.expand(20_000, 3), uniform), minlength=3) / 20_000
    # three standard errors of a share of a half over 20,000 draws are 0.0106
    assert counts.tolist() == pytest.approx([0.5, 0.3, 0.2], abs=0.0106)
