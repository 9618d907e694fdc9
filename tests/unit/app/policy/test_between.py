"""What lies between products in float32: what torch's own operations give, whatever else is in the pass."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from app.policy.decoding.body import _elements
from app.policy.decoding.packed.between import LANES, activated, normed, placed


def normed_of(hidden_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(hidden_TD)
    normed(_elements(hidden_TD), _elements(weight_D), 1e-5, _elements(out))
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
    activated(_elements(torch.cat([gate_T, up_T])[None]), _elements(out))
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
@pytest.mark.parametrize(("rows", "new", "group", "idle"), [(1, 1, 3, 1), (3, 1, 1, 0), (2, 5, 2, 0)])
def test_heads_are_turned_and_put_where_attention_reads_them(rows: int, new: int, group: int, idle: int, dtype: torch.dtype) -> None:
    """To the last bit as torch turns them; what lies elsewhere in the cache stays."""
    groups, size, capacity, first = 2, 8, 11, 4
    random = torch.Generator().manual_seed(rows)
    qkv_TSd = torch.randn(rows * new, groups * group + 2 * groups, size, generator=random).to(dtype)
    cos_Cd, sin_Cd = torch.randn(2, capacity, size, generator=random).to(dtype)
    positions_NQ = torch.arange(new) + torch.randint(0, capacity - new, (rows, 1), generator=random)
    keys, values = torch.randn(2, 8, groups, capacity, size, generator=random).to(dtype)
    queries = torch.zeros(rows, groups, group + idle, new, size, dtype=dtype)
    keys_before, values_before = keys.clone(), values.clone()
    placed(
        _elements(qkv_TSd), positions_NQ.numpy(), first, _elements(cos_Cd), _elements(sin_Cd), _elements(keys), _elements(values),
        _elements(queries),
    )  # fmt: skip
    at = positions_NQ.flatten()
    turned = turned_by_torch(qkv_TSd, cos_Cd[at][:, None], sin_Cd[at][:, None]).view(rows, new, -1, size)
    expected = turned[:, :, : groups * group].view(rows, new, groups, group, size).permute(0, 2, 3, 1, 4)
    assert torch.equal(queries[:, :, :group], expected)
    assert not queries[:, :, group:].any()
    for row in range(rows):
        for query in range(new):
            place = first + row, slice(None), int(positions_NQ[row, query])
            assert torch.equal(keys[place], turned[row, query, groups * group : groups * (group + 1)])
            assert torch.equal(values[place], qkv_TSd.view(rows, new, -1, size)[row, query, groups * (group + 1) :])
            keys_before[place], values_before[place] = keys[place], values[place]
    assert torch.equal(keys, keys_before)
    assert torch.equal(values, values_before)


def test_a_half_that_is_turned_by_a_quarter_becomes_the_other_half() -> None:
    qkv_TSd = torch.tensor([[[1.0, 2.0, 3.0, 4.0]] * 3])
    cos_Cd, sin_Cd = torch.zeros(1, 4), torch.tensor([[-1.0, -1.0, 1.0, 1.0]])
    keys, values, queries = np.zeros((1, 1, 1, 4), np.float32), np.zeros((1, 1, 1, 4), np.float32), np.zeros((1, 1, 1, 1, 4), np.float32)
    placed(qkv_TSd.numpy(), np.zeros((1, 1), np.int64), 0, cos_Cd.numpy(), sin_Cd.numpy(), keys, values, queries)
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
    found, keys, values = torch.zeros(3, count, 2).bfloat16()
    placed(
        _elements(heads_Td[:, None].expand(-1, 3, -1).contiguous()), np.arange(count)[None], 0, _elements(cos_Cd), _elements(sin_Cd),
        _elements(keys[None, None]), _elements(values[None, None]), _elements(found[None, None, None]),
    )  # fmt: skip
    expected = turned_by_torch(heads_Td, cos_Cd, sin_Cd)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(nan=0.0).view(torch.int16), expected.nan_to_num(nan=0.0).view(torch.int16))
    assert torch.equal(values.view(torch.int16), heads_Td.view(torch.int16))
