"""Compiled attention: what it weighs, by hand and beside torch's, and that a query's bits depend on its own row alone."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from app.policy.decoding.packed.attending import LANES, attended
from app.policy.decoding.packed.body import _elements
from app.policy.packing.tiles import OUTPUTS

GROUPS = 2


def attention_of(
    queries_NQHd: torch.Tensor,
    keys_RKCd: torch.Tensor,
    values_RKCd: torch.Tensor,
    positions_NQ: torch.Tensor,
    *,
    first: int = 0,
    threads: int = 1,
) -> torch.Tensor:  # fmt: skip
    """Of rows from `first` on, [N, Q, H, d], in the dtype of the cache."""
    rows, new, heads, size = queries_NQHd.shape
    group = heads // GROUPS
    queries_NKMd = queries_NQHd.view(rows, new, GROUPS, group, size).transpose(1, 2).reshape(rows, GROUPS, new * group, size).float()
    values_RKCe = values_RKCd.new_zeros(*values_RKCd.shape[:3], -(-size // OUTPUTS) * OUTPUTS)
    values_RKCe[..., :size] = values_RKCd
    out = torch.empty(rows, new, GROUPS, group, size, dtype=keys_RKCd.dtype)
    attended(
        threads, _elements(queries_NKMd), _elements(keys_RKCd.transpose(2, 3).contiguous()), _elements(values_RKCe), first,
        positions_NQ.numpy(), size**-0.5, _elements(out),
    )  # fmt: skip
    return out.view(rows, new, heads, size)


def test_by_hand() -> None:
    """Scores 0 and ln 3 · √2 / √2: weights of a quarter and three quarters; what lies behind the token is not weighed."""
    keys, values = torch.full((1, GROUPS, OUTPUTS, 2), 1e30), torch.full((1, GROUPS, OUTPUTS, 2), 1e30)
    keys[:, :, :2], values[:, :, :2] = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]]), torch.tensor([[4.0, 8.0], [0.0, 12.0]])
    queries = torch.tensor([math.sqrt(2), 5.0]).expand(1, 2, GROUPS, 2).contiguous()
    found = attention_of(queries, keys, values, torch.tensor([[0, 1]]))
    assert found[0, 0].tolist() == [[4.0, 8.0]] * 2, "the first token sees itself alone"
    assert torch.allclose(found[0, 1], torch.tensor([1.0, 11.0]), rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [8, 64, 80, 128])
@pytest.mark.parametrize(("rows", "new", "group", "threads"), [(1, 1, 1, 1), (3, 1, 3, 2), (2, 40, 4, 1), (1, 90, 3, 3)])
def test_it_gives_what_torch_does(rows: int, new: int, group: int, threads: int, size: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(size)
    capacity, first = 8 * OUTPUTS, 2
    queries = torch.randn(rows, new, GROUPS * group, size, generator=random).to(dtype)
    keys, values = torch.randn(2, first + rows, GROUPS, capacity, size, generator=random).to(dtype)
    positions = torch.randint(0, capacity - new, (rows, 1), generator=random) + torch.arange(new)
    mask = torch.arange(capacity) <= positions[:, None, :, None]
    of_heads = [held[first:].double().repeat_interleave(group, 1) for held in (keys, values)]
    expected = scaled_dot_product_attention(queries.double().transpose(1, 2), *of_heads, attn_mask=mask).transpose(1, 2)
    found = attention_of(queries, keys, values, positions, first=first, threads=threads)
    assert torch.allclose(found.double(), expected, rtol=0.0 if dtype is torch.float32 else 2.0**-8, atol=5e-6)


@given(st.data())
def test_a_query_comes_out_the_same_alone_and_beside_others(data: st.DataObject) -> None:
    """Other rows, other tokens of its own row, more threads; and whatever stands behind it, but what is no number."""
    new, width = data.draw(st.integers(1, 40)), data.draw(st.sampled_from((1, LANES - 1, LANES, OUTPUTS + 1, 5 * OUTPUTS - 40)))
    dtype = data.draw(st.sampled_from((torch.float32, torch.bfloat16)))
    random = torch.Generator().manual_seed(new)
    keys, values = torch.randn(3, GROUPS, 8 * OUTPUTS, 16, generator=random).to(dtype), torch.randn(3, GROUPS, 8 * OUTPUTS, 16).to(dtype)
    queries, positions = (
        torch.randn(3, new, GROUPS * 3, 16, generator=random).to(dtype),
        torch.arange(width - 1, width - 1 + new).expand(3, -1),
    )
    together = attention_of(queries, keys, values, positions.contiguous(), threads=data.draw(st.integers(1, 3)))
    row, query = data.draw(st.integers(0, 2)), data.draw(st.integers(0, new - 1))
    keys[:, :, width + query :], values[:, :, width + query :] = 3e4, -3e4
    own = queries[row : row + 1, query : query + 1].contiguous(), positions[row : row + 1, query : query + 1].contiguous()
    alone = attention_of(own[0], keys, values, own[1], first=row)
    assert torch.equal(alone[0, 0], together[row, query])


def test_scores_of_any_size_are_weighed_and_what_is_no_number_stays_none() -> None:
    keys, values = torch.zeros(1, GROUPS, OUTPUTS, 4), torch.arange(float(OUTPUTS)).view(1, 1, -1, 1).expand(1, GROUPS, -1, 4).contiguous()
    keys[:, :, 3] = 1.0
    for score in (1e4, -1e4, 1e37):
        found = attention_of(torch.full((1, 1, GROUPS, 4), score), keys, values, torch.tensor([[7]]))
        assert found[0, 0, 0].tolist() == pytest.approx([3.0] * 4 if score > 0 else [25 / 7] * 4)
    keys[:, :, 5] = float("nan")
    found = attention_of(torch.ones(1, 2, GROUPS, 4), keys, values, torch.tensor([[4, 5]]))
    assert not found[0, 0].isnan().any(), "which stands behind it"
    assert found[0, 1].isnan().all()


def test_a_cache_that_is_far_longer_than_a_tile_is_read_to_its_end() -> None:
    random = torch.Generator().manual_seed(1)
    capacity = 64 * OUTPUTS
    keys, values = torch.randn(2, 1, GROUPS, capacity, 32, generator=random)
    queries, positions = torch.randn(1, 2, GROUPS, 32, generator=random), torch.tensor([[capacity - 2, capacity - 1]])
    found = attention_of(queries, keys, values, positions)
    weights = np.exp((queries[0, 1, 0].double() @ keys[0, 0].double().T / math.sqrt(32)).numpy())
    assert found[0, 1, 0].tolist() == pytest.approx((weights / weights.sum() @ values[0, 0].double().numpy()).tolist(), abs=2e-6)
