"""What lies between products in float32: what torch's own operations give, whatever else is in the pass."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from app.policy.decoding.packed.between import LANES, activated, normed, placed
from app.policy.decoding.packed.body import _elements


def normed_of(hidden_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(hidden_TD)
    normed(1, _elements(hidden_TD.clone()), _elements(torch.zeros_like(hidden_TD)), _elements(weight_D), 1e-5, _elements(out))
    return out


def turned_by_torch(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return (heads * cos).add_(heads.roll(heads.shape[-1] // 2, dims=-1).mul_(sin))


@pytest.mark.parametrize("size", [1, LANES - 1, LANES, 3 * LANES + 5, 576])
def test_rows_are_divided_by_their_root_mean_square(size: int) -> None:
    random = torch.Generator().manual_seed(size)
    hidden_TD, weight_D = 3 * torch.randn(5, size, generator=random), torch.randn(size, generator=random)
    found = normed_of(hidden_TD, weight_D)
    assert torch.allclose(found, functional.rms_norm(hidden_TD, (size,), weight_D, 1e-5), rtol=2e-6, atol=0)
    for token in range(len(hidden_TD)):
        assert torch.equal(normed_of(hidden_TD[token : token + 1].clone(), weight_D), found[token : token + 1])


def test_rows_of_bfloat16_are_rounded_before_the_weight_as_models_were_trained() -> None:
    """What transformers' modules give, but where the mean of squares, summed in another order, falls to the other side of a half."""
    random = torch.Generator().manual_seed(7)
    hidden_TD, weight_D = (3 * torch.randn(40, 576, generator=random)).bfloat16(), torch.randn(576, generator=random).bfloat16()
    expected = weight_D * (hidden_TD.float() * torch.rsqrt(hidden_TD.float().pow(2).mean(-1, keepdim=True) + 1e-5)).bfloat16()
    found = normed_of(hidden_TD, weight_D)
    assert (found != expected).float().mean() < 1e-3
    assert torch.allclose(found.float(), expected.float(), rtol=2**-7, atol=0)


def test_a_row_of_zeros_stays_one_and_by_hand() -> None:
    """(3, 4): the mean of squares is 12.5."""
    assert normed_of(torch.zeros(1, 2), torch.ones(2)).tolist() == [[0.0, 0.0]]
    assert normed_of(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]))[0].tolist() == pytest.approx([3 / 12.5**0.5, 8 / 12.5**0.5])


def activated_of(gate_T: torch.Tensor, up_T: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(gate_T)[None]
    activated(1, _elements(torch.cat([gate_T, up_T])[None]), _elements(out))
    return out[0]


def test_gates_open_as_far_as_true_ones_do() -> None:
    """Within three units of 2^-24 (torch's own silu is not closer), from where they are shut to where they are wide open."""
    gates = torch.cat([torch.linspace(-87, 87, 100_001), torch.randn(10_000, generator=torch.Generator().manual_seed(1))])
    true = gates.double() / (1 + torch.exp(-gates.double()))
    assert ((activated_of(gates, torch.ones_like(gates)).double() - true).abs() <= 3 * 2.0**-24 * true.abs()).all()
    edges = torch.tensor([0.0, -1e4, 1e4, -90.0, 90.0, float("inf")])
    assert activated_of(edges, torch.full_like(edges, 2.0)).tolist() == [0.0, 0.0, 2e4, 0.0, 180.0, float("inf")]
    assert activated_of(torch.tensor([float("nan"), 1.0]), torch.tensor([1.0, float("nan")])).isnan().all()


def test_gates_of_bfloat16_are_rounded_before_what_they_let_through() -> None:
    """What torch's own operations give, but where its silu falls to the other side of a half."""
    gates, up = (4 * torch.randn(2, 20_000, generator=torch.Generator().manual_seed(1))).bfloat16()
    found, expected = activated_of(gates, up), functional.silu(gates) * up
    assert (found != expected).float().mean() < 1e-3
    assert torch.allclose(found.float(), expected.float(), rtol=2**-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_what_a_layer_gave_is_added_before_and_stays(dtype: torch.dtype, threads: int) -> None:
    """To the last bit as torch adds it; on however many threads, more than there are tokens too."""
    hidden_TD, added_TD, weight_D = torch.randn(4, 40).to(dtype), torch.randn(4, 40).to(dtype), torch.randn(40).to(dtype)
    expected, out = hidden_TD + added_TD, torch.empty_like(hidden_TD)
    normed(threads, _elements(hidden_TD), _elements(added_TD), _elements(weight_D), 1e-5, _elements(out))
    assert torch.equal(hidden_TD, expected)
    assert torch.equal(out, normed_of(expected, weight_D))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "new", "group", "threads"), [(1, 1, 3, 1), (3, 1, 1, 2), (2, 5, 2, 1), (2, 5, 2, 3)])
