"""`make bench-train-of-releases`: a year of a product, one candidate after the other, with 2 thousand to 2 million turns a day.

    python -m tests.bench.train_of_releases            6 years of each size
    python -m tests.bench.train_of_releases --quick    2 years of each

Candidates are drawn N(+0.3, 0.6) pp around whoever is champion; they come with every five-hour slot. While a canary runs the
next one waits, and its batch joins the labels of those slots; it is still one draw: joining is given no credit. People come
on a third of the days and use the product five times on such a day, so a longer canary sees fewer new people than its length
says. What is gained is counted up, and the success rate stays at 60 %: otherwise a year of such candidates ends at 100 %
under any rule. The gate is the production one: the plan's arithmetic chooses the length (two hours to a week) and, where a
week cannot answer 1.5 points, the margin that it can; then betting and group-sequential halves decide. Beside it: ship
unless z, GrowthBook's sequence or Spotify's group-sequential test finds harm, each slot.

At the production margin of 1.5 points a product of 2,000 turns a day gets no canary at all; what people's blind votes could find in
its place (`[gates.people]`) is told beside it: how often candidates pass, by how far people favour them.

A false promotion is a candidate worse by the margin or more that was promoted, as a share of all promoted; "worse" counts every candidate
that was promoted and is worse at all. Exit status 1 where the gain is not positive at every size, or false promotions exceed 5 %.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from app.domain.release.by_people import BY_PEOPLE, PeopleTerms
from app.domain.release.pairs import ALPHA, rejects
from pipelines.evaluation.statistics import power
from pipelines.evaluation.statistics.units import BoolArray
from tests.bench.common.sections import Section
from tests.bench.gate_cells import baselines
from tests.bench.gate_cells.canaries import NEVER, Canaries, drawn, hybrid_harm_stops
from tests.bench.gate_cells.release import RATE, VARIANCE, non_inferiority_stops

SIZES = (2_000, 20_000, 200_000, 2_000_000)
TURNS_A_DAY, COMES_EVERY = 5.0, 3.0
"""Turns of a person on a day on which they come, and on every how many days that is."""
SLOT_D = 5.0 / 24.0
LENGTHS_D = (2.0 / 24.0, 0.25, 0.75, 2.25, 6.75, 7.0)
UNFINISHED_D = 37.0 / 1440.0
"""Whoever comes in the last 37 minutes is not complete by the deadline: a window of 30, seven of labels' wait."""
LOOKS = 40
MARGINS = (0.015, 0.02, 0.03, 0.05, 0.08, 0.12, 0.20)
MEAN, SPREAD = 0.003, 0.006


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What the plan makes of a product's traffic."""

    days: float
    units: int
    margin: float
    n_max: int


def people(turns: int, days: float) -> float:
    """Distinct people within so many days."""
    return turns / TURNS_A_DAY * COMES_EVERY * -math.expm1(-max(days, 0.0) / COMES_EVERY)


