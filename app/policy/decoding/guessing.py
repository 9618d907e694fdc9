"""Which token to draft, where the number is known that the sampler will draw with.

The sampler draws by inversion (`app.policy.distribution.draw`): [0, 1) is cut into a stretch for each token, in the order of ids and as
long as the token is probable, and what is drawn is the token in whose stretch the place's uniform number lies. That number is an answer's
own, so whoever drafts knows it.

    the most probable token             is drawn as often as it is probable: at temperature 1 .44 of the time (SmolLM2), however good a head
    the token at the number             is what is drawn, if the head is right; if it is not, its stretches lie beside the target's
    the one with most of its stretch    what is drafted: the head's stretches are taken to be off by up to `REACH` in either direction
    within REACH of the number

On SmolLM2's own answers a head that was distilled for half an hour is right at .217, .208 and .239 of all places so.

Shapes: N places, R tokens that may be drafted.
"""

from torch import Tensor

REACH = 0.2
"""From .1 to .3 it hardly matters (.233 to .239); 1 is the most probable token."""


def guessed(logprobs_NR: Tensor, uniform_N: Tensor, *, reach: float = REACH) -> Tensor:
    """Of each place the index [N] of the token to draft, of log-probabilities in the order of ids."""
    ends_NR = logprobs_NR.float().exp().cumsum(-1)
    ends_NR = ends_NR / ends_NR[:, -1:]
    lowest_N1, highest_N1 = (uniform_N.to(ends_NR)[:, None] + reach * side for side in (-1, 1))
    within_NR = ends_NR.clamp(lowest_N1, highest_N1)
    return within_NR.diff(prepend=lowest_N1.clamp_min(0.0)).argmax(-1)
