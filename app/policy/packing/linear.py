"""Linear layers with weights laid out for the processor once, instead of at every call.

From a plain [out, in] weight a library re-orders on the way, which for the few rows of a decoding batch costs a quarter to a half of the
product, or reads twice the bytes that the weights have (`app.policy.packing.products`).

Layers that read the same input (query, key and value; gate and up) are one product: each call wakes the threads anew, which for the
narrow ones costs as much as the multiplication.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from app.policy.packing.products import packed

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one parent that transformers' decoders (Llama, Qwen, Mistral, …) call with the same input, in this order."""


class PackedLinear(nn.Module):
    """A linear layer that only multiplies: no gradient, no state dict. A deep copy shares the weights until either is packed anew."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.bias = linear.bias
        self._dtype = linear.weight.dtype
        self.pack(linear.weight)

    def pack(self, weight: Tensor) -> None:
        """Multiply by these weights [out, in] from now on, in the dtype that the layer has."""
        self.rows, self.columns = weight.shape
        self._product = packed(weight.detach().to(self._dtype))

    def plain(self) -> Tensor:
        """The weights [out, in] that it multiplies by, laid out as usual."""
        return self._product.plain()

    def product(self, inputs_NI: Tensor) -> Tensor:
        """inputs · weightᵀ + bias [N, O], without what calling a module does around it."""
        return self._product(inputs_NI, self.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs · weightᵀ + bias."""
        return self.product(inputs.reshape(-1, self.columns)).view(*inputs.shape[:-1], self.rows)

    def __deepcopy__(self, memo: dict[int, object]) -> "PackedLinear":
        new = type(self).__new__(type(self))
        nn.Module.__init__(new)
        new.bias, new.rows, new.columns = self.bias, self.rows, self.columns
        new._dtype, new._product = self._dtype, self._product
        new.train(self.training)
        memo[id(self)] = new
        return new


class SharedProduct:
    """One packed product for several layers in a row that are given the very same tensor. For one thread, like the model itself."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        joined = nn.Linear(linears[0].in_features, sum(linear.out_features for linear in linears), bias=False, device="meta")
        joined.weight = nn.Parameter(torch.cat([linear.weight.detach() for linear in linears]), requires_grad=False)
        if linears[0].bias is not None:
            joined.bias = nn.Parameter(torch.cat([linear.bias.detach() for linear in linears]), requires_grad=False)
        self.product = PackedLinear(joined)
        self.sizes = [linear.out_features for linear in linears]
        self._inputs: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def part(self, index: int, inputs: Tensor) -> Tensor:
        """The output of layer `index`; the first layer asked for an input multiplies for all, the last one lets go of it."""
        if inputs is not self._inputs:
            self._inputs, self._outputs = inputs, self.product(inputs).split(self.sizes, dim=-1)
        output = self._outputs[index]
        if index == len(self.sizes) - 1:
            self._inputs, self._outputs = None, ()
        return output

    def __deepcopy__(self, memo: dict[int, object]) -> "SharedProduct":
        new = SharedProduct.__new__(SharedProduct)
        memo[id(self)] = new
        new.product, new.sizes = copy.deepcopy(self.product, memo), self.sizes
        new._inputs, new._outputs = None, ()
        return new


class PackedPart(nn.Module):
    """One of the layers of a `SharedProduct`."""

    def __init__(self, shared: SharedProduct, index: int) -> None:
        super().__init__()
        self.shared, self.index = shared, index

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs · weightᵀ + bias."""
        return self.shared.part(self.index, inputs)


def pack_linears(model: nn.Module) -> None:
    """Replace every linear layer of a model on the CPU whose dtype `can_pack`; the plain weights are let go."""
    for parent in list(model.modules()):
        for names in SIBLINGS:
            _share(parent, names)
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            model.set_submodule(name, PackedLinear(module))


def _share(parent: nn.Module, names: Sequence[str]) -> None:
    """Make one product of the parent's layers of these names, if it has them all and they fit together."""
    found = [getattr(parent, name, None) for name in names]
    linears = [layer for layer in found if type(layer) is nn.Linear]
    if len(linears) < len(names) or len({(layer.in_features, layer.bias is None) for layer in linears}) > 1:
        return
    shared = SharedProduct(linears)
    for index, name in enumerate(names):
        setattr(parent, name, PackedPart(shared, index))