def planned(turns: int) -> Planned:
    """The smallest margin that some length answers with 60 % power, in the shortest such length."""
    for margin in MARGINS:
        for days in LENGTHS_D:
            units = people(turns, days - UNFINISHED_D)
            if power.power_of(margin=margin, variance=VARIANCE, information=units / 4.0) >= power.MINIMUM_POWER:
                wanted = min(power.sample_size(margin=margin, variance=VARIANCE, share=0.5), math.floor(units))
                per_look = max(1, wanted // LOOKS)
                return Planned(days=days, units=per_look * LOOKS, margin=margin, n_max=per_look * LOOKS)
    raise ValueError(f"{turns} turns a day answer none of {MARGINS}")


def ours(slot: Canaries, plan: Planned) -> BoolArray:
    """Promoted by the production gate: non-inferior before harmful. [R]"""
    harm = np.minimum(*hybrid_harm_stops(slot, baseline=RATE, n_max=plan.n_max, share=0.5))
    return non_inferiority_stops(slot, margin=plan.margin, n_max=plan.n_max, share=0.5) < harm


def unless(rule: Callable[[Canaries], object]) -> Callable[[Canaries, Planned], BoolArray]:
    """Shipped unless the rule finds harm."""
    return lambda slot, _plan: np.asarray(rule(slot)) == NEVER


RULES: dict[str, Callable[[Canaries, Planned], BoolArray]] = {
    "ours": ours,
    "z at each slot": unless(baselines.z_every_look),
    "GrowthBook": unless(lambda slot: baselines.growthbook(slot, ignore_looks=3)),
    "Spotify GST": unless(lambda slot: baselines.spotify_gst(slot, n_max=LOOKS * slot.units_per_look)),
}


def year(rng: np.random.Generator, turns: int, rule: str, *, years: int) -> dict[str, float]:
    """Means over `years` years of one product under one rule."""
    plan = planned(turns)
    days = max(SLOT_D, plan.days) if rule == "ours" else SLOT_D
    units = plan.units if rule == "ours" else int(people(turns, SLOT_D))
    canaries, per_look = int(365.0 / days), max(1, units // LOOKS)
    gained, promoted, false, worse, harm = (np.zeros(years) for _ in range(5))
    for _ in range(canaries):
        effect = rng.normal(MEAN, SPREAD, years)
        slot = drawn(rng, repetitions=years, rate=RATE, effect=effect[:, None], share=0.5, looks=LOOKS, units_per_look=per_look)
        ships = RULES[rule](slot, plan)
        promoted, gained = promoted + ships, gained + np.where(ships, effect, 0.0)
        false, worse = false + (ships & (effect <= -plan.margin)), worse + (ships & (effect < 0.0))
        harm += np.where(ships & (effect < 0.0), -effect, 0.0)
    return {
        "traffic": turns, "candidates": canaries, "promoted": float(promoted.mean()), "days": days, "margin_pp": 100 * plan.margin,
        "false_promotions": float(false.sum() / max(1.0, promoted.sum())), "worse": float(worse.sum() / max(1.0, promoted.sum())),
        "harm_shipped_pp": float(100 * harm.mean()), "gain_pp_per_month": float(100 * gained.mean() / 12),
    }  # fmt: skip


PAIRS = (60, 120, 240)
FAVOURED = ((0.375, 0.375), (0.30, 0.45), (0.45, 0.30), (0.50, 0.25), (0.60, 0.15))
"""Shares of votes for the candidate and for the champion; a quarter says that both are the same or bad."""


def by_people(rng: np.random.Generator, *, repetitions: int) -> tuple[Section, list[float]]:
    """How often people's votes pass a candidate, looked at after every vote by the production rule at its defaults."""
    section, equal = Section(title="Judged by people, not by traffic: share of candidates that pass"), list[float]()
    section.header("votes for the candidate", "for the champion", *(f"{pairs} pairs" for pairs in PAIRS))
    for ours_, theirs in FAVOURED:
        passed = [float(np.mean([_passes(rng, ours_, theirs, pairs) for _ in range(repetitions)])) for pairs in PAIRS]
        section.row(ours_, theirs, *passed)
        equal += passed if ours_ <= theirs else []
    return section, equal


def _passes(rng: np.random.Generator, ours_: float, theirs: float, pairs: int) -> bool:
    """Superior at some look within so many pairs; what is below 0 for sure was rejected before."""
    said = rng.choice([1.0, -1.0, 0.0], size=pairs, p=[ours_, theirs, 1.0 - ours_ - theirs]).tolist()
    return rejects(said, 0.0, alpha=ALPHA / 2.0) and not rejects([-value for value in said], 0.0, alpha=ALPHA / 2.0)


def honest(turns: int) -> str:
    """What the plan says to a product of this size at the production margin."""
    power_ = {days: _power_at(turns, days) for days in LENGTHS_D}
    found = next((days for days, value in power_.items() if value >= power.MINIMUM_POWER), None)
    if found is not None:
        return f"{turns:,} turns a day: a canary of {found:g} days finds {100 * MARGINS[0]:g} pp"
    best = max(power_.values())
    none = f"{turns:,} turns a day: no canary up to a week finds {100 * MARGINS[0]:g} pp (power {best:.2f})"
    return f"{none}; {BY_PEOPLE}: {PeopleTerms().told()}"


def _power_at(turns: int, days: float) -> float:
    units = people(turns, days - UNFINISHED_D)
    return power.power_of(margin=MARGINS[0], variance=VARIANCE, information=units / 4.0)


def main() -> int:
    """The table, then one line of JSON: a list per key, one entry for each size."""
    parser = argparse.ArgumentParser(description="A year of releases for products of four sizes.")
    parser.add_argument("--quick", action="store_true", help="two years of each instead of six")
    options = parser.parse_args()
    section = Section(title="A year of releases")
    keys = ("candidates", "promoted", "false_promotions", "harm_shipped_pp", "gain_pp_per_month")
    section.header("turns a day", "rule", "canary, days", "margin, pp", "worse", *keys)
    found: list[dict[str, float]] = []
    for turns in SIZES:
        for rule in RULES:
            row = year(np.random.default_rng([20261122, turns]), turns, rule, years=2 if options.quick else 6)
            section.row(turns, rule, round(row["days"], 2), row["margin_pp"], round(row["worse"], 2), *(round(row[key], 3) for key in keys))
            found += [row] if rule == "ours" else []
    section.require("gain positive at every size", all(row["gain_pp_per_month"] > 0.0 for row in found))
    section.require("false promotions <= 5 %", all(row["false_promotions"] <= 0.05 for row in found))
    people_, equal = by_people(np.random.default_rng(20261122), repetitions=60 if options.quick else 400)
    section.require("an equal or worse candidate passes people's votes in <= 2.5 % + 3 SE", max(equal) <= (0.09 if options.quick else 0.05))
    for turns in SIZES:
        print(honest(turns))
    print(people_.text())
    print(section.text())
    print(json.dumps({key: [round(row[key], 4) for row in found] for key in ("traffic", *keys)}))
    return 1 if section.broken else 0


if __name__ == "__main__":
    sys.exit(main())
