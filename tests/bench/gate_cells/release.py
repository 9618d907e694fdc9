"""V3, V4 and V6: who is promoted, where the product goes in a month, and what is noticed after promotion."""

from __future__ import annotations

import math

import numpy as np

from pipelines.evaluation.statistics import betting, non_inferiority, power
from pipelines.evaluation.statistics.betting import EProcess, Tail
from pipelines.evaluation.statistics.group_sequential import GroupSequentialPlan
from pipelines.evaluation.statistics.units import BoolArray, FloatArray, IntArray
from tests.bench.common.sections import Section, delay, error_of, repetitions_of, stopped
from tests.bench.gate_cells import baselines
from tests.bench.gate_cells.canaries import (
    NEVER,
    Canaries,
    betting_stops,
    drawn,
    first_true,
    group_sequential_stops,
    hybrid_harm_stops,
    log_e_stops,
    log_growth,
)

RATE, VARIANCE = 0.6, 0.24


def promotions(scale: float, seed: int) -> Section:
    """V3: non-inferiority at the declared N_max, by true effect, share and margin."""
    section = Section(title="V3 promotions by true effect, 0.01 betting + 0.04 group-sequential, 200 looks")
    section.header("share", "margin, pp", "N_max", "at -margin", "at 0", "at +margin/2", "units at 0, median")
    rng, n = np.random.default_rng([seed, 700]), repetitions_of(4000, scale, least=1000)
    worst, least = 0.0, 1.0
    for share in (0.5, 0.25):
        for margin in (0.015, 0.02, 0.03):
            n_max = power.sample_size(margin=margin, variance=VARIANCE, share=share)
            found = {e: _promoted(rng, n, e, share, margin, n_max) for e in (-margin, 0.0, margin / 2)}
            section.row(f"{share:g}", f"{100 * margin:g}", n_max, *map(stopped, found.values()), delay(found[0.0]))
            worst, least = max(worst, stopped(found[-margin])), min(least, stopped(found[0.0]))
    section.numbers |= {"ni_promote_at_minus_delta": worst, "ni_promote_at_zero": least}
    section.require("promote at -margin <= 0.05 + 3 SE", worst <= 0.05 + 3 * error_of(0.05, n))
    section.require("promote at zero >= 0.72", least >= 0.72)
    return section


def _promoted(rng: np.random.Generator, repetitions: int, effect: float, share: float, margin: float, n_max: int) -> IntArray:
    per_look = math.ceil(n_max / 200)
    canaries = drawn(rng, repetitions=repetitions, rate=RATE, effect=effect, share=share, looks=200, units_per_look=per_look)
    return non_inferiority_stops(canaries, margin=margin, n_max=200 * per_look, share=share)


def non_inferiority_stops(canaries: Canaries, *, margin: float, n_max: int, share: float, baseline: float = RATE) -> IntArray:
    """Units at which our non-inferiority test rejects. [R]"""
    process = betting.non_inferiority(margin=margin, variance=VARIANCE)
    by_betting = betting_stops(process, canaries, baseline=baseline, alpha=non_inferiority.ALPHA_BETTING)
    plan = GroupSequentialPlan(n_max=n_max, alpha=non_inferiority.ALPHA_GROUP_SEQUENTIAL, share=share)
    return np.minimum(by_betting, group_sequential_stops(plan, canaries, threshold=-margin, tail=Tail.ABOVE))


def ratchet(scale: float, seed: int) -> Section:
    """V4: 144 slots of 20,000 units, candidates around the champion; change of the product in 30 days (sheet S6)."""
    section = Section(title="V4 change of the product after 30 days, pp: mean (worst 5 %), share promoted")
    section.header("candidate effect, pp", "ours", "ours + anchor", "ship unless harmful")
    n = repetitions_of(150, scale, least=30)
    for drift in (-0.2, -0.4, -0.8) if n >= 100 else (-0.4,):
        cells: list[str] = []
        for policy in ("ours", "anchor", "ship"):
            change, shipped = _month(np.random.default_rng([seed, 800]), n, drift / 100, policy)
            cells.append(f"{100 * change.mean():+.1f} ({100 * np.quantile(change, 0.05):+.1f}), {shipped:.2f}")
            if drift == -0.4 and policy == "ours":
                section.numbers["ratchet_30_days_pp"] = float(100 * change.mean())
        section.row(f"N({drift:+g}, 0.6)", *cells)
    section.require("final mean >= -2 pp at drift -0.4", section.numbers["ratchet_30_days_pp"] >= -2.0)
    return section


def _month(rng: np.random.Generator, repetitions: int, drift: float, policy: str) -> tuple[FloatArray, float]:
    """144 candidates in a row. Change of the rate, and share of candidates promoted. [R]"""
    rate, promoted = np.full(repetitions, RATE), 0.0
    guard = Guard(anchor=rate.copy(), rng=rng) if policy == "anchor" else None
    for _ in range(144):
        effect = rng.normal(drift, 0.006, repetitions)
        slot = drawn(rng, repetitions=repetitions, rate=rate[:, None], effect=effect[:, None], share=0.5, looks=100, units_per_look=200)
        ships = baselines.growthbook(slot, ignore_looks=3) == NEVER if policy == "ship" else _is_released(slot)
        rate = np.clip(rate + np.where(ships, effect, 0.0), 0.01, 0.99)
        promoted += float(ships.mean()) / 144
        rate = rate if guard is None else guard.watched(rate)
    return rate - RATE, promoted


