"""From fp32 masters to the bfloat16 values that are served: the one rounding between learning and serving, and it happens *before* the
forward pass, so that what is trained, judged and published are the same numbers.

To the nearest value a small step would vanish: bfloat16 has 8 significant bits, so an update below |w|/512 changes nothing (facts/rl.md
6.1), and a candidate would hold a few per cent of what its masters learned. Stochastic rounding keeps it on average (a weight a tenth of
the way to its neighbour goes there in one of ten cases), but a fresh draw per version would move weights that nobody trained and spoil
the deltas. So the draw is made once and for all: each place in a tensor has its own fixed threshold, uniform over the interval.

    served = the bfloat16 neighbour below |w|, or the one above it where the remainder of w exceeds its place's threshold

A value of bfloat16 stays what it is, a weight that does not move stays where it is, and the error is zero on average over a tensor.
"""

from functools import lru_cache

import torch

PERIOD = 1 << 18
"""Thresholds repeat after this many places: a megabyte, which stays in the processor's cache."""
KEPT_BITS = -0x10000
"""Sign, exponent and 7 bits of significand: bfloat16 within float32 (as int32, the mask 0xFFFF0000)."""


@torch.no_grad()
def round_into(target: torch.Tensor, masters: torch.Tensor, *, first: int = 0, whole_periods: bool | None = None) -> None:
    """Fill a contiguous `target` with the bfloat16 values of `masters`; `first` is the place of their first element in the whole
    tensor, so that workers who hold parts of it round as one who holds all. NaN and infinities stay what they are. A target of another
    dtype or device is filled by way of a copy. `whole_periods`: all of them in one operation; None: not on a processor, whose cache holds
    one, and on a GPU, where 5,482 small operations were four fifths of an optimizer step."""
    if target.dtype != torch.float32 or target.device != masters.device:
        target.copy_(rounded(masters, first=first))
        return
    given, wanted = masters.reshape(-1).view(torch.int32), target.view(-1).view(torch.int32)
    thresholds = _thresholds(target.device)
    if whole_periods is None:
        whole_periods = target.device.type != "cpu"
    at = 0
    while at < len(given):
        place, left = (first + at) % PERIOD, len(given) - at
        periods = left // PERIOD if whole_periods and place == 0 and left >= PERIOD else 1
        size = min(periods * PERIOD - place, left)
        here, there = (flat[at : at + size].view(periods, -1) for flat in (given, wanted))
        torch.add(here, thresholds[place : place + here.shape[1]], out=there)
        there.bitwise_and_(KEPT_BITS)
        at += size


def rounded(masters: torch.Tensor, *, first: int = 0) -> torch.Tensor:
    """The same as a new tensor, fp32 in type and bfloat16 in value."""
    target = torch.empty_like(masters, memory_format=torch.contiguous_format)
    round_into(target, masters, first=first)
    return target


@lru_cache
def _thresholds(device: torch.device) -> torch.Tensor:
    """[PERIOD] int32 from 0 to 65,535: what is added to the 16 bits that are cut off. A hash of the place (the finaliser of MurmurHash3,
    32 bits), so that every machine and every version of torch has the same ones."""
    mixed = torch.arange(1, PERIOD + 1, dtype=torch.int64) * 0x9E3779B1 & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        mixed = (mixed ^ (mixed >> shift)) * factor & 0xFFFFFFFF
    return (mixed >> 16).to(torch.int32).to(device)
