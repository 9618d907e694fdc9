"""The distribution a token is drawn from: temperature, then top-k, then top-p, and its log-probabilities. Used to sample and to score.

Shapes: N rows (sequences or positions), V vocabulary.
"""

import torch
from torch import Tensor, nn

BLOCK = 64
"""Tokens of the vocabulary summed together when one is drawn."""
GREEDY_BELOW = 1e-4
"""A temperature below this means the most probable token, always: a point mass, whose log-probability is 0."""


def nucleus_logprobs(logits_NV: Tensor, *, temperature: float, top_p: float, top_k: int = 0) -> Tensor:
    """Log-probabilities [N, V] after temperature, top-k and top-p (nucleus) filtering; -inf for what is filtered out.

    Top-k keeps the `top_k` most probable tokens (0: all) and those that are as probable as the last of them, and renormalises (Fan et al.
    2018, arXiv 1805.04833, section 5.4). Top-p cuts what that left, in the order of vLLM and transformers: the nucleus is the smallest set
    of most probable tokens whose probabilities sum to at least `top_p`; the kept ones are renormalised (Holtzman et al. 2020, arXiv
    1904.09751, section 3.1).
    """
    if temperature < GREEDY_BELOW:
        best = logits_NV.argmax(-1, keepdim=True)
        return torch.full_like(logits_NV, -torch.inf).scatter(-1, best, 0.0)
    logits_NV = logits_NV.float()
    logprobs = torch.log_softmax(logits_NV if temperature == 1.0 else logits_NV / temperature, dim=-1)
    if top_k:
        logprobs = likeliest(logprobs, torch.full((len(logprobs),), top_k, device=logprobs.device))
    if top_p >= 1.0:
        return logprobs
    kept = _nucleus(logprobs.detach(), top_p)
    masked = logprobs.masked_fill(~kept, -torch.inf)
    return masked - masked.logsumexp(-1, keepdim=True)


def likeliest(logprobs_NV: Tensor, top_k_N: Tensor) -> Tensor:
    """Log-probabilities [N, V] of the `top_k` most probable tokens of each row and their equals, renormalised; a row of 0 as it is."""
    most = min(int(top_k_N.max()), logprobs_NV.shape[-1])
    if most < 1:
        return logprobs_NV
    ordered = logprobs_NV.detach().topk(most, dim=-1).values
    last = ordered.gather(1, (top_k_N.clamp(1, most) - 1)[:, None])
    masked = logprobs_NV.masked_fill((logprobs_NV < last) & (top_k_N > 0)[:, None], -torch.inf)
    return torch.where((top_k_N > 0)[:, None], masked - masked.logsumexp(-1, keepdim=True), logprobs_NV)


def _nucleus(logprobs_NV: Tensor, top_p: float) -> Tensor:
    """True where a token belongs to the nucleus: the mass of all strictly more probable ones is below `top_p`."""
    _, inside, order = _ranked(logprobs_NV, logprobs_NV.new_full((len(logprobs_NV),), top_p))
    return torch.zeros_like(logprobs_NV, dtype=torch.bool).scatter(-1, order, inside)


def kept_log_mass(logprobs_NV: Tensor, top_p_N: Tensor, top_k_N: Tensor) -> Tensor:
    """Logarithm [N] of the probability that top-k and top-p keep of each row, with a `top_k` and a `top_p` of its own: what top-k keeps of
    everything, times what top-p keeps of that. 0 where neither cuts."""
    cut_NV = likeliest(logprobs_NV, top_k_N)
    ordered, inside, _ = _ranked(cut_NV, top_p_N)
    of_nucleus = torch.where(inside, ordered, 0.0).sum(-1).clamp_max(1.0).log().masked_fill(top_p_N >= 1.0, 0.0)
    return of_nucleus + (logprobs_NV.amax(-1) - cut_NV.amax(-1)).clamp_max(0.0)


def _ranked(logprobs_NV: Tensor, top_p_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities, the most probable first; whether each belongs to the nucleus; and the tokens in that order. [N, V] each

    A `top_p` that is smaller than any number here counts as the smallest: of zero nothing would be left to draw.
    """
    ordered, order = logprobs_NV.sort(dim=-1, descending=True)
    probabilities = ordered.exp()
    least = top_p_N.clamp_min(torch.finfo(probabilities.dtype).tiny)[:, None]
    return probabilities, probabilities.cumsum(-1) - probabilities < least, order


def drawing(logprobs_NV: Tensor, tokens_N: Tensor, part_N: Tensor) -> Tensor:
    """A number [N] with which `draw` draws these tokens: `part_N` in [0, 1) says where in the token's own stretch. float64"""
    probability_NV = logprobs_NV.to(torch.float64).exp()
    ends_NV = probability_NV.cumsum(-1)
    end_N1, own_N1 = (values.gather(1, tokens_N[:, None]) for values in (ends_NV, probability_NV))
    return ((end_N1 - own_N1 * (1 - part_N.to(own_N1)[:, None])) / ends_NV[:, -1:])[:, 0]


def draw(logprobs_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """One token per row by inversion: the first whose cumulative probability exceeds the row's uniform number in [0, 1).

    Inversion takes one number per token, so a request with a seed spends the same numbers whatever else is in the batch. Whether its logits
    are the same there to the last bit is the machine's and the model's: `app.policy.decoding.invariance` asks.

    Blocks of the vocabulary are summed first (single precision, 64 numbers at a time: off by 1e-7 of a block's own mass). Their running
    sum, and the one inside the block that was hit, are double precision: one over the whole vocabulary costs five times that.
    """
    rows, vocabulary = logprobs_NV.shape
    padded = nn.functional.pad(logprobs_NV.exp(), (0, -vocabulary % BLOCK))
    blocks = padded.view(rows, -1, BLOCK)
    mass = blocks.sum(-1).to(torch.float64)
    cumulative = mass.cumsum(-1)
    # the factor keeps a number next to 1 from rounding up to the total, behind the last token that has any probability
    target = uniform_N.to(torch.float64)[:, None] * (cumulative[:, -1:] * (1 - 1e-12))
    block = torch.searchsorted(cumulative, target, right=True).clamp_(max=mass.shape[-1] - 1)
    within = blocks[torch.arange(rows, device=block.device), block[:, 0]].cumsum(-1, dtype=torch.float64)
    left = target - (cumulative - mass).gather(1, block)
    inside = torch.searchsorted(within, left.clamp_(max=within[:, -1:] * (1 - 1e-12)), right=True)
    return (block * BLOCK + inside).clamp_(max=vocabulary - 1)[:, 0]