def _is_released(slot: Canaries) -> BoolArray:
    """Non-inferior by 1 pp before it is harmful. The baseline is the rate of the first day; only power depends on it."""
    harm = np.minimum(*hybrid_harm_stops(slot, baseline=RATE, n_max=20_000, share=0.5))
    return non_inferiority_stops(slot, margin=0.01, n_max=20_000, share=0.5) < harm


class Guard:
    """Champion against the anchor on 5 % of a slot's units: Shiryaev-Roberts, margin 2 pp, run length 1,000 slots."""

    def __init__(self, *, anchor: FloatArray, rng: np.random.Generator) -> None:
        self.anchor, self.rng = anchor, rng
        self.process = betting.harm(margin=0.02, variance=VARIANCE)
        self.log_sr = np.full((len(anchor), 4), -np.inf)

    def watched(self, rate: FloatArray) -> FloatArray:
        """The champion's rate after this slot: the anchor's where the alarm rang."""
        slot = drawn(
            self.rng,
            repetitions=len(rate),
            rate=self.anchor[:, None],
            effect=(rate - self.anchor)[:, None],
            share=0.95,
            looks=1,
            units_per_look=20_000,
        )
        self.log_sr = np.logaddexp(self.log_sr, 0.0) + log_growth(self.process, slot, RATE)[:, 0]
        alarm = betting.log_mixture(self.process, self.log_sr) > math.log(1000.0)
        self.log_sr[alarm] = -np.inf
        return np.where(alarm, self.anchor, rate)


def after_promotion(scale: float, seed: int) -> Section:
    """V6: holdback on the previous champion, margin 1 pp; e-process at 0.01 and Shiryaev-Roberts detector (sheet S10)."""
    section = Section(title="V6 after promotion: units to the alarm within 100,000 (share found), looks of 200")
    section.header("holdback", "effect", "e-process", "Shiryaev-Roberts", "either")
    rng, n = np.random.default_rng([seed, 900]), repetitions_of(1000, scale, least=250)
    for holdback in (0.10, 0.05, 0.20):
        for effect in (0.0, -0.01, -0.03, -0.05, -0.10):
            e, sr = _watched(rng, n, holdback, effect)
            either = np.minimum(e, sr)
            section.row(f"{holdback:.0%}", f"{effect:+g}", delay(e), delay(sr), delay(either))
            if holdback == 0.10:
                _post_bounds(section, effect, e, sr)
    return section


def _post_bounds(section: Section, effect: float, e: IntArray, sr: IntArray) -> None:
    either = np.minimum(e, sr)
    if effect == 0.0:
        section.numbers["post_promotion_aa"] = stopped(either)
        section.require("false alarm within 100,000 units <= 0.02", stopped(either) <= 0.02 + 3 * error_of(0.02, len(e)))
    if effect == -0.01:
        expected = -math.expm1(-0.1)  # run length 1e6 over 100,000 units, at the edge of the null
        section.require("run length >= 1e6 at the margin", stopped(sr) <= expected + 3 * error_of(expected, len(sr)))
    if effect == -0.10:
        section.numbers["delay_10pp_units"] = float(np.median(either))
        section.require("-10 pp within 3,600 units + 20 %", float(np.median(either)) <= 4320)


def _watched(rng: np.random.Generator, repetitions: int, holdback: float, effect: float) -> tuple[IntArray, IntArray]:
    e: list[IntArray] = []
    sr: list[IntArray] = []
    process = betting.harm(margin=0.01, variance=VARIANCE)
    for _ in range(math.ceil(repetitions / 250)):
        canaries = drawn(
            rng,
            repetitions=min(250, repetitions),
            rate=RATE,
            effect=effect,
            share=1 - holdback,
            looks=500,
            units_per_look=200,
        )
        growth = log_growth(process, canaries, RATE)
        e.append(log_e_stops(process, np.cumsum(growth, axis=1), alpha=0.01, units_per_look=200))
        sr.append(shiryaev_roberts_stops(process, growth))
    return np.concatenate(e), np.concatenate(sr)


def shiryaev_roberts_stops(process: EProcess, growth: FloatArray) -> IntArray:
    """The recursion of shiryaev_roberts.advance over all repetitions at once. [R, L, J] -> [R]"""
    repetitions, looks, targets = growth.shape
    log_sr, path = np.full((repetitions, targets), -np.inf), np.empty((repetitions, looks))
    for look in range(looks):
        log_sr = np.logaddexp(log_sr, 0.0) + growth[:, look]
        path[:, look] = betting.log_mixture(process, log_sr)
    return first_true(path > math.log(1_000_000 / 200), (np.arange(looks) + 1) * 200)
