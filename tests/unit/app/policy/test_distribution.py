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


@pytest.mark.parametrize(("temperature", "chances"), [(0.0, [1.0, 0.0]), (0.99e-4, [1.0, 0.0]), (1e-4, [0.8808, 0.1192])])
def test_below_a_ten_thousandth_the_most_probable_token_is_certain(temperature: float, chances: list[float]) -> None:
    logits = torch.tensor([[2e-4, 0.0]])  # at 1e-4 two apart: e² / (e² + 1)
    found = nucleus_logprobs(logits, temperature=temperature, top_p=1.0)
    assert found.exp()[0].tolist() == pytest.approx(chances, abs=1e-4)
    assert (found[0, 0].item() == 0.0) is (temperature < 1e-4)


def test_what_is_kept_is_worked_out_for_each_row_by_its_own_top_p() -> None:
    logprobs = torch.log(torch.tensor([[0.5, 0.3, 0.2]])).expand(6, 3)
    top_p = torch.tensor([0.4, 0.6, 0.85, 1.0, 0.0, 2.0])
    kept = kept_log_mass(logprobs, top_p, torch.zeros(6, dtype=torch.int64))
    assert kept.exp().tolist() == pytest.approx([0.5, 0.8, 1.0, 1.0, 0.5, 1.0])
    assert (kept[3].item(), kept[5].item()) == (0.0, 0.0)


def test_of_several_blocks_the_token_is_found_at_its_very_edges() -> None:
    """200 tokens, of which 0, 63, 64, 127, 128 and 199 have a sixth each."""
    places = [0, 63, 64, 127, 128, 199]
    logprobs = torch.full((1, 200), -torch.inf)
    logprobs[0, places] = -math.log(6)
    uniform = torch.tensor([(place + offset) / 6 for place in range(6) for offset in (0.001, 0.5, 0.999)], dtype=torch.float64)
    assert draw(logprobs.expand(18, 200), uniform).tolist() == [token for token in places for _ in range(3)]


@pytest.mark.parametrize("vocabulary", [1, 63, 64, 65, 128, 129])
def test_the_last_token_is_the_last_that_is_drawn(vocabulary: int) -> None:
    logprobs = torch.full((2, vocabulary), -math.log(vocabulary))
    assert draw(logprobs, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)).tolist() == [0, vocabulary - 1]
