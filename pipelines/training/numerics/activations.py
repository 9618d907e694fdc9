"""What a forward pass keeps for the backward pass.

none        everything: 1.8 MB per token for SmolLM2-135M in fp32
selective   the outputs of matrix products and attention; everything cheap is computed again: 0.8 MB, a sixth more time
full        the inputs of the layers; all is computed again: 0.1 MB, a third more time
"""

# torch leaves parts of its types open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

Activations = Literal["none", "selective", "full"]

_aten: Any = torch.ops.aten
EXPENSIVE = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    }
)


def keep_activations(model: Any, kind: Activations) -> None:  # noqa: ANN401 - transformers types the method per model
    """Tell a transformers model what to keep."""
    if kind == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if kind == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    model.activation_checkpointing_enable(options)


def _policy(_context: object, operation: object, *_arguments: object, **_options: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE
