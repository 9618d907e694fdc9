"""Log-probabilities of given tokens: a text is read a piece at a time, so that whoever reads it can do something else in between.

Shapes: T positions, N of them at once, Q of a piece, D hidden size, V vocabulary.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from app.domain.errors import BadRequest
from app.policy.decoding.body import Body
from app.policy.decoding.keyvalues import Fed
from app.policy.distribution import nucleus_logprobs

AT_ONCE = 64
"""Positions whose logits are held together. A thousand, with what sorts them for top-p, are 1.4 GB at a vocabulary of 49,000."""


def require_scorable(prompt: Sequence[int], completion: Sequence[int], *, context: int, known: int) -> None:
    """Raises `BadRequest` for tokens that could not have been sampled with this context by a vocabulary of so many."""
    if not prompt or not completion or len(prompt) + len(completion) > context:
        raise BadRequest(
            f"{len(prompt)} prompt and {len(completion)} completion tokens cannot be scored: give at least one of each, and "
            f"{context} in all at most", param="completion_tokens", code="context_length_exceeded",
        )  # fmt: skip
    if not all(0 <= token < known for token in (*prompt, *completion)):
        raise BadRequest(
            f"a token id is outside the model's vocabulary of {known}: these tokens are another model's", param="prompt_tokens"
        )


def read(body: Body, tokens: Sequence[int], *, most: int, device: torch.device) -> Iterator[Tensor]:
    """Hidden states [Q, D] of a text, at most so many a piece; each sees the pieces before it, in a cache of their own."""
    tokens_1T = torch.tensor([list(tokens)], device=device)
    positions_1T = torch.arange(len(tokens), device=device)[None]
    cache = body.cache(max_rows=1)
    cache.reserve(Fed(tokens_nQ=tokens_1T, positions_nQ=positions_1T, width=len(tokens)))  # it would be copied whenever it grows
    for tokens_1Q, positions_1Q in zip(tokens_1T.split(most, dim=1), positions_1T.split(most, dim=1), strict=True):
        fed = Fed(tokens_nQ=tokens_1Q, positions_nQ=positions_1Q, width=int(positions_1Q[0, -1]) + 1)
        yield body([fed], cache)[0][0]


def scores(
    head: nn.Module, pieces: Iterable[Tensor], tokens: Sequence[int], *, before: int, temperature: float, top_p: float, top_k: int
) -> Iterator[list[float]]:
    """Log-probability of each token under the distribution that is sampled from, in their order; -inf where top-k or top-p excludes it.

    `pieces` are what `read` gives; the states of its first positions, `before` of them, predict other tokens. Gives nothing after each
    forward pass, then what `AT_ONCE` positions come to: none of it takes longer than a pass.
    """
    tokens_T, at = torch.tensor(tokens), -before
    for states_QD in pieces:
        yield []
        for first in range(max(0, -at), len(states_QD), AT_ONCE):
            hidden_ND = states_QD[first : first + AT_ONCE]
            tokens_N = tokens_T[at + first : at + first + len(hidden_ND)].to(hidden_ND.device)
            logprobs_NV = nucleus_logprobs(head(hidden_ND).float(), temperature=temperature, top_p=top_p, top_k=top_k)
            yield logprobs_NV.gather(1, tokens_N[:, None])[:, 0].tolist()
        at += len(states_QD)
