"""Packed linear layers give the same bits as plain ones."""

import copy
from pathlib import Path

import torch

from app.policy.decoding.packed_linear import PackedLinear, PackedPart, can_pack, pack_linears
from app.policy.model import load_model, load_policy


def test_a_packed_model_gives_the_same_bits_or_is_left_plain(tiny_model: Path, tied_model: Path) -> None:
    tokens = torch.arange(5, 40)[None]
    for folder in (tiny_model, tied_model):
        plain = load_model(folder, dtype=torch.bfloat16).eval()
        loaded = load_policy(folder, dtype=torch.bfloat16).model
        with torch.no_grad():
            difference = (plain(tokens).logits - loaded(tokens).logits).abs().max()
        packed = [module for module in loaded.modules() if isinstance(module, PackedLinear)]
        assert bool(packed) == can_pack(torch.bfloat16)
        # the same products summed in another blocking may differ in the last bit of bfloat16
        assert difference <= 0.05


def test_one_layer_is_the_same_for_few_rows_and_many() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 96, bias=True)).bfloat16()
    packed = copy.deepcopy(model)
    if can_pack(torch.bfloat16):
        pack_linears(packed)
    assert isinstance(packed[0], PackedLinear) == can_pack(torch.bfloat16), "where it cannot be packed it stays plain"
    for rows in (1, 3, 16, 200):
        inputs = torch.randn(rows, 64).bfloat16()
        with torch.no_grad():
            assert torch.allclose(model(inputs), packed(inputs), atol=1e-2)


class Block(torch.nn.Module):
    """Three layers that share their inputs."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        for name, size in zip(("q_proj", "k_proj", "v_proj"), sizes, strict=True):
            setattr(self, name, torch.nn.Linear(size, 32, bias=False))


def test_layers_that_read_the_same_are_one_product_and_others_are_not() -> None:
    def packed(*sizes: int) -> set[type[torch.nn.Module]]:
        block = Block(*sizes).bfloat16()
        if can_pack(torch.bfloat16):
            pack_linears(block)
        return {type(getattr(block, name)) for name in ("q_proj", "k_proj", "v_proj")}

    wanted = ({PackedPart}, {PackedLinear}) if can_pack(torch.bfloat16) else ({torch.nn.Linear}, {torch.nn.Linear})
    assert (packed(64, 64, 64), packed(64, 64, 96)) == wanted


def test_float32_is_never_packed(tiny_model: Path) -> None:
    model = load_policy(tiny_model, dtype=torch.float32).model
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
