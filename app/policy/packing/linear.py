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
        self._product = packed(weight.detach(), self._dtype)

    def plain(self) -> Tensor:
        """The weights [out, in] that it multiplies by, laid out as usual, of bfloat16 where they are kept so."""
        return self._product.plain()

    @property
    def looks_up(self) -> bool:
        """Whether `weights_of` reads no more than it gives."""
        return self._product.looks_up

    def weights_of(self, outputs_N: Tensor) -> Tensor:
        """The weights [N, in] of these outputs, of bfloat16 where they are kept so."""
        return self._product.rows(outputs_N)

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
        weight = torch.cat([linear.weight.detach() for linear in linears])
        biases: list[Tensor] = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self.product = PackedLinear(_linear(weight, torch.cat(biases) if biases else None))
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


class PackedEmbedding(nn.Module):
    """Looks rows up in the weights of a packed layer: of the head that it is tied to, so that they are there once, or of one that
    multiplies nothing, so that they take the memory of bfloat16. Gives the dtype that the model computes in."""

    def __init__(self, layer: PackedLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self._layer, self._dtype = (layer,), dtype  # no module of its own: a head is one already

    @property
    def layer(self) -> PackedLinear:
        """Whose weights they are."""
        return self._layer[0]

    def forward(self, tokens: Tensor) -> Tensor:
        """Rows [..., in] of tokens [...]."""
        return self.layer.weights_of(tokens.flatten()).to(self._dtype).view(*tokens.shape, self.layer.columns)


def pack(model: nn.Module) -> None:
    """Replace every linear layer of a model on the CPU whose dtype `can_pack`, and embeddings of float32 whose rows can be looked up in
    what is packed; the plain weights are let go."""
    embeddings = [(name, module) for name, module in model.named_modules() if type(module) is nn.Embedding]
    linears = {id(module.weight): name for name, module in model.named_modules() if type(module) is nn.Linear}
    tied = {name: linears.get(id(embedding.weight)) for name, embedding in embeddings}
    for parent in list(model.modules()):
        for names in SIBLINGS:
            _share(parent, names)
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            model.set_submodule(name, PackedLinear(module))
    for name, embedding in embeddings:
        if (dtype := embedding.weight.dtype) is not torch.float32:  # one of bfloat16 stays mapped from its file
            continue
        head = tied[name]
        layer = PackedLinear(_linear(embedding.weight)) if head is None else model.get_submodule(head)
        if isinstance(layer, PackedLinear) and layer.looks_up:
            model.set_submodule(name, PackedEmbedding(layer, dtype))


def _linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A layer of this weight [out, in], without a copy."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return layer


def _share(parent: nn.Module, names: Sequence[str]) -> None:
    """Make one product of the parent's layers of these names, if it has them all and they fit together."""
    found = [getattr(parent, name, None) for name in names]
    linears = [layer for layer in found if type(layer) is nn.Linear]
    if len(linears) < len(names) or len({(layer.in_features, layer.bias is None) for layer in linears}) > 1:
        return
    shared = SharedProduct(linears)
    for index, name in enumerate(names):
        setattr(parent, name, PackedPart(shared, index))
