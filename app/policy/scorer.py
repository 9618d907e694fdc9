"""The forward pass that training and evaluation share: log-probabilities of the scored tokens of a packed row."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from app.policy.chunked_logprobs import VOCABULARY_CHUNK, chunked_logprobs
from app.policy.packed_attention import use_packed_attention
from app.policy.packing import PackedRow


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What the model says about the M scored tokens of a row."""

    logprobs: torch.Tensor
    """[M] fp32, natural logarithm, differentiable."""
    entropy: torch.Tensor
    """[M] fp32, nats, of the whole next-token distribution; detached."""


class Scorer(torch.nn.Module):
    """A causal language model seen as a function from packed rows to log-probabilities.

    A module of its own (and not a function over the model) so that a sharded model gathers its output layer around the whole pass.
    """

    def __init__(self, model: PreTrainedModel, *, vocabulary_chunk: int = VOCABULARY_CHUNK) -> None:
        super().__init__()
        use_packed_attention(model)
        self.model = model
        self.vocabulary_chunk = vocabulary_chunk

    def forward(self, row: PackedRow, temperature_M: torch.Tensor, dtype: torch.dtype = torch.float32) -> Scores:
        """Score a row; with `dtype` bfloat16 the matrix products run under autocast, everything that sums stays fp32."""
        backbone = cast("Any", self.model).base_model
        low = dtype != torch.float32
        with torch.autocast(row.input_ids.device.type, dtype=dtype, enabled=low):
            hidden_NE = backbone(
                input_ids=row.input_ids[None], position_ids=row.position_ids[None], packed_nodes=row.nodes, use_cache=False
            ).last_hidden_state[0]
        head = cast("torch.nn.Linear", self.model.get_output_embeddings())
        logprobs, entropy = chunked_logprobs(
            hidden_NE[row.predictors], head.weight, row.targets, temperature_M, bias_V=head.bias, dtype=dtype, chunk=self.vocabulary_chunk
        )
        return Scores(logprobs=logprobs, entropy=entropy)
