"""The rounding between masters and what is served: exact where it can be, right on average, and still where nothing moved."""

import pytest
import torch

from pipelines.training.numerics.rounding import PERIOD, round_into, rounded


def test_values_of_bfloat16_stay_what_they_are() -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    finite = every[torch.isfinite(every)]
    assert torch.equal(rounded(finite).view(torch.int32), finite.view(torch.int32))
    assert rounded(torch.tensor([torch.inf, -torch.inf])).tolist() == [torch.inf, -torch.inf]
    assert bool(rounded(torch.full((PERIOD,), torch.nan)).isnan().all())


def test_what_is_rounded_is_a_neighbour_of_the_master() -> None:
    masters = torch.randn(3 * PERIOD // 2, generator=torch.Generator().manual_seed(0)) * 0.05
    found = rounded(masters)
    assert torch.equal(found.bfloat16().float(), found)
    gap = torch.finfo(torch.bfloat16).eps * masters.abs()
    assert bool(((found - masters).abs() <= gap).all())


@pytest.mark.parametrize("remainder", [0.02, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_step_too_small_for_bfloat16_arrives_on_average(remainder: float, sign: float) -> None:
    # between 1 and 2 the neighbours are 1/128 apart; of n places a share `remainder` has to go up, give or take 5 standard errors
    masters = torch.full((PERIOD,), sign * (1.0 + remainder / 128))
    share = float(((rounded(masters) - sign) * sign * 128).mean())
    assert share == pytest.approx(remainder, abs=5 * (remainder * (1 - remainder) / PERIOD) ** 0.5)


def test_parts_are_rounded_as_the_whole_is() -> None:
    masters = torch.randn(700, 512, generator=torch.Generator().manual_seed(1))
    whole, parts = rounded(masters), torch.empty_like(masters)
    for start, end in ((0, 233), (233, 466), (466, 700)):
        round_into(parts[start:end], masters[start:end], first=start * 512)
    assert torch.equal(parts, whole)


@pytest.mark.parametrize("first", [0, 5, PERIOD - 1])
@pytest.mark.parametrize("count", [1, 7, PERIOD, 3 * PERIOD, 3 * PERIOD + 11])
def test_many_periods_at_once_are_rounded_as_one_after_the_other(first: int, count: int) -> None:
    masters = torch.randn(count, generator=torch.Generator().manual_seed(3))
    one_by_one, at_once = torch.empty(count), torch.empty(count)
    round_into(one_by_one, masters, first=first, whole_periods=False)
    round_into(at_once, masters, first=first, whole_periods=True)
    assert torch.equal(at_once, one_by_one)


def test_a_weight_that_does_not_move_is_served_as_before() -> None:
    masters = torch.randn(5000, generator=torch.Generator().manual_seed(2))
    moved = masters.clone()
    moved[::7] += 0.01
    changed = rounded(moved) != rounded(masters)
    assert not bool(changed.view(-1)[[i for i in range(5000) if i % 7]].any())
