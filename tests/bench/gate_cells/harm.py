"""V1 and V2: how often a healthy canary is aborted, and how long a harmful one lives."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from pipelines.evaluation.statistics import betting, group_sequential
from pipelines.evaluation.statistics.betting import Tail
from pipelines.evaluation.statistics.group_sequential import GroupSequentialPlan
from pipelines.evaluation.statistics.units import FloatArray, IntArray, Units
from tests.bench.common.sections import Section, delay, error_of, repetitions_of, stopped
from tests.bench.gate_cells import baselines
from tests.bench.gate_cells.canaries import (
    NEVER,
    Canaries,
    betting_stops,
    drawn,
    first_true,
    group_sequential_stops,
    harm_process,
    hybrid_harm_stops,
    log_capital,
    log_e_stops,
)

ALPHA = 0.05
HORIZON = 20_000
LOOKS = (1, 20, 100)
FULL_ENOUGH = 0.2
"""From this scale on every single unit is a look."""
RATES = (0.004, 0.02, 0.3, 0.6, 0.98)
SHARES = (0.01, 0.05, 0.25, 0.5)
RAMPS = {
    "1-5-10-25-50 %": np.repeat([0.01, 0.05, 0.10, 0.25, 0.50], [20, 20, 30, 30, 100]),
    "5-25-50 %": np.repeat([0.05, 0.25, 0.50], [10, 30, 160]),
}


def grid(scale: float, seed: int, *, half: int, halves: int) -> Section:
    """V1, one metric: rate x share x look size, ours beside the interval rules, under continuous peeking.

    A quick run leaves out peeking at every single unit.
    """
    section = Section(title=f"V1 false aborts of identical canaries, nominal 0.05 (part {half + 1} of {halves})")
    section.header("rate", "share", "ours, look 1", "20", "100", *(f"{name}, look 20" for name in baselines.INTERVALS))
    cells = [(rate, share) for rate in RATES for share in SHARES]
    worst, finest = 0.0, 1 if scale >= FULL_ENOUGH else 20
    repetitions = repetitions_of(4000, scale, least=400)
    for k, (rate, share) in enumerate(cells):
        if k % halves == half:
            ours, theirs = _cell(np.random.default_rng([seed, k]), repetitions, rate, share, finest)
            worst = max(worst, *(r for r in ours if isinstance(r, float)))
            section.row(f"{rate:g}", f"{share:g}", *ours, *theirs)
    section.numbers["aa_false_abort_max"] = worst
    section.require("false abort <= 0.05 + 3 SE", worst <= ALPHA + 3 * error_of(ALPHA, repetitions))
    return section


def _cell(rng: np.random.Generator, repetitions: int, rate: float, share: float, finest: int) -> tuple[list[float | str], list[float]]:
    """Ours when peeking at every 1, 20 and 100 units, and the interval rules at every 20, on the same canaries."""
    ours: dict[int, list[IntArray]] = {look: [] for look in LOOKS if look >= finest}
    theirs: dict[str, list[IntArray]] = {name: [] for name in baselines.INTERVALS}
    process = harm_process(rate)
    for part in _parts(repetitions, 50 * finest):
        fine = drawn(rng, repetitions=part, rate=rate, share=share, looks=HORIZON // finest, units_per_look=finest)
        coarse, capital = fine.every(20 // finest), log_capital(process, fine, rate)
        late = group_sequential_stops(_plan(share), coarse, threshold=0.0, tail=Tail.BELOW)
        for look, found in ours.items():
            seen = capital[:, look // finest - 1 :: look // finest]
            found.append(np.minimum(late, log_e_stops(process, seen, alpha=ALPHA / 2, units_per_look=look)))
        for name, rule in baselines.INTERVALS.items():
            theirs[name].append(rule(coarse))
    rates = [stopped(np.concatenate(ours[look])) if look in ours else "-" for look in LOOKS]
    return rates, [stopped(np.concatenate(f)) for f in theirs.values()]


def _plan(share: float) -> GroupSequentialPlan:
    return GroupSequentialPlan(n_max=HORIZON, alpha=ALPHA / 2, share=share)


def controllers(scale: float, seed: int) -> Section:
    """V1, delivery controllers at 111 sessions a minute, rate 0.60, identical canary (sheet S9)."""
    section = Section(title="V1 false rollbacks of delivery controllers")
    rng, n = np.random.default_rng([seed, 100]), repetitions_of(4000, scale)
    section.header("controller", "share 0.5", "0.1", "0.05")
    for least in (0.55, 0.50):
        section.row(
            f"Argo style, rate >= {least:.2f}, failureLimit 3",
            *(stopped(baselines.argo(rng, n, share=s, rate=0.6, least=least)) for s in (0.5, 0.1, 0.05)),
        )
    few = repetitions_of(400, scale)
    for metrics in (1, 10):
        label = f"Kayenta judge, 3 hourly runs, {metrics} critical metric(s)"
        section.row(label, *(stopped(baselines.kayenta(rng, few, share=s, rate=0.6, metrics=metrics)) for s in (0.5, 0.1, 0.05)))
    missed = [1 - stopped(baselines.kayenta(rng, few, share=s, rate=0.6, effect=-0.02)) for s in (0.5, 0.1, 0.05)]
    section.row("Kayenta judge, -2 pp missed", *missed)
    for least in (0.55, 0.50):
        section.row(
            f"Flagger style, rate >= {least:.2f}, threshold 10, 2 -> 50 %",
            stopped(baselines.flagger(rng, n, rate=0.6, least=least)),
            "",
            "",
        )
    return section


def ramp(scale: float, seed: int) -> Section:
    """V1, ramp and time of day: baseline half a sine around 0.60 over the window, m fixed at 0.60 (sheet S5b)."""
    section = Section(title="V1 ramp and diurnal drift, identical canaries")
    section.header("ramp", "amplitude", "ours: harm", "betting: gain", "pooled bias, pp", "pooled z: gain")
    rng, n, worst = np.random.default_rng([seed, 200]), repetitions_of(4000, scale, least=600), 0.0
    for name, share in RAMPS.items():
        for amplitude in (0.0, 0.04, 0.08):
            rate = 0.6 + amplitude * np.sin(np.linspace(-np.pi / 2, np.pi / 2, 200))
            canaries = drawn(rng, repetitions=n, rate=rate, share=share, looks=200, units_per_look=100)
            harm = np.minimum(*hybrid_harm_stops(canaries, baseline=0.6, n_max=HORIZON, share=0.5))
            gain = betting_stops(_gain(), canaries, baseline=0.6, alpha=ALPHA)
            bias, pooled = _pooled(canaries)
            section.row(name, f"{amplitude:g}", stopped(harm), stopped(gain), bias * 100, pooled)
            worst = max(worst, stopped(harm), stopped(gain))
    section.numbers["aa_with_ramp_and_diurnal"] = worst
    section.require("false abort <= 0.05 + 3 SE", worst <= ALPHA + 3 * error_of(ALPHA, n))
    return section


def _gain() -> betting.EProcess:
    bet = betting.Bet(tail=Tail.ABOVE, threshold=0.0, targets=betting.HARM_TARGETS, variance=0.24)
    return betting.EProcess(legs=(bet,))


def _pooled(canaries: Canaries) -> tuple[float, float]:
    """What comparing pooled means says at the end: bias, and how often it "improved" at one-sided 5 %."""
    difference, variance, _ = baselines.wald(canaries)
    return float(difference[:, -1].mean()), float(np.mean(difference[:, -1] / np.sqrt(variance[:, -1]) > 1.645))


def repeated_users(scale: float, seed: int) -> Section:
    """V1, 4,000 users with 20 sessions each, ICC 0.2: one update per user, and what sessions as units would do."""
    section = Section(title="V1 repeated users (ICC 0.2, 20 sessions each), identical canaries")
    section.header("unit", "false abort")
    rng, n = np.random.default_rng([seed, 300]), repetitions_of(4000, scale)
    by_user = float(np.mean([_users_abort(rng, by_session=False) for _ in range(n)]))
    few = repetitions_of(300, scale)
    section.row("user (ours)", by_user)
    section.row("session", float(np.mean([_users_abort(rng, by_session=True) for _ in range(few)])))
    section.numbers["aa_clustered"] = by_user
    section.require("false abort <= 0.05 + 3 SE", by_user <= ALPHA + 3 * error_of(ALPHA, n))
    return section


def _users_abort(rng: np.random.Generator, *, by_session: bool, users: int = 4000, sessions: int = 20) -> bool:
    rate = rng.beta(0.6 * 4, 0.4 * 4, users)  # ICC 1/(1 + 4) = 0.2
    treated = rng.random(users) < 0.5
    if not by_session:
        return harm_found(plain_units(rng.binomial(sessions, rate) / sessions, treated), users)
    order = np.repeat(np.arange(users), sessions)
    return harm_found(plain_units((rng.random(len(order)) < rate[order]).astype(float), treated[order]), len(order))


def plain_units(outcome: FloatArray, treated: npt.NDArray[np.bool_], share: float = 0.5, baseline: float = 0.6) -> Units:
    return Units.observed(outcome=outcome, treated=treated, probability=share, baseline=baseline)


def harm_found(units: Units, n_max: int, alpha: float = 0.025) -> bool:
    """Our harm test on one metric, unit by unit, with nothing but production code."""
    process = betting.harm(margin=0.0, variance=0.24)
    if float(betting.log_e_path(process, units).max()) >= betting.evidence_needed(alpha):
        return True
    plan = GroupSequentialPlan(n_max=n_max, alpha=alpha)
    return group_sequential.evaluate(plan, units, threshold=0.0, tail=Tail.BELOW).rejected


def delays_and_family(scale: float, seed: int) -> Section:
    """V1, outcomes that close sooner when good, and 12 correlated metrics with two primaries (sheet 3.3, S7)."""
    section = Section(title="V1 outcome-dependent delays and 12 correlated metrics, identical canaries")
    section.header("case", "ours", "GrowthBook on each metric")
    rng, n, worst = np.random.default_rng([seed, 400]), repetitions_of(4000, scale), 0.0
    late = float(np.mean([harm_found(_late_units(rng), 5000) for _ in range(n)]))
    section.row("good outcomes close 6 times sooner", late, "")
    worst = max(worst, late)
    for correlation in (0.0, 0.5, 0.9):
        ours, theirs = _twelve(rng, repetitions_of(4000, scale), correlation)
        section.row(f"12 metrics, correlation {correlation:g}", ours, theirs)
        worst = max(worst, ours)
    section.numbers["aa_false_abort_max"] = worst
    section.require("false abort <= 0.05 + 3 SE", worst <= ALPHA + 3 * error_of(ALPHA, n))
    return section


def _late_units(rng: np.random.Generator, n: int = 5000) -> Units:
    good = rng.random(n) < 0.6
    closing = np.argsort(np.arange(n) + rng.exponential(np.where(good, 200.0, 1200.0)))
    return plain_units(good[closing].astype(float), rng.random(n) < 0.5)


def _twelve(rng: np.random.Generator, repetitions: int, correlation: float) -> tuple[float, float]:
    """5,000 units at share 0.25, rate 0.3; equal weights, so the family is the mean over metrics and targets."""
    ours: list[bool] = []
    theirs: list[bool] = []
    for part in _parts(repetitions, 50):
        metrics = list(_correlated(rng, part, correlation))
        process = betting.harm(margin=0.0, variance=0.21)
        capital = np.concatenate([log_capital(process, m, 0.3) for m in metrics], axis=-1)
        family = log_e_stops(betting.EProcess(legs=process.legs * 12), capital, alpha=ALPHA / 2, units_per_look=50)
        plan = GroupSequentialPlan(n_max=5000, alpha=0.0125, share=0.25)
        primary = [group_sequential_stops(plan, m, threshold=0.0, tail=Tail.BELOW) for m in metrics[:2]]
        ours.extend((np.minimum.reduce([family, *primary]) < NEVER).tolist())
        theirs.extend((np.minimum.reduce([baselines.growthbook(m) for m in metrics]) < NEVER).tolist())
    return float(np.mean(ours)), float(np.mean(theirs))


def _correlated(rng: np.random.Generator, repetitions: int, correlation: float) -> Iterator[Canaries]:
    shape = (repetitions, 100, 50)
    treated, shared = rng.random(shape) < 0.25, rng.standard_normal(shape, dtype=np.float32)
    threshold = -0.524401  # P(N < threshold) = 0.3
    for _ in range(12):
        own = rng.standard_normal(shape, dtype=np.float32)
        good = math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * own < threshold
        cells = (treated & good, treated & ~good, ~treated & good, ~treated & ~good)
        tg, tb, cg, cb = (cell.sum(axis=2).astype(np.float64) for cell in cells)
        yield Canaries(
            treated_good=tg,
            treated_bad=tb,
            control_good=cg,
            control_bad=cb,
            share=np.full(100, 0.25),
            units_per_look=50,
        )


def oracle(canaries: Canaries, effect: float, baseline: float) -> IntArray:
    """Gaussian SPRT on the same Z that knows the effect, threshold 1/0.05: nothing valid is much faster."""
    pi, s2 = float(canaries.share[0]), baseline * (1 - baseline)
    v = s2 / (pi * (1 - pi))
    z = ((1 - baseline) / pi, -baseline / pi, -(1 - baseline) / (1 - pi), baseline / (1 - pi))
    total = np.cumsum(sum(cell * value for cell, value in zip(canaries.cells, z, strict=True)), axis=1)
    n = (np.arange(total.shape[1]) + 1) * canaries.units_per_look
    return first_true(effect * total / v - effect**2 * n / (2 * v) >= math.log(1 / ALPHA), n)


def delays(scale: float, seed: int) -> Section:
    """V2: median units to detection, ours against an oracle and the interval rules, rate 0.60, look 20."""
    section = Section(title="V2 units to detection (share found if not all), rate 0.60, look 20, horizon 20,000")
    rules = {**baselines.INTERVALS}
    section.header("share", "effect", "ours", "oracle SPRT", "ratio", *rules)
    rng, n, ratios = np.random.default_rng([seed, 500]), repetitions_of(4000, scale, least=1000), dict[tuple[float, float], float]()
    for share in (0.5, 0.25, 0.1) if scale >= FULL_ENOUGH else (0.5, 0.1):
        for effect in (-0.02, -0.05, -0.10, -0.20):
            ours, known, theirs = _detection(rng, n, share, effect)
            ratios[share, effect] = float(np.median(ours) / np.median(known))
            section.row(f"{share:g}", f"{effect:+g}", delay(ours), delay(known), ratios[share, effect], *map(delay, theirs.values()))
            if share == 0.5:
                _bound(section, effect, ours, theirs["GrowthBook"])
    section.numbers["median_delay_ratio_vs_sprt_5pp"] = max(r for (_, e), r in ratios.items() if e == -0.05)
    section.require("ratio at -5 pp <= 1.75", section.numbers["median_delay_ratio_vs_sprt_5pp"] <= 1.75)
    return section


def _bound(section: Section, effect: float, ours: IntArray, growthbook: IntArray) -> None:
    if effect == -0.02:
        section.numbers["power_minus_2pp"] = stopped(ours)
        section.require("power at -2 pp >= 0.75", stopped(ours) + 2 * error_of(0.75, len(ours)) >= 0.75)
    else:
        section.require(f"not 25 % later than GrowthBook at {effect}", float(np.median(ours) / np.median(growthbook)) <= 1.25)


def _detection(rng: np.random.Generator, repetitions: int, share: float, effect: float) -> tuple[IntArray, IntArray, dict[str, IntArray]]:
    ours: list[IntArray] = []
    known: list[IntArray] = []
    theirs: dict[str, list[IntArray]] = {name: [] for name in baselines.INTERVALS}
    for part in _parts(repetitions, 500):
        looks = 1000 if effect > -0.1 or share < 0.25 else 300
        canaries = drawn(rng, repetitions=part, rate=0.6, effect=effect, share=share, looks=looks, units_per_look=20)
        ours.append(np.minimum(*hybrid_harm_stops(canaries, baseline=0.6, n_max=HORIZON, share=share)))
        known.append(oracle(canaries, effect, 0.6))
        for name, rule in baselines.INTERVALS.items():
            theirs[name].append(rule(canaries))
    return np.concatenate(ours), np.concatenate(known), {name: np.concatenate(found) for name, found in theirs.items()}


def rare_errors(scale: float, seed: int) -> Section:
    """V2, errors that rise from a small rate at a 5 % share (sheet S3)."""
    section = Section(title="V2 units to detection of rising errors, share 0.05, look 20, horizon 20,000")
    section.header("errors", "ours", *baselines.INTERVALS)
    rng, n = np.random.default_rng([seed, 600]), repetitions_of(1000, scale)
    for before, after in ((0.02, 0.04), (0.02, 0.08), (0.02, 0.20), (0.004, 0.016), (0.004, 0.04)):
        canaries = drawn(rng, repetitions=n, rate=1 - before, effect=before - after, share=0.05, looks=1000, units_per_look=20)
        ours = np.minimum(*hybrid_harm_stops(canaries, baseline=1 - before, n_max=HORIZON, share=0.05))
        section.row(f"{before:.1%} -> {after:.1%}", delay(ours), *(delay(rule(canaries)) for rule in baselines.INTERVALS.values()))
    return section


def _parts(total: int, size: int) -> list[int]:
    return [size] * (total // size) + ([total % size] if total % size else [])
