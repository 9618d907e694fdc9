"""Router replay: in training, run the experts that ran when the token was sampled, and let the router learn from it.

R3 (arXiv 2510.11370) and the Composer 2 report, 3.4: the recorded indices replace the router's own top-k, the weights are the *current*
gate scores gathered at those indices (so gradients reach the router), and a recorded expert that is implausible under the current scores
is replaced by the router's best candidate that is not chosen yet (which keeps the p99 of |Δ log π| down where weights have moved on).
Every record is consumed exactly once per pass: a forward pass that leaves one unused, or uses it twice, is an error.

Legend of shapes: N tokens of the row, M scored tokens of it, L layers with a router, K experts a token, X experts in all.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from app.domain.learning.training import Datum
from app.policy.experts import routers
from app.policy.scoring.packing import PackedRow
from pipelines.training.config import RouterReplayConfig

RouterOutput = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Logits [N, X], weights [N, K], indices [N, K]."""


class RouterReplay:
    """Hooks on a model's routers; without records, or on a dense model, they change nothing."""

    def __init__(self, model: torch.nn.Module, config: RouterReplayConfig) -> None:
        found = routers(model) if config.enabled else []
        self.config = config
        self.layers = len(found)
        self.changed = self.replaced = self.replayed = 0
        """Routes that the router alone would have chosen otherwise, that were implausible, and in all, since the start."""
        self._routes_MLK: torch.Tensor | None = None
        self._places_M: torch.Tensor | None = None
        self._used: list[int] = []
        self._in_backward = False
        self._hooks = [module.register_forward_hook(self._hook(layer)) for layer, (_, module) in enumerate(found)]

    def start(self, data: Sequence[Datum], row: PackedRow) -> None:
        """Lay out the records of a row; the record of a scored token belongs to the place that predicts it."""
        self._used, self._in_backward, self._routes_MLK = [], False, None
        routes = [step for datum in data for step in datum.routes or ()]
        if not self.layers or not routes:
            return
        if len(routes) != len(row.targets) or len(routes[0]) != self.layers:
            raise ValueError(
                f"routes are recorded for {len(routes)} tokens and {len(routes[0])} layers, the row has {len(row.targets)} and "
                f"{self.layers}: train turns with and without records apart"
            )
        self._routes_MLK = torch.tensor(routes, device=row.targets.device)
        self._places_M = row.predictors

    def forwarded(self) -> None:
        """After the forward pass: every layer's records were used, once."""
        if self._routes_MLK is not None and sorted(self._used) != list(range(self.layers)):
            raise RuntimeError(f"of {self.layers} layers' expert records the forward pass used {sorted(self._used)}: a layer did not route")
        self._used, self._in_backward = [], True

    def finish(self) -> None:
        """After the backward pass, which may have computed layers again: all of them or none, once."""
        if self._routes_MLK is not None and len(self._used) != len(set(self._used)):
            raise RuntimeError(f"the backward pass used expert records of layers {sorted(self._used)} more than once")
        self._used, self._routes_MLK, self._in_backward = [], None, False

    def remove(self) -> None:
        """Detach from the model."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, layer: int) -> Callable[[torch.nn.Module, Any, RouterOutput], RouterOutput | None]:
        def replay(module: torch.nn.Module, _inputs: object, output: RouterOutput) -> RouterOutput | None:
            if self._routes_MLK is None or self._places_M is None:
                return None
            self._used.append(layer)
            return self._replayed(module, output, self._routes_MLK[:, layer], self._places_M)

        return replay

    def _replayed(self, module: torch.nn.Module, output: RouterOutput, routes_MK: torch.Tensor, places_M: torch.Tensor) -> RouterOutput:
        logits_NX, _, own_NK = output
        scores_NX = gate_scores(module, logits_NX)
        chosen_MK = plausible(scores_NX[places_M].detach(), own_NK[places_M], routes_MK, self.config.plausibility)
        if not self._in_backward:
            self._count(own_NK[places_M], routes_MK, chosen_MK)
        indices_NK = own_NK.clone()
        indices_NK[places_M] = chosen_MK
        return logits_NX, gate_weights(module, scores_NX, indices_NK, logits_NX.dtype), indices_NK

    def _count(self, own_MK: torch.Tensor, routes_MK: torch.Tensor, chosen_MK: torch.Tensor) -> None:
        self.replayed += routes_MK.numel()
        self.changed += int((routes_MK[:, :, None] != own_MK[:, None, :]).all(2).sum())
        self.replaced += int((routes_MK[:, :, None] != chosen_MK[:, None, :]).all(2).sum())


def gate_scores(module: Any, logits_NX: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - transformers types its routers per model
    """The router's scores as its architecture defines them: sigmoid in DeepSeek-V3 and Kimi-K2, softmax in Qwen3-MoE. fp32."""
    return logits_NX.float().sigmoid() if hasattr(module, "e_score_correction_bias") else logits_NX.float().softmax(-1)


def gate_weights(
    module: Any,  # noqa: ANN401 - as above
    scores_NX: torch.Tensor,
    indices_NK: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Scores gathered at the indices, normalised and scaled as the architecture does; differentiable."""
    weights_NK = scores_NX.gather(1, indices_NK)
    sigmoid = hasattr(module, "e_score_correction_bias")
    if module.norm_topk_prob:
        weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + (1e-20 if sigmoid else 0.0))
    return weights_NK * module.routed_scaling_factor if sigmoid else weights_NK.to(dtype)


def plausible(scores_MX: torch.Tensor, own_MK: torch.Tensor, routes_MK: torch.Tensor, threshold: float) -> torch.Tensor:
    """The recorded experts, those scoring below `threshold` × the lowest score of the router's own choice replaced by its best others."""
    own_scores_MK = scores_MX.gather(1, own_MK)
    good_MK = scores_MX.gather(1, routes_MK) >= threshold * own_scores_MK.amin(1, keepdim=True)
    priority_MX = torch.full_like(scores_MX, -1.0).scatter(1, own_MK, own_scores_MK)
    kept_MX = torch.zeros_like(scores_MX).scatter_add(1, routes_MK, good_MK.to(scores_MX.dtype)) > 0
    return priority_MX.masked_fill(kept_MX, torch.inf).topk(routes_MK.shape[1], dim=1).indices
