"""Which token is drafted where the number is known that one is drawn with, by hand; and the number that a token was drawn with."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.policy.decoding.guessing import guessed
from app.policy.distribution import draw, drawing, nucleus_logprobs

CHANCES = (0.3, 0.1, 0.4, 0.2)
"""Stretches 0 to .3, .3 to .4, .4 to .8, .8 to 1."""


@pytest.mark.parametrize(
    ("number", "reach", "wanted"),
    [
        (0.05, 1e-6, 0), (0.35, 1e-6, 1), (0.41, 1e-6, 2), (0.99, 1e-6, 3), (0.0, 1e-6, 0),
        (0.05, 1.0, 2), (0.99, 1.0, 2), (0.35, 1.0, 2),
        # within .1 of .35 are .05, .1 and .05 of the first three; within .2 of .34 .16, .1 and .14, of .36 .14, .1 and .16
        (0.35, 0.1, 1), (0.34, 0.2, 0), (0.36, 0.2, 2),
        # nothing lies below 0 and above 1
        (0.0, 0.2, 0), (0.95, 0.1, 3), (0.9, 0.45, 2),
    ],
)  # fmt: skip
def test_what_has_most_of_its_stretch_near_the_number_is_drafted(number: float, reach: float, wanted: int) -> None:
    assert guessed(torch.tensor([CHANCES]).log(), torch.tensor([number], dtype=torch.float64), reach=reach).tolist() == [wanted]


def test_rows_have_numbers_of_their_own_and_need_not_sum_to_one() -> None:
    logprobs = torch.tensor([CHANCES, CHANCES, (1.0, 0.0, 0.0, 0.0)]).log() + torch.tensor([[0.0], [-2.0], [1.0]])
    assert guessed(logprobs, torch.tensor([0.05, 0.99, 0.99]), reach=1e-4).tolist() == [0, 3, 0]


@given(st.data())
def test_a_number_with_which_a_token_is_drawn_draws_it(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 200))
    logits = torch.randn(5, size, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))) * 2
    logprobs = nucleus_logprobs(logits, temperature=1.0, top_p=data.draw(st.sampled_from((0.5, 1.0))))
    tokens = torch.tensor([data.draw(st.sampled_from(row.isfinite().nonzero()[:, 0].tolist())) for row in logprobs])
    part = torch.tensor(data.draw(st.lists(st.floats(0.01, 0.99), min_size=5, max_size=5)))
    numbers = drawing(logprobs, tokens, part)
    assert bool(((numbers >= 0) & (numbers < 1)).all())
    assert torch.equal(draw(logprobs, numbers), tokens)


def test_the_number_of_a_token_by_hand() -> None:
    numbers = drawing(torch.tensor([CHANCES] * 4).log(), torch.arange(4), torch.tensor([0.0, 0.5, 0.25, 0.9]))
    assert numbers.tolist() == pytest.approx([0.0, 0.35, 0.5, 0.98])