def test_heads_are_turned_and_put_where_attention_reads_them(rows: int, new: int, group: int, threads: int, dtype: torch.dtype) -> None:
    """To the last bit as torch turns them; what lies elsewhere in the cache stays."""
    groups, size, room, capacity, first = 2, 8, 9, 11, 4
    random = torch.Generator().manual_seed(rows)
    qkv_TSd = torch.randn(rows * new, groups * group + 2 * groups, size, generator=random).to(dtype)
    cos_Cd, sin_Cd = torch.randn(2, capacity, size, generator=random).to(dtype)
    positions_NQ = torch.arange(new) + torch.randint(0, capacity - new, (rows, 1), generator=random)
    keys = torch.randn(8, groups, size, capacity, generator=random).to(dtype)
    values = torch.randn(8, groups, capacity, room, generator=random).to(dtype)
    queries = torch.zeros(rows, groups, new * group, size)
    keys_before, values_before = keys.clone(), values.clone()
    placed(
        threads, _elements(qkv_TSd), positions_NQ.numpy(), first, _elements(cos_Cd), _elements(sin_Cd), _elements(keys), _elements(values),
        _elements(queries),
    )  # fmt: skip
    at = positions_NQ.flatten()
    turned = turned_by_torch(qkv_TSd, cos_Cd[at][:, None], sin_Cd[at][:, None]).view(rows, new, -1, size)
    expected = turned[:, :, : groups * group].view(rows, new, groups, group, size).transpose(1, 2)
    assert torch.equal(queries, expected.reshape(queries.shape).float())
    for row in range(rows):
        for query in range(new):
            place = first + row, slice(None), int(positions_NQ[row, query])
            key = first + row, slice(None), slice(None), int(positions_NQ[row, query])
            assert torch.equal(keys[key], turned[row, query, groups * group : groups * (group + 1)])
            assert torch.equal(values[place][:, :size], qkv_TSd.view(rows, new, -1, size)[row, query, groups * (group + 1) :])
            keys_before[key], values_before[place][:, :size] = keys[key], values[place][:, :size]
    assert torch.equal(keys, keys_before)
    assert torch.equal(values, values_before)


def test_a_half_that_is_turned_by_a_quarter_becomes_the_other_half() -> None:
    qkv_TSd = torch.tensor([[[1.0, 2.0, 3.0, 4.0]] * 3])
    cos_Cd, sin_Cd = torch.zeros(1, 4), torch.tensor([[-1.0, -1.0, 1.0, 1.0]])
    keys, values, queries = np.zeros((1, 1, 4, 1), np.float32), np.zeros((1, 1, 1, 4), np.float32), np.zeros((1, 1, 1, 4), np.float32)
    placed(1, qkv_TSd.numpy(), np.zeros((1, 1), np.int64), 0, cos_Cd.numpy(), sin_Cd.numpy(), keys, values, queries)
    assert queries.ravel().tolist() == keys.ravel().tolist() == [-3.0, -4.0, 1.0, 2.0]
    assert values.ravel().tolist() == [1.0, 2.0, 3.0, 4.0]


PATTERNS = st.integers(0, 0xFFFF)


@given(st.lists(st.tuples(PATTERNS, PATTERNS, PATTERNS, PATTERNS), min_size=1, max_size=20))
def test_whatever_bfloat16_is_turned_it_is_rounded_as_torch_rounds_it(pairs: list[tuple[int, int, int, int]]) -> None:
    """Infinities, subnormal numbers, halves between two, and what is no number, which stays none."""
    one, other, cos, sin = (
        torch.tensor(column, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16) for column in zip(*pairs, strict=True)
    )
    heads_Td, cos_Cd, sin_Cd = torch.stack([one, other], 1), torch.stack([cos, cos], 1), torch.stack([sin, sin], 1)
    count = len(pairs)
    keys, values, queries = torch.zeros(2, count).bfloat16(), torch.zeros(count, 2).bfloat16(), torch.zeros(count, 2)
    placed(
        1, _elements(heads_Td[:, None].expand(-1, 3, -1).contiguous()), np.arange(count)[None], 0, _elements(cos_Cd), _elements(sin_Cd),
        _elements(keys[None, None]), _elements(values[None, None]), _elements(queries[None, None]),
    )  # fmt: skip
    expected = turned_by_torch(heads_Td, cos_Cd, sin_Cd)
    for found in (keys.T, queries):
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.float().nan_to_num(nan=0.0).view(torch.int32), expected.float().nan_to_num(nan=0.0).view(torch.int32))
    assert torch.equal(values.view(torch.int16), heads_Td.view(torch.int16))
