"""Which threads take part in a pass of the packed body: all in its products, one in what lies between them while that is small."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from app.policy.decoding.body import PADDED, WORTH_WAKING, _threads, body_of
from app.policy.decoding.keyvalues import Fed, KeyValues
from app.policy.model import load_policy
from app.policy.packing.linear import PackedLinear


class Watched(PackedLinear):
    """Knows how many threads it was multiplied on."""

    threads = 0
    breaks = False

    def product(self, inputs_NI: Tensor) -> Tensor:
        self.threads = torch.get_num_threads()
        if self.breaks:
            raise RuntimeError("out of memory")
        return super().product(inputs_NI)


@pytest.fixture(params=[1, 2])
def most(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("between", [1, WORTH_WAKING - 1, WORTH_WAKING])
def test_products_take_all_threads_and_what_lies_between_takes_one_while_it_is_small(most: int, between: int) -> None:
    layer = Watched(nn.Linear(4, 3))
    with _threads(between=between) as product:
        expected = most if between >= WORTH_WAKING else 1
        assert torch.get_num_threads() == expected
        assert product(layer, torch.ones(2, 4)).shape == (2, 3)
        assert layer.threads == most
        assert torch.get_num_threads() == expected
    assert torch.get_num_threads() == most


def test_a_product_that_breaks_leaves_all_threads_to_whoever_comes_next(most: int) -> None:
    layer = Watched(nn.Linear(4, 3))
    layer.breaks = True
    with pytest.raises(RuntimeError, match="out of memory"), _threads(between=1) as product:
        product(layer, torch.ones(2, 4))
    assert layer.threads == most
    assert torch.get_num_threads() == most


def test_positions_behind_the_end_of_the_context_are_refused(tiny_model: Path) -> None:
    """Compiled loops would read what lies behind their tables."""
    policy = load_policy(tiny_model, dtype=torch.float32)
    last = policy.model.config.get_text_config().max_position_embeddings + PADDED
    body, cache = body_of(policy.model), KeyValues(max_rows=1)
    tokens = torch.tensor([[5]])
    with torch.inference_mode():
        (states,) = body([Fed(tokens_nQ=tokens, positions_nQ=torch.tensor([[last - 1]]), width=last)], cache)
        assert states.shape[:2] == (1, 1)
        with pytest.raises(IndexError, match=f"position {last} is behind the end"):
            body([Fed(tokens_nQ=tokens, positions_nQ=torch.tensor([[last]]), width=last + 1)], cache)
