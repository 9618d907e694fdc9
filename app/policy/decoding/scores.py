"""Log-probabilities of given tokens, from hidden states.

Shapes: T positions, N of them at once, D hidden size, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from app.policy.decoding.body import product
from app.policy.distribution import nucleus_logprobs

AT_ONCE = 64
"""Positions whose logits are held together. A thousand, with what sorts them for top-p, are 1.4 GB at a vocabulary of 49,000."""


def scores(head: nn.Module, hidden_TD: Tensor, tokens: Sequence[int], *, temperature: float, top_p: float, top_k: int) -> list[float]:
    """Log-probability [T] of each token under the distribution that is sampled from; -inf where top-k or top-p excludes it."""
    found: list[float] = []
    tokens_T = torch.tensor(tokens, device=hidden_TD.device)
    for hidden_ND, tokens_N in zip(hidden_TD.split(AT_ONCE), tokens_T.split(AT_ONCE), strict=True):
        logits_NV = product(head, hidden_ND).float()
        logprobs_NV = nucleus_logprobs(logits_NV, temperature=temperature, top_p=top_p, top_k=top_k)
        found += logprobs_NV.gather(1, tokens_N[:, None])[:, 0].tolist()
    return found
