"""The precisions that weights can be served in: what each rounds a weight to, and a model whose layers are rounded.

    bf16     as published
    mxfp8    E4M3 elements in blocks of 32 that share an E8M0 scale, a power of two: 8.25 bits a weight (OCP Microscaling Formats (MX)
             Specification v1.0, sections 5.2.1, 5.3 and 6.3)
    nvfp4    E2M1 elements in blocks of 16 that share an E4M3 scale, and one fp32 scale for the tensor: 4.5 bits (NVIDIA, Pretraining Large
             Language Models with NVFP4, arXiv 2509.25149, section 2 and appendix A)

**An emulation.** Weights are rounded to the grid and multiplied in the model's own dtype as before: what a version says and how likely it
says it is changed as the format changes it, and nothing becomes faster or smaller. Rounded are the linear layers of the blocks; embedding,
output head, norms and biases stay as published, as recipes for both formats leave them. Activations are not rounded.

Blocks run along the inputs of a layer, which is what a product sums over; a last block may be shorter. Shapes: R rows, C columns, B blocks
of a row, b weights of a block.
"""

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from app.domain.errors import BadInput, Refused
from app.policy.experts import routers

E4M3_MAX, E4M3_EXPONENT = 448.0, 8
E2M1_MAX = 6.0
E8M0_LEAST, E8M0_MOST = -127, 127


class Precision(StrEnum):
    """What an engine serves in."""

    BF16 = "bf16"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"


BITS = {Precision.BF16: 16.0, Precision.MXFP8: 8 + 8 / 32, Precision.NVFP4: 4 + 8 / 16}
"""Of a rounded weight with its share of the block's scale."""


def mxfp8(weights_RC: Tensor) -> Tensor:
    """Each weight as MXFP8 has it, fp32. Raises `BadInput` for one that is not finite.

    A block's scale is 2 to the exponent of its largest weight less 8, E4M3's own (section 6.3); what is then above 448 becomes 448, so the
    largest of a block may lose an eighth. Ties go to the even one.
    """
    blocks_RBb = _blocks(weights_RC, 32)
    exponent_RB1 = torch.frexp(blocks_RBb.abs().amax(-1, keepdim=True)).exponent - 1 - E4M3_EXPONENT  # frexp's mantissa is below 1
    scale_RB1 = torch.ldexp(torch.ones_like(exponent_RB1, dtype=torch.float64), exponent_RB1.clamp(E8M0_LEAST, E8M0_MOST))
    return _plain(_e4m3(blocks_RBb / scale_RB1) * scale_RB1, weights_RC)


def nvfp4(weights_RC: Tensor) -> Tensor:
    """Each weight as NVFP4 has it, fp32. Raises `BadInput` for one that is not finite.

    The tensor's scale brings its largest weight to 6 · 448, a block's scale its largest to 6, rounded to E4M3: the largest of a block may
    be off by a sixteenth, and a block whose scale rounds to nothing is zero.
    """
    blocks_RBb = _blocks(weights_RC, 16)
    of_tensor = (blocks_RBb.abs().amax() / (E2M1_MAX * E4M3_MAX)).float().double()
    if of_tensor == 0:
        return torch.zeros_like(weights_RC, dtype=torch.float32)
    scale_RB1 = _e4m3(blocks_RBb.abs().amax(-1, keepdim=True) / E2M1_MAX / of_tensor) * of_tensor
    return _plain(_e2m1(torch.where(scale_RB1 > 0, blocks_RBb / scale_RB1, 0.0)) * scale_RB1, weights_RC)


def _blocks(weights_RC: Tensor, size: int) -> Tensor:
    """[R, B, b] in double precision, in which scaling is exact; the last block filled up with zeros. Raises `BadInput`."""
    if not bool(torch.isfinite(weights_RC).all()):
        raise BadInput("a weight is not finite, and no low precision holds it: look at the update that made the version")
    padded = nn.functional.pad(weights_RC.detach().double(), (0, -weights_RC.shape[-1] % size))
    return padded.unflatten(-1, (-1, size))


def _plain(blocks_RBb: Tensor, weights_RC: Tensor) -> Tensor:
    return blocks_RBb.flatten(-2)[..., : weights_RC.shape[-1]].float()


def _e4m3(values: Tensor) -> Tensor:
    """The nearest E4M3 numbers; torch's own cast, which makes NaN of what is too large."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).float().to(torch.float8_e4m3fn).double()


def _e2m1(values: Tensor) -> Tensor:
    """The nearest of 0, ½, 1, 1½, 2, 3, 4 and 6 with a sign: steps of ½ below 2, of 1 below 4, of 2 from there. Half-way to the even code,
    which is where rounding the number of steps to the even one goes."""
    size = values.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return ((size / step).round() * step).clamp_max(E2M1_MAX).copysign(values)


ROUNDINGS: Mapping[Precision, Callable[[Tensor], Tensor]] = {Precision.MXFP8: mxfp8, Precision.NVFP4: nvfp4}


def rounded(weights_RC: Tensor, precision: Precision) -> Tensor:
    """In the dtype that they have. What bfloat16 cannot hold of an NVFP4 weight, whose scale has 24 bits, is rounded once more."""
    return weights_RC if precision is Precision.BF16 else ROUNDINGS[precision](weights_RC).to(weights_RC.dtype)


def layers_of(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers that are rounded, by the name of their weight in a snapshot; before they are packed. Raises `Refused`."""
    if routers(model):
        raise Refused("this model routes to experts, whose weights are not rounded here: serve it with --precision bf16")
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if type(module) is nn.Linear and module is not head:
            yield f"{name}.weight", module


def round_model(model: PreTrainedModel, precision: Precision) -> frozenset[str]:
    """Round a model's layers in memory; the names of the weights that were."""
    if precision is Precision.BF16:
        return frozenset()
    names: set[str] = set()
    for name, layer in layers_of(model):
        layer.weight = nn.Parameter(rounded(layer.weight.detach(), precision), requires_grad=False)
        names.add(name)
    return frozenset(names)
