"""Which experts a mixture-of-experts model routed each token to, recorded while it samples.

Works on transformers' routers (`…TopKRouter`: Qwen3-MoE, DeepSeek-V3 / Kimi-K2 and others), whose output is
(logits, weights, indices). Shapes: L layers that have a router, in order of depth, K experts per token.
"""

import torch
from torch import Tensor, nn


def routers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The routers of a model by name, in order of depth; empty for a dense model. Layer l of a record is the l-th of these."""
    return [(name, module) for name, module in model.named_modules() if type(module).__name__.lower().endswith("topkrouter")]


class ExpertRecorder:
    """Keeps the indices of the last forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self._seen: list[Tensor] = []
        self._hooks = [module.register_forward_hook(self._keep) for _, module in routers(model)]

    @property
    def records(self) -> bool:
        """Whether the model has experts at all."""
        return bool(self._hooks)

    def take(self) -> Tensor | None:
        """Indices [tokens, L, K] of the forward pass since the last call, in the order the tokens were fed; None for a dense model."""
        seen, self._seen = self._seen, []
        return torch.stack(seen, dim=1) if seen else None

    def remove(self) -> None:
        """Detach from the model."""
        for hook in self._hooks:
            hook.remove()

    def _keep(self, _module: nn.Module, _inputs: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
        # sorted: top-k order is arbitrary in some routers, and a record should not depend on it
        self._seen.append(output[2].sort(dim=-1).values)
