"""Packed linear layers multiply by the very weights that they were given, and a row comes out the same in any company."""

import copy
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from app.policy.model import load_model, load_policy
from app.policy.packing.linear import PackedEmbedding, PackedLinear, PackedPart, pack
from app.policy.packing.panels import PanelProduct
from app.policy.packing.products import BlockedProduct, can_pack, compute_dtype, fastest, packed

DTYPES = (torch.bfloat16, torch.float32)
PACKED = [dtype for dtype in DTYPES if can_pack(dtype)]
AVX2 = torch.backends.cpu.get_cpu_capability() == "AVX2"
FLOAT32_ALIKE = can_pack(torch.float32) and (AVX2 or compute_dtype() is torch.float32)
"""Where it was measured that a row of a product of float32 comes out the same in any company: where models are served in it."""


def test_models_are_computed_in_what_is_multiplied_faster_and_in_float32_where_bfloat16_is_emulated() -> None:
    multiplies = torch.bfloat16 in PACKED and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    quicker: dict[torch.dtype, dict[torch.dtype, float]] = {
        torch.bfloat16: {torch.bfloat16: 1.0, torch.float32: 2.0}, torch.float32: {torch.bfloat16: 2.0, torch.float32: 1.0}
    }  # fmt: skip
    assert compute_dtype(quicker[torch.float32].__getitem__) is torch.float32
    assert compute_dtype(quicker[torch.bfloat16].__getitem__) is (torch.bfloat16 if multiplies else torch.float32)
    found = compute_dtype()
    assert found in DTYPES
    assert {compute_dtype() for _ in range(3)} == {found}, "measured once: an engine does not change its mind"


def test_dtypes_are_compared_by_what_they_compute_not_by_what_they_wait_for() -> None:
    assert fastest(lambda: time.sleep(0.03)) < 0.01


