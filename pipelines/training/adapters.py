"""LoRA through peft: adapters on a frozen base, merged before anything is published."""

# torch leaves parts of its types open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from typing import Any, cast

import torch
from transformers import PreTrainedModel

from pipelines.training.config import LoraConfig


def add_adapters(model: PreTrainedModel, config: LoraConfig, *, seed: int = 0) -> None:
    """Put fresh adapters into the model (which change nothing yet) and freeze everything else; the same ones for the same seed."""
    import peft  # here, because it takes a second to import and full-parameter training does not need it

    lora = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=list(config.target_modules), lora_dropout=0.0, task_type="CAUSAL_LM"
    )  # fmt: skip
    torch.manual_seed(seed)
    peft.inject_adapter_in_model(lora, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


@torch.no_grad()
def merged_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The model's tensors with the adapters added, under the names they have without adapters; the model stays as it is."""
    state: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if "lora_" in name:
            continue
        owner = name.removesuffix(".base_layer.weight")
        state[name.replace(".base_layer", "")] = (
            tensor if owner == name else tensor + cast(Any, model.get_submodule(owner)).get_delta_weight("default")
        )
    return state
