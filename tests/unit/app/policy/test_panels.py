"""Products of float32 with panels of bfloat16: which sums, of which inputs, in which order."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.policy.packing.panels import BYTES, INPUTS, PanelProduct
from app.policy.packing.tiles import OUTPUTS, ROWS

EDGES = (1, 2, ROWS - 1, ROWS, ROWS + 1, 3 * ROWS, BYTES // (4 * INPUTS) + 1, 2 * BYTES // (4 * INPUTS) + 3)
"""Numbers of rows on either side of a tile, and of as many as a panel is multiplied by at a time."""


def product_of(weight_OI: torch.Tensor) -> PanelProduct:
    product = PanelProduct.of(weight_OI)
    assert product is not None
    return product


@pytest.mark.parametrize("outputs", [1, OUTPUTS - 1, OUTPUTS, 3 * OUTPUTS + 1])
@pytest.mark.parametrize("columns", [1, 7, INPUTS, INPUTS + 1, 2 * INPUTS + 5])
def test_small_whole_numbers_are_multiplied_exactly(outputs: int, columns: int) -> None:
    """Whatever is cut where: every sum of these is a whole number that float32 holds."""
    random = torch.Generator().manual_seed(outputs + columns)
    weight = torch.randint(-8, 9, (outputs, columns), generator=random).float()
    product = product_of(weight)
    assert torch.equal(product.plain(), weight)
    for rows in EDGES:
        inputs = torch.randint(-8, 9, (rows, columns), generator=random).float()
        assert torch.equal(product(inputs, None).double(), inputs.double() @ weight.double().T), rows


@given(st.data())
def test_rows_are_those_that_were_asked_for_in_their_order(data: st.DataObject) -> None:
    outputs, columns = data.draw(st.integers(1, 2 * OUTPUTS + 3)), data.draw(st.integers(1, 9))
    chosen = torch.tensor(data.draw(st.lists(st.integers(0, outputs - 1), max_size=20)), dtype=torch.int64)
    patterns = torch.randint(-(2**15), 2**15, (outputs, columns), generator=torch.Generator().manual_seed(outputs)).to(torch.int16)
    for weight in (patterns.view(torch.bfloat16), (patterns.int() << 16).view(torch.float32)):
        product = product_of(weight)
        assert torch.equal(product.rows(chosen).view(torch.int16), patterns[chosen])
        assert torch.equal(product.plain().view(torch.int16), patterns)


def test_rows_that_there_are_not_are_refused() -> None:
    product = product_of(torch.ones(OUTPUTS + 1, 4))
    for outputs in ([OUTPUTS + 1], [0, -1], [2**40]):
        with pytest.raises(IndexError, match="were asked for, there are"):
            product.rows(torch.tensor(outputs))


def test_a_sum_goes_through_inputs_in_their_order_and_rounds_once_a_product() -> None:
    """(1 + 2^-23)(1 + 2^-7) = 1 + 2^-7 + 2^-23 + 2^-30, of which float32 keeps all but the last: it is lost where this comes first, and
    kept where it is added to its opposite."""
    product = product_of(torch.full((1, 2), 1 + 2.0**-7))
    first, last = product(torch.tensor([[1 + 2.0**-23, -1.0], [-1.0, 1 + 2.0**-23]]), None)[:, 0].tolist()
    assert (first, last) == (2.0**-23, 2.0**-23 + 2.0**-30)


@given(st.data())
def test_what_is_beside_a_row_does_not_reach_it(data: st.DataObject) -> None:
    """Not even what is no number."""
    rows, columns = data.draw(st.integers(1, 2 * ROWS + 1)), data.draw(st.sampled_from((5, INPUTS + 3)))
    at, strange = data.draw(st.integers(0, rows - 1)), data.draw(st.sampled_from((float("nan"), float("inf"), 3e38)))
    random = torch.Generator().manual_seed(rows)
    product = product_of(torch.randn(40, columns, generator=random).bfloat16().float())
    inputs = torch.full((rows, columns), strange)
    inputs[at] = torch.randn(columns, generator=random)
    assert torch.equal(product(inputs, None)[at], product(inputs[at : at + 1], None)[0])


def test_inputs_that_lie_apart_are_read_where_they_are() -> None:
    product, wide = product_of(torch.eye(6)), torch.randn(5, 13)
    for inputs in (wide[:, 2:8], wide[::2, :6], wide[:, ::2][:, :6], wide.T[:6, :5].T):
        assert torch.equal(product(inputs, None), inputs)


def test_inputs_that_do_not_fit_are_refused() -> None:
    product = product_of(torch.ones(3, 4))
    for inputs in (torch.ones(2, 5), torch.ones(2, 3), torch.ones(2, 4, dtype=torch.float64), torch.ones(2, 4).bfloat16()):
        with pytest.raises(ValueError, match="not float32 of 4"):
            product(inputs, None)


def test_on_a_processor_without_avx512_too(tmp_path: Path) -> None:
    """The other layout, whatever this one has: what was kept for one is not read for the other."""
    told = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,-avx512f", "NUMBA_CACHE_DIR": str(tmp_path)}
    code = """
import torch
from app.policy.packing import panels, tiles
assert (tiles.LANES, tiles.ROWS) == (8, 6)
weight = torch.randint(-8, 9, (70, 1100)).float()
product = panels.PanelProduct.of(weight)
assert torch.equal(product.plain(), weight)
for rows in (1, 5, 6, 7, 200):
    inputs = torch.randint(-8, 9, (rows, 1100)).float()
    assert torch.equal(product(inputs, None), inputs @ weight.T)
print("exact")
"""
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **told}, capture_output=True, text=True, check=False)
    assert done.stdout == "exact\n", done.stderr