def test_float32_is_packed_where_registers_were_counted() -> None:
    assert can_pack(torch.float32) == (torch.backends.cpu.get_cpu_capability() in {"AVX2", "AVX512"})
    assert not can_pack(torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_model_gives_what_a_plain_one_does_or_is_left_plain(tiny_model: Path, tied_model: Path, dtype: torch.dtype) -> None:
    tokens = torch.arange(5, 40)[None]
    for folder in (tiny_model, tied_model):
        plain = load_model(folder, dtype=dtype).eval()
        loaded = load_policy(folder, dtype=dtype).model
        with torch.no_grad():
            difference = (plain(tokens).logits - loaded(tokens).logits).abs().max()
        found = [module for module in loaded.modules() if isinstance(module, PackedLinear)]
        assert bool(found) == can_pack(dtype)
        # the same products summed in another blocking may differ in the last bit
        assert difference <= (0.05 if dtype is torch.bfloat16 else 5e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_layer_is_the_same_for_few_rows_and_many(dtype: torch.dtype, bias: bool) -> None:
    plain = nn.Linear(64, 96, bias=bias).to(dtype)
    model = nn.Sequential(plain)
    if can_pack(dtype):
        pack(model)
    assert isinstance(model[0], PackedLinear) == can_pack(dtype), "where it cannot be packed it stays plain"
    for shape in ((1,), (3,), (16,), (200,), (1, 1), (2, 5), (0,)):
        inputs = torch.randn(*shape, 64).to(dtype)
        with torch.no_grad():
            found = model(inputs)
            assert found.shape == (*shape, 96)
            assert torch.allclose(plain(inputs), found, atol=1e-2 if dtype is torch.bfloat16 else 1e-5)


class Block(nn.Module):
    """Three layers that share their inputs."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        for name, size in zip(("q_proj", "k_proj", "v_proj"), sizes, strict=True):
            setattr(self, name, nn.Linear(size, 32, bias=False))


@pytest.mark.parametrize("dtype", PACKED)
def test_layers_that_read_the_same_are_one_product_and_others_are_not(dtype: torch.dtype) -> None:
    def kinds(*sizes: int) -> set[type[nn.Module]]:
        block = Block(*sizes).to(dtype)
        pack(block)
        return {type(getattr(block, name)) for name in ("q_proj", "k_proj", "v_proj")}

    assert (kinds(64, 64, 64), kinds(64, 64, 96)) == ({PackedPart}, {PackedLinear})


# --- which weights -------------------------------------------------------------------------------------------------------------------


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.dtype is torch.bfloat16 else torch.int32)


@pytest.mark.parametrize("dtype", PACKED)
@given(patterns=st.lists(st.integers(0, 0xFFFF).filter(lambda pattern: pattern & 0x7F80 != 0x7F80), min_size=1, max_size=40))
@settings(max_examples=60)
def test_whatever_the_published_weights_are_it_multiplies_by_those(dtype: torch.dtype, patterns: list[int]) -> None:
    """Any finite numbers of bfloat16 beside each other, the largest and the least; subnormal ones may be zero in bfloat16."""
    weight = torch.tensor(patterns, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)[:, None].repeat(1, 3).to(dtype)
    product = packed(weight, dtype)
    assert torch.equal(bits(product.plain().to(dtype)), bits(weight))
    found, is_subnormal = product(torch.eye(3, dtype=dtype), None).T, (weight != 0) & (weight.abs() < 2.0**-126)
    if dtype is torch.bfloat16:
        found = torch.where(is_subnormal & (found == 0), weight, found)
    assert torch.equal(found, weight), "and not by what it says they are"


WEIGHTS = {
    "as models have them": (torch.linspace(-0.3, 0.3, 96 * 64).view(96, 64).bfloat16().float(), PanelProduct),
    "the largest beside the least": (torch.tensor([[3e38, -(2.0**-133)]]).bfloat16().float(), PanelProduct),
    "none": (torch.zeros(4, 5), PanelProduct),
    "of float16": (torch.tensor([[0.25, -3.0], [1.5, 6e-8]], dtype=torch.float16), PanelProduct),
    "of float16 with 11 bits": (torch.tensor([[1 + 2.0**-10, 1.0]], dtype=torch.float16), BlockedProduct),
    "of 24 bits": (torch.tensor([[1 / 3, 0.1]]), BlockedProduct),
    "one of them of 9 bits, in the last panel": (torch.cat([torch.ones(70, 3), torch.full((1, 3), 1 + 2.0**-8)]), BlockedProduct),
    "no number": (torch.tensor([[float("nan"), 1.0]]), PanelProduct),
    "without an end": (torch.tensor([[float("inf"), 1.0]]), PanelProduct),
}


@pytest.mark.parametrize("weight", [pytest.param(weight, id=name) for name, weight in WEIGHTS.items() if can_pack(torch.float32)])
def test_panels_are_taken_where_they_hold_the_weights_to_the_last_bit(weight: tuple[Tensor, type]) -> None:
    values, kind = weight
    product = packed(values, torch.float32)
    assert type(product) is kind
    assert product.plain().dtype is (torch.bfloat16 if kind is PanelProduct else torch.float32)
    assert torch.equal(bits(product.plain().float()), bits(values.float()))
    if values.isfinite().all():
        assert torch.equal(product(torch.eye(values.shape[1]), None), values.float().T)


def test_packed_anew_from_stored_weights_it_stays_what_it_was() -> None:
    for dtype in PACKED:
        layer = PackedLinear(nn.Linear(8, 4, bias=False).to(dtype))
        new = torch.randn(4, 8).bfloat16()
        layer.pack(new)
        assert layer(torch.ones(1, 8, dtype=dtype)).dtype is dtype
        assert torch.equal(layer.plain(), new)
        assert torch.equal(layer.weights_of(torch.tensor([3, 0, 3])), new[[3, 0, 3]])


@pytest.mark.parametrize("dtype", PACKED)
def test_an_embedding_gives_the_rows_of_the_snapshot_whatever_it_is_kept_in(tiny_model: Path, tied_model: Path, dtype: torch.dtype) -> None:
    for folder in (tiny_model, tied_model):
        wanted = cast("Any", load_model(folder, dtype=dtype)).get_input_embeddings()
        found = cast("Any", load_policy(folder, dtype=dtype).model).get_input_embeddings()
        for tokens in (torch.tensor([[3, 0, 3], [7, 255, 1]]), torch.arange(256), torch.empty(1, 0, dtype=torch.int64)):
            assert torch.equal(found(tokens), wanted(tokens))
            assert found(tokens).dtype is dtype
        with pytest.raises(IndexError):
            found(torch.tensor([wanted.num_embeddings]))


def test_a_model_of_float32_keeps_each_weight_once_and_in_the_memory_of_bfloat16(tiny_model: Path, tied_model: Path) -> None:
    if not can_pack(torch.float32):
        return
    for folder, tied in ((tiny_model, False), (tied_model, True)):
        model = load_policy(folder, dtype=torch.float32).model
        assert not [name for name, parameter in model.named_parameters() if parameter.dim() > 1], "no matrix is kept as it was"
        embedding = model.get_input_embeddings()
        assert isinstance(embedding, PackedEmbedding)
        assert (embedding.layer is model.get_output_embeddings()) is tied
        copied = copy.deepcopy(model)
        again = copied.get_input_embeddings()
        assert isinstance(again, PackedEmbedding)
        assert (again.layer is copied.get_output_embeddings()) is tied, "as it is of a copy"


def test_an_embedding_that_bfloat16_cannot_hold_is_left_as_it_is() -> None:
    if not can_pack(torch.float32):
        return
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    wanted = model[0](torch.arange(5))
    pack(model)
    assert type(model[0]) is nn.Embedding
    assert torch.equal(model[0](torch.arange(5)), wanted)


# --- in any company ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [48, 576, 1536])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("kind", ["panels", "blocked"])
def test_a_row_of_float32_comes_out_the_same_among_however_many(kind: str, columns: int, threads: int) -> None:
    if not can_pack(torch.float32):
        return
    before = torch.get_num_threads()
    inputs = torch.randn(400, columns, generator=torch.Generator().manual_seed(1))
    weight = (torch.randn(200, columns, generator=torch.Generator().manual_seed(2)) * 0.02).bfloat16().float()
    product = packed(weight, torch.float32) if kind == "panels" else BlockedProduct(weight)
    try:
        among = product(inputs, None)  # on all threads
        torch.set_num_threads(threads)
        odd = {
            (first, rows)
            for first in (0, 7, 240)
            for rows in (*range(1, 50), 119, 120, 121, 122, 127, 134, 159)
            if not torch.equal(product(inputs[first : first + rows], None), among[first : first + rows])
        }
        assert torch.allclose(among, functional.linear(inputs, weight), atol=1e-5)
        if kind == "panels" or FLOAT32_ALIKE:
            assert not odd
    finally:
        torch.set_num_threads(before)


def test_panels_and_blocks_agree() -> None:
    if not can_pack(torch.float32):
        return
    weight = (torch.randn(96, 64) * 0.05).bfloat16().float()
    for rows in (0, 1, 2, 5, 33):
        inputs, bias = torch.randn(rows, 64), torch.randn(96)
        for given_bias in (None, bias):
            wanted = functional.linear(inputs.double(), weight.double(), None if given_bias is None else given_bias.double())
            for product in (packed(weight, torch.float32), BlockedProduct(weight)):
                assert torch.allclose(product(inputs, given_bias).double(), wanted, atol=1e-5)
