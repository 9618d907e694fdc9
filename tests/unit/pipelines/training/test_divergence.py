"""Divergences measured on the champion's own tokens."""

import math
import random

import pytest

from pipelines.training.measurement import kl_from_sampler, kl_to_reference

CHAMPION, NEW, ANCHOR = (0.7, 0.2, 0.1), (0.5, 0.3, 0.2), (0.8, 0.1, 0.1)


def exact(p: tuple[float, ...], q: tuple[float, ...]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def drawn(count: int) -> list[int]:
    return random.Random(7).choices(range(3), weights=CHAMPION, k=count)


def logs(p: tuple[float, ...], tokens: list[int]) -> list[float]:
    return [math.log(p[t]) for t in tokens]


def test_both_estimates_meet_the_exact_divergence() -> None:
    tokens = drawn(200_000)
    old, new, reference = (logs(p, tokens) for p in (CHAMPION, NEW, ANCHOR))
    assert kl_from_sampler(old, new) == pytest.approx(exact(CHAMPION, NEW), abs=0.005)
    assert kl_to_reference(old, new, reference) == pytest.approx(exact(NEW, ANCHOR), abs=0.01)


def test_one_token_that_became_unlikely_does_not_decide_the_budget() -> None:
    # 767 tokens as before and one that fell by 9.2 nats: its share is 9.2 / 768, not e^9.2 / 768 = 13
    old = [-1.0] * 768
    new = [-1.0] * 767 + [-10.2]
    assert kl_from_sampler(old, new) == pytest.approx((math.exp(-9.2) - 1 + 9.2) / 768)
    assert abs(kl_to_reference(old, new, old)) < 0.001


def test_one_token_that_became_likely_does_not_decide_the_budget() -> None:
    # 767 tokens as before and one that rose by 10 nats: (e² − 3 + (e² − 1)·8) / 768 = 0.072, not e^10 / 768 = 29
    old = [-11.0] * 768
    new = [-11.0] * 767 + [-1.0]
    assert kl_from_sampler(old, new) == pytest.approx((math.e**2 - 3 + (math.e**2 - 1) * 8) / 768)
