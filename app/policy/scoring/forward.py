"""Log-probabilities of completions: one forward pass, the same arithmetic for the engine's check, training and evaluation.

Shapes: P prompt tokens, T completion tokens, V vocabulary, D hidden size.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from app.policy.distribution import nucleus_logprobs


def token_logprobs(
    model: PreTrainedModel,
    prompt: Sequence[int],
    completion: Sequence[int],
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
) -> Tensor:
    """Natural log-probability [T], float32, of each completion token given everything before it, under the distribution that
    sampling with `temperature`, `top_k` and `top_p` draws from (-inf where these exclude a token).

    Gradients flow where they are enabled; wrap the call in `torch.no_grad()` to score only. The head is applied to the T
    positions that predict a completion token and to no other: prompt logits are never computed.
    """
    tokens = torch.tensor([[*prompt, *completion]], device=model.device)
    body, head = cast("Any", model.base_model), cast("Any", model.get_output_embeddings())
    hidden_TD = body(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state[0, len(prompt) - 1 :]
    logits_TV = head(hidden_TD).float()
    logprobs_TV = nucleus_logprobs(logits_TV, temperature=temperature, top_p=top_p, top_k=top_k)
    return logprobs_TV.gather(1, tokens[0, len(prompt) :, None])[:, 0]
