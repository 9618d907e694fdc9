"""What a forward pass keeps for the backward pass.

none        everything: 1.8 MB per token for SmolLM2-135M in fp32
selective   the outputs of matrix products and attention; everything cheap is computed again: 0.8 MB, a sixth more time
full        the inputs of the layers; all is computed again: 0.1 MB, a third more time

A row of more tokens than a pass is meant to have, a long turn that goes alone, is always computed with `full`.
"""

# torch leaves parts of its types open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from pipelines.training.config import Activations

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


class Keeping:
    """Tells a transformers model what to keep, pass by pass."""

    def __init__(self, model: Any, kind: Activations, *, most_tokens: int = 0) -> None:  # noqa: ANN401 - transformers types the methods per model
        """Rows of more than `most_tokens` keep the inputs of the layers alone; 0: no row is too long."""
        self._model, self._most = model, most_tokens
        self._kind: Activations = kind
        self._now: Activations = "none"

    def start(self, tokens: int) -> None:
        """Before a forward pass over a row of so many tokens."""
        wanted = "full" if 0 < self._most < tokens else self._kind
        if wanted == self._now:
            return
        if wanted == "none":
            self._model.activation_checkpointing_disable()
        else:
            options: dict[str, Any] = {"use_reentrant": False}
            if wanted == "selective":
                options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
            self._model.activation_checkpointing_enable(options)
        self._now = wanted


def _policy(_context: object, operation: object, *_arguments: object, **_options: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE
