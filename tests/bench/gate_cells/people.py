"""V1, people as they are: some use a product a hundred times as much, they come back, they remember, and some metrics are rare."""

from __future__ import annotations

import numpy as np

from pipelines.evaluation.statistics import betting, non_inferiority
from pipelines.evaluation.statistics.non_inferiority import NonInferiorityPlan
from pipelines.evaluation.statistics.units import BoolArray, FloatArray, Units, running_mean, with_usual
from tests.bench.common.sections import Section, error_of, repetitions_of

HARM, POST = 0.025, 0.01
CAP_QUANTILE = 0.99


def heavy_users(scale: float, seed: int) -> Section:
    """Turns per person by Zipf's law, people with a rate of their own (ICC 0.5): the guardrail counted by turns, and the one by people."""
    section = Section(title="V1 heavy users: 5,000 people, turns by Zipf's law, ICC 0.5; aborted by the metric alone")
    section.header("case", "by turns", "by people")
    rng, n = np.random.default_rng([seed, 310]), repetitions_of(1500, scale)
    for name, loss in (("identical", 0.0), ("the heaviest 2 % lose 30 pp", 0.3)):
        found = np.mean([_heavy(rng, loss) for _ in range(n)], axis=0)
        section.row(name, *(float(share) for share in found))
        if loss == 0.0:
            section.numbers["aa_heavy_users"] = float(found[0])
            section.require("false abort by turns <= 0.025 + 3 SE", found[0] <= HARM + 3 * error_of(HARM, n))
    return section


def _heavy(rng: np.random.Generator, loss: float, people: int = 5000) -> tuple[bool, bool]:
    turns = np.minimum(rng.zipf(2.0, people), 200)
    rate, treated = rng.beta(0.6, 0.4, people), rng.random(people) < 0.5  # ICC 1/(1 + 1) = 0.5
    heavy = turns >= np.quantile(turns, 0.98)
    good = rng.binomial(turns, np.clip(rate - loss * (heavy & treated), 0.0, 1.0))
    cap = max(1.0, float(np.quantile(turns, CAP_QUANTILE)))
    by_turns = 1.0 - np.minimum(1.0, (turns - good) / cap)
    return _is_harm(by_turns, treated), _is_harm(good / turns, treated)


def _is_harm(outcome: FloatArray, treated: BoolArray) -> bool:
    mean, variance = float(outcome[:500].mean()), max(1e-4, float(outcome[:500].var()))
    process = betting.harm(margin=0.0, variance=variance, targets=betting.harm_targets(mean))
    units = Units.observed(outcome=outcome[500:], treated=treated[500:], probability=0.5, baseline=mean)
    return float(betting.log_e_path(process, units).max()) >= betting.evidence_needed(HARM)


def holdbacks(scale: float, seed: int) -> Section:
    """A champion and an identical holdback of 3 % through five canaries of three stages, while everybody falls from +5 to -5 points."""
    section = Section(title="V6 holdback through fifteen stages of five canaries, people who come back, +5 to -5 pp: false rollbacks")
    section.header("drawn", "false rollback")
    rng, n = np.random.default_rng([seed, 320]), repetitions_of(400, scale)
    anew = float(np.mean([_rolled_back(rng, anew=True) for _ in range(n)]))
    section.row("anew in each stage (ours)", anew)
    section.row("once, and compared by share", float(np.mean([_rolled_back(rng, anew=False) for _ in range(max(10, n // 4))])))
    section.numbers["aa_holdback_eras"] = anew
    section.require("false rollback <= 0.01 + 3 SE", anew <= POST + 3 * error_of(POST, n))
    return section


def _rolled_back(rng: np.random.Generator, *, anew: bool, people: int = 6000, holdback: float = 0.03) -> bool:
    own, once = rng.beta(0.6, 0.4, people), rng.random(people) < holdback
    seen: set[tuple[float, int]] = set()
    rows: list[tuple[FloatArray, BoolArray, float]] = []
    for canary in range(5):
        for share in (0.05, 0.25, 0.5):
            held = rng.random(people) < holdback if anew else once
            here = np.flatnonzero((rng.random(people) < 2 / 3) & (held | (rng.random(people) >= share)))
            fresh = here if anew else np.array([p for p in here.tolist() if (share, p) not in seen], dtype=np.int64)
            seen |= {(share, p) for p in fresh.tolist()}
            rate = np.clip(own[fresh] + 0.05 - 0.025 * canary, 0.0, 1.0)
            champion = (1 - holdback) * (1 - share) / ((1 - holdback) * (1 - share) + holdback)
            rows.append(((rng.random(len(fresh)) < rate).astype(np.float64), ~held[fresh], champion))
    units = Units.observed(
        outcome=np.concatenate([y for y, _, _ in rows]), treated=np.concatenate([arm for _, arm, _ in rows]),
        probability=np.concatenate([np.full(len(y), p) for y, _, p in rows]), baseline=0.6,
    )  # fmt: skip
    path = betting.log_e_path(betting.harm(margin=0.01, variance=0.24), units)
    return float(path.max()) >= betting.evidence_needed(POST)


def small_baselines(scale: float, seed: int) -> Section:
    """A champion that succeeds in .6 % and a candidate that never does: READY at a fixed margin, and at one bounded by the baseline."""
    section = Section(title="V3 small baselines: champion 0.6 %, candidate 0; share promoted after 4,000 people")
    section.header("margin, pp", "promoted")
    rng, n = np.random.default_rng([seed, 330]), repetitions_of(400, scale)
    for margin in (0.015, 0.25 * 0.006):
        plan = NonInferiorityPlan(margin=margin, variance=0.006, n_max=4000)
        promoted = float(np.mean([non_inferiority.judge(plan, _rare(rng)).rejected for _ in range(n)]))
        section.row(f"{100 * margin:g}", promoted)
    section.numbers["small_baseline_promoted"] = promoted
    section.require("promoted at the bounded margin <= 0.05 + 3 SE", promoted <= 0.05 + 3 * error_of(0.05, n))
    return section


def _rare(rng: np.random.Generator, people: int = 4000) -> Units:
    treated = rng.random(people) < 0.5
    outcome = (rng.random(people) < np.where(treated, 0.0, 0.006)).astype(np.float64)
    return Units.observed(outcome=outcome, treated=treated, probability=0.5, baseline=0.006)


def carry_over(scale: float, seed: int) -> Section:
    """Harm of 10 points that lasts in whoever was treated in the stage before, whatever they get in this one."""
    section = Section(title="V1 carry-over: 2,000 people in each of two stages (25 %, 50 %), harm of 10 pp while treated; found")
    section.header("what lasts into the next stage", "found")
    rng, n = np.random.default_rng([seed, 340]), repetitions_of(400, scale)
    found = {lasts: float(np.mean([_lasting(rng, lasts) for _ in range(n)])) for lasts in (0.0, 0.5, 1.0)}
    for lasts, share in found.items():
        section.row(f"{lasts:.0%} of the harm", share)
    identical = float(np.mean([_lasting(rng, 1.0, harm=0.0) for _ in range(n)]))
    section.row("no harm at all", identical)
    section.numbers["aa_carry_over"] = identical
    section.require("false abort <= 0.025 + 3 SE", identical <= HARM + 3 * error_of(HARM, n))
    return section


def _lasting(rng: np.random.Generator, lasts: float, *, harm: float = 0.10, people: int = 2000) -> bool:
    own, first, second = rng.beta(2.4, 1.6, people), rng.random(people) < 0.25, rng.random(people) < 0.5
    rates = own - harm * first, own - harm * np.maximum(second, lasts * first)
    units = Units.observed(
        outcome=np.concatenate([(rng.random(people) < rate).astype(np.float64) for rate in rates]),
        treated=np.concatenate([first, second]), probability=np.repeat([0.25, 0.5], people), baseline=0.6,
    )  # fmt: skip
    path = betting.log_e_path(betting.harm(margin=0.0, variance=0.24), units)
    return float(path.max()) >= betting.evidence_needed(HARM)


def usual_values(scale: float, seed: int) -> Section:
    """What is usual for a person taken off (CUPED): promotion of equal candidates and of those at exactly the margin, and false aborts."""
    section = Section(title="V3 variance reduction: 1,500 people (ICC .5), six turns before and six in the canary, margin 4 pp")
    section.header("what is usual", "promoted at 0", "promoted at -4.2 pp", "false abort")
    rng, n = np.random.default_rng([seed, 350]), repetitions_of(600, scale)
    for name, knows in (("taken off (ours)", True), ("not known", False)):
        equal = np.array([_judged(rng, 0.0, knows=knows) for _ in range(n)])
        worse = np.array([_judged(rng, -0.045, knows=knows)[0] for _ in range(n)])
        section.row(name, float(equal[:, 0].mean()), float(worse.mean()), float(equal[:, 1].mean()))
        if knows:
            section.numbers["cuped_promote_at_margin"], section.numbers["aa_cuped"] = float(worse.mean()), float(equal[:, 1].mean())
            section.require("promoted at the margin <= 0.05 + 3 SE", worse.mean() <= 0.05 + 3 * error_of(0.05, n))
            section.require("false abort <= 0.025 + 3 SE", equal[:, 1].mean() <= HARM + 3 * error_of(HARM, n))
            section.require("promoted at 0 >= 0.90", equal[:, 0].mean() >= 0.90)
    return section


def _judged(rng: np.random.Generator, effect: float, *, knows: bool, people: int = 1500, turns: int = 6) -> tuple[bool, bool]:
    """(non-inferior, harm)."""
    rate, treated = rng.beta(0.6, 0.4, people), rng.random(people) < 0.5
    usual = np.asarray((0.6 + rng.binomial(turns, rate)) / (1.0 + turns), dtype=np.float64) if knows else None
    outcome = rng.binomial(turns, np.clip(rate + effect * treated, 0.0, 1.0)) / turns
    variance = 0.14 * (0.3 if knows else 1.0)
    units = Units.observed(
        outcome=outcome, treated=treated, probability=0.5, usual=usual,
        baseline=running_mean(outcome, prior=0.6) if usual is None else with_usual(outcome, usual),
    )  # fmt: skip
    promoted = non_inferiority.judge(NonInferiorityPlan(margin=0.04, variance=variance, n_max=people), units).rejected
    path = betting.log_e_path(betting.harm(margin=0.0, variance=variance), units)
    return promoted, float(path.max()) >= betting.evidence_needed(HARM)
