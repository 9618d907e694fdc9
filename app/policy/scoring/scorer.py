"""The forward pass that training and evaluation share: log-probabilities of the scored tokens of a packed row."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from app.policy.decoding.shaping import BendTensors
from app.policy.distribution import kept_log_mass
from app.policy.scoring.chunked_logprobs import VOCABULARY_CHUNK, chunked_logprobs
from app.policy.scoring.packed_attention import use_packed_attention
from app.policy.scoring.packing import PackedRow

NUCLEUS_TOKENS = 64
"""Whole distributions sorted at once: 64 of 49 thousand tokens take about 50 MB."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """What the draw of each scored token was narrowed to."""

    top_p_M: torch.Tensor
    """[M] fp32; 1 is all."""
    top_k_M: torch.Tensor
    """[M] int64; 0 is all."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What the model says about the M scored tokens of a row."""

    logprobs: torch.Tensor
    """[M] fp32, natural logarithm, differentiable."""
    entropy: torch.Tensor
    """[M] fp32, nats, of the whole next-token distribution; detached."""
    kept_log_mass: torch.Tensor | None = None
    """[M] fp32, log of the probability that top-k and top-p keep, where it was asked for; detached."""


class Scorer(torch.nn.Module):
    """A causal language model seen as a function from packed rows to log-probabilities.

    A module of its own (and not a function over the model) so that a sharded model gathers its output layer around the whole pass.
    """

    def __init__(self, model: PreTrainedModel, *, vocabulary_chunk: int = VOCABULARY_CHUNK) -> None:
        super().__init__()
        use_packed_attention(model)
        self.model = model
        self.vocabulary_chunk = vocabulary_chunk

    def forward(
        self, row: PackedRow, temperature_M: torch.Tensor, dtype: torch.dtype = torch.float32, cut: "Cut | None" = None,
        bends: BendTensors | None = None,
    ) -> Scores:  # fmt: skip
        """Score a row; with `dtype` bfloat16 the matrix products run under autocast, everything that sums stays fp32. With `cut`, work
        out what it keeps at each place. `bends` is what the turns' shapes add to the logits."""
        backbone = cast("Any", self.model).base_model
        low = dtype != torch.float32
        with torch.autocast(row.input_ids.device.type, dtype=dtype, enabled=low):
            hidden_NE = backbone(
                input_ids=row.input_ids[None], position_ids=row.position_ids[None], packed_nodes=row.nodes, use_cache=False
            ).last_hidden_state[0]
        head = cast("torch.nn.Linear", self.model.get_output_embeddings())
        logprobs, entropy = chunked_logprobs(
            hidden_NE[row.predictors], head.weight, row.targets, temperature_M, bias_V=head.bias, bends=bends, dtype=dtype,
            chunk=self.vocabulary_chunk,
        )  # fmt: skip
        kept = None
        if cut is not None:
            kept = _kept(hidden_NE[row.predictors].detach().to(dtype), head.weight.detach().to(dtype), temperature_M, cut, bends)
        return Scores(logprobs=logprobs, entropy=entropy, kept_log_mass=kept)


def _kept(
    hidden_ME: torch.Tensor, weight_VE: torch.Tensor, temperature_M: torch.Tensor, cut: "Cut", bends: BendTensors | None
) -> torch.Tensor:
    """[M], a few tokens at a time: the whole distribution of each has to be sorted."""
    kept: list[torch.Tensor] = []
    for at in range(0, len(hidden_ME), NUCLEUS_TOKENS):
        some = slice(at, at + NUCLEUS_TOKENS)
        logits_NV = (hidden_ME[some] @ weight_VE.t()).float()
        if bends is not None:
            bends.bend(logits_NV, first=at)
        logprobs_NV = torch.log_softmax(logits_NV / temperature_M[some, None], dim=-1)
        kept.append(kept_log_mass(logprobs_NV, cut.top_p_M[some], cut.top_k_M[some]))
    return torch.cat(kept)
