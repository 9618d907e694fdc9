"""LoRA (arXiv 2106.09685): low-rank adapters on a frozen base; what is served is base + adapter, rounded, and so is what is trained.

    dense weight W = round(base + α/r · B·A)     set anew after every optimizer step, on the grid of bfloat16, without a gradient
    forward        y = W·x + (z − z.detach())    z = α/r · B·(A·x.detach()): nothing is added, but its gradient reaches A and B

So the forward pass is that of the snapshot that will be published, and A and B get the gradient of a weight of full precision (a
straight-through estimate over the rounding). Base and fp32 adapters travel with the lineage: a merge loses nothing for good.

Merged weights are values of bfloat16, so where matrix products run in bfloat16 the linear layers hold them as such: 2 bytes each instead
of 4, and autocast has nothing to convert. With several workers the merged weights are split like all parameters, row by row; the adapters,
a hundredth of them, are whole on every worker, which merges the rows it holds.

A version is the merged weights and has their digest. Its adapter lies beside them for engines that keep a base and load adapters (vLLM);
what they compute differs from the merge by its rounding, a few bfloat16 places, which their probe and the step-zero guard bound.
"""

# torch leaves parts of its types open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn.functional import linear
from transformers import PreTrainedModel

from app.domain.errors import BadConfig
from app.durable import sync_folder
from app.policy.storage.snapshot import ADAPTER, ADAPTER_CONFIG, WEIGHTS, snapshot_digest
from pipelines.training.config import LoraConfig
from pipelines.training.numerics.rounding import round_into
from pipelines.training.numerics.sharding import Shards

DOWN, UP = "lora_down", "lora_up"
"""A [r, in] and B [out, r] of a layer, parameters of the layer itself."""


class Adapters:
    """The adapters of one model and the base below them."""

    def __init__(
        self, model: PreTrainedModel, config: LoraConfig, *, base: Path, held_in: torch.dtype, shards: Shards, seed: int = 0
    ) -> None:
        """Put fresh adapters in (which change nothing yet: B is zero) and freeze everything else; the same ones for the same seed. The
        linear layers' weights are held in `held_in`, the dtype of their products."""
        self.base = base
        self._shards = shards
        self._config = config
        self._scale = config.alpha / config.rank
        model.requires_grad_(False)
        generator = torch.Generator().manual_seed(seed)
        self._layers: dict[str, torch.nn.Linear] = {
            name: module for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in config.target_modules
        }  # fmt: skip
        if not self._layers:
            raise BadConfig(f"training.lora.target_modules names {config.target_modules} and the model has none of them: correct it")
        for layer in self._layers.values():
            _adapt(layer, config.rank, self._scale, generator)
        for layer in model.modules():
            if isinstance(layer, torch.nn.Linear) and layer is not model.get_output_embeddings():  # its weight may be the embedding too
                layer.weight.data = layer.weight.data.to(held_in)

    @torch.no_grad()
    def merge(self, read: Any | None = None) -> None:  # noqa: ANN401 - a safetensors file
        """Set every dense weight to the rounded sum of base and adapter."""
        if read is None:
            with safe_open(self.base / WEIGHTS, framework="pt") as opened:
                return self.merge(opened)
        for name, layer in self._layers.items():
            down, up, weight = layer.get_parameter(DOWN), layer.get_parameter(UP), layer.weight
            below = self._shards.cut(read.get_tensor(f"{name}.weight"), weight).to(down.device, torch.float32)
            merged = below.addmm(self._shards.cut(up, weight), down, alpha=self._scale)
            round_into(self._shards.local(weight.data), merged, first=self._shards.first_place(weight))
        return None

    @torch.no_grad()
    def forget(self) -> None:
        """Start on another base: B is zero again."""
        for layer in self._layers.values():
            layer.get_parameter(UP).zero_()

    def write(self, folder: Path) -> None:
        """Put the adapters beside a snapshot, in PEFT's layout, as engines load them onto the base: bfloat16, like what they lie on."""
        tensors: dict[str, torch.Tensor] = {}
        for name, layer in self._layers.items():
            for ours, theirs in ((DOWN, "lora_A"), (UP, "lora_B")):
                values = layer.get_parameter(ours).detach().to("cpu", torch.bfloat16).contiguous()
                tensors[f"base_model.model.{name}.{theirs}.weight"] = values
        save_file(tensors, folder / ADAPTER, metadata={"format": "pt"})
        stated = {"base": snapshot_digest(self.base), "sha256": hashlib.sha256((folder / ADAPTER).read_bytes()).hexdigest()}
        peft = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": stated["base"], "r": self._config.rank,
            "lora_alpha": self._config.alpha, "lora_dropout": 0.0, "bias": "none", "target_modules": list(self._config.target_modules),
        }  # fmt: skip
        (folder / ADAPTER_CONFIG).write_text(json.dumps(peft | {"ratchet": stated}, indent=1) + "\n")
        sync_folder(folder)


def _adapt(layer: torch.nn.Linear, rank: int, scale: float, generator: torch.Generator) -> None:
    down = torch.empty(rank, layer.in_features)
    torch.nn.init.kaiming_uniform_(down, a=math.sqrt(5), generator=generator)
    layer.register_parameter(DOWN, torch.nn.Parameter(down))
    layer.register_parameter(UP, torch.nn.Parameter(torch.zeros(layer.out_features, rank)))

    def through(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        down, up = module.get_parameter(DOWN), module.get_parameter(UP)
        adapted = linear(linear(inputs[0].detach(), down), up) * scale
        return output + (adapted - adapted.detach())

    layer.register_forward_hook(through)
