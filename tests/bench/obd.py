"""`make bench-obd`: the gates on real clicks, V8 of the gates sheet, then one line of JSON.

The Open Bandit Dataset (Saito et al. 2021, CC BY 4.0) logged a fashion shop's recommendations under a uniform policy and
under Bernoulli Thompson sampling (BTS). The sample inside the wheel obp==0.4.1 has 6 x 10,000 rows; pip puts the
wheel into .cache/wheels, without its dependencies, and nothing in it is executed.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipelines.evaluation.statistics import off_policy
from pipelines.evaluation.statistics.off_policy import LoggedResponses, OffPolicyStatus
from pipelines.evaluation.statistics.units import FloatArray, IntArray
from tests.bench.common.sections import Section, delay, error_of, repetitions_of, stopped
from tests.bench.gate_cells import baselines
from tests.bench.gate_cells.canaries import NEVER, Canaries, hybrid_harm_stops

WHEEL = "obp==0.4.1"
WHEELS = Path(".cache/wheels")
CAMPAIGNS = ("all", "men", "women")
LOOK = 20


@dataclass(frozen=True, kw_only=True, eq=False)
class Log:
    """One campaign under one policy, 10,000 rows in the order of time."""

    action: IntArray
    position: IntArray
    click: FloatArray
    propensity: FloatArray
    """Logged probability of the shown item at its position."""


def main() -> int:
    """Print the tables and the JSON; exit status 1 if a bound is broken."""
    options = _parser().parse_args()
    scale = 0.1 if options.quick else 1.0
    archive = zipfile.ZipFile(_wheel())
    uniform = {c: _log(archive, "random", c) for c in CAMPAIGNS}
    bts = {c: _log(archive, "bts", c) for c in CAMPAIGNS}
    clicks = np.concatenate([log.click for log in uniform.values()])
    sections = [
        relabelled(clicks, scale, options.seed),
        dropped(clicks, scale, options.seed),
        off_policy_both_ways(uniform, bts),
    ]
    numbers: dict[str, float] = {}
    for section in sections:
        print(section.text())
        numbers |= section.numbers
    broken = [claim for section in sections for claim in section.broken]
    print(json.dumps({key: round(value, 4) for key, value in numbers.items()}))
    return 1 if broken else 0


def relabelled(clicks: FloatArray, scale: float, seed: int) -> Section:
    """(a) Arms assigned at random to the 30,000 uniform rows: nothing differs, so every abort is false."""
    section = Section(title=f"V8a A/A relabelling of {len(clicks):,} real rows, click rate {clicks.mean():.4f}, look {LOOK}")
    section.header("share", "ours", *baselines.INTERVALS)
    n, worst = repetitions_of(1000, scale), 0.0
    for share in (0.5, 0.1, 0.05):
        canaries = _assigned(np.random.default_rng([seed, int(100 * share)]), clicks, share, n)
        ours = stopped(_ours(canaries, clicks, share))
        section.row(f"{share:g}", ours, *(stopped(rule(canaries)) for rule in baselines.INTERVALS.values()))
        section.numbers[f"aa_share_{share:g}"] = ours
        worst = max(worst, ours)
    section.require("false abort <= 0.05 + 3 SE", worst <= 0.05 + 3 * error_of(0.05, n))
    return section


def dropped(clicks: FloatArray, scale: float, seed: int) -> Section:
    """(b) A canary at share 0.5 that loses some of its real clicks."""
    section = Section(title="V8b rows until a loss of real clicks is found, share 0.5 (share found)")
    section.header("clicks lost", "ours", *baselines.INTERVALS)
    n = repetitions_of(500, scale)
    for lost in (1.0, 0.8, 0.5):
        canaries = _assigned(np.random.default_rng([seed, 7]), clicks, 0.5, n, lost=lost)
        ours = _ours(canaries, clicks, 0.5)
        section.row(f"{lost:.0%}", delay(ours), *(delay(rule(canaries)) for rule in baselines.INTERVALS.values()))
        section.numbers[f"drop_{lost:g}_found"] = stopped(ours)
        section.numbers[f"drop_{lost:g}_rows"] = float(np.median(np.minimum(ours, len(clicks))))
    section.require("all clicks lost is always found", section.numbers["drop_1_found"] >= 0.995)
    section.require("80 % lost is found", section.numbers["drop_0.8_found"] >= 0.95)
    return section


def off_policy_both_ways(uniform: dict[str, Log], bts: dict[str, Log]) -> Section:
    """(c) Each policy estimated from the other's log, and (d) what clipping at 3 would have said."""
    section = Section(title="V8c, d off-policy, truth from the other policy's own log")
    section.header("log -> policy", "campaign", "ESS/n", "mean w", "max w", "status", "truth", "estimate", "z", "clip 3", "holds")
    right, refused = 0, 0
    for campaign in CAMPAIGNS:
        down, up = uniform[campaign], bts[campaign]
        informative = _judged(section, "uniform -> BTS", campaign, down, _bts_weights(down, up), float(up.click.mean()))
        even = 1.0 / (len(np.unique(down.action)) * up.propensity)
        other = _judged(section, "BTS -> uniform", campaign, up, even, float(down.click.mean()))
        right += informative and not other
        refused += not other
    section.numbers |= {"ope_right_of_3": right, "ope_bts_to_uniform_refused_of_3": refused}
    section.require("BTS -> uniform refused, where the clipped interval is tight and wrong", refused == 3)
    section.require("informative exactly for uniform -> BTS", right == 3)
    return section


def _judged(section: Section, name: str, campaign: str, log: Log, weights: FloatArray, truth: float) -> bool:
    with np.errstate(divide="ignore"):
        log_w = np.maximum(np.log(weights), -700.0)
    result = off_policy.estimate(
        LoggedResponses(
            log_candidate=log_w,
            log_logged=np.zeros(len(log_w)),
            reward=log.click,
            is_fully_supported=True,
            engine_gap=0.0,
        ),
        margin=0.001,
    )
    health = result.health
    assert health is not None
    weighted, clipped = weights * log.click, np.minimum(weights, 3.0) * log.click
    z = (weighted.mean() - truth) / _error(weighted, truth, len(log.click))
    half = 1.96 * clipped.std() / math.sqrt(len(clipped))
    holds = abs(clipped.mean() - truth) <= half
    section.row(
        name, campaign, health.ess / health.n, health.mean, f"{weights.max():,.0f}", str(result.status),
        f"{truth:.5f}", f"{weighted.mean():.5f}", f"{z:+.2f}", f"{clipped.mean():.5f} +- {half:.5f}", "yes" if holds else "no",
    )  # fmt: skip
    if result.status is OffPolicyStatus.INFORMATIVE:
        section.require(f"{name} {campaign} within 3 SE of the truth", abs(z) <= 3.0)
    return result.status is OffPolicyStatus.INFORMATIVE


def _error(weighted: FloatArray, truth: float, n: int) -> float:
    """Standard error of estimate minus truth, both being means over n rows."""
    return math.sqrt(float(weighted.var()) / n + truth * (1 - truth) / n)


def _bts_weights(down: Log, up: Log) -> FloatArray:
    """BTS over uniform probability of each uniformly shown item: how often BTS showed it there, over its propensity.

    The log holds BTS's probability only for what it showed; averaging those would favour moments of high probability.
    """
    counts = np.zeros((int(up.position.max()) + 1, 100))
    np.add.at(counts, (up.position, up.action), 1.0)
    often = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1.0)
    return often[down.position, down.action] / down.propensity


def _assigned(rng: np.random.Generator, clicks: FloatArray, share: float, repetitions: int, lost: float = 0.0) -> Canaries:
    """The real stream with random arms; the canary loses a share of its clicks. Looks of 20 rows."""
    parts = list(_assigned_parts(rng, clicks, share, repetitions, lost))
    tg, tb, cg, cb = (np.concatenate([part[k] for part in parts]) for k in range(4))
    return Canaries(
        treated_good=tg,
        treated_bad=tb,
        control_good=cg,
        control_bad=cb,
        share=np.full(tg.shape[1], share),
        units_per_look=LOOK,
    )


def _assigned_parts(
    rng: np.random.Generator, clicks: FloatArray, share: float, repetitions: int, lost: float
) -> Iterator[tuple[FloatArray, ...]]:
    for _ in range(math.ceil(repetitions / 100)):
        treated = rng.random((min(100, repetitions), len(clicks))) < share
        clicked = (clicks > 0) & ~(treated & (rng.random(treated.shape) < lost))
        cells = (treated & clicked, treated & ~clicked, ~treated & clicked, ~treated & ~clicked)
        yield tuple(cell.reshape(len(cell), -1, LOOK).sum(axis=2).astype(np.float64) for cell in cells)


def _ours(canaries: Canaries, clicks: FloatArray, share: float) -> IntArray:
    by_betting, by_looks = hybrid_harm_stops(canaries, baseline=float(clicks.mean()), n_max=len(clicks), share=share)
    return np.minimum(np.minimum(by_betting, by_looks), NEVER)


def _log(archive: zipfile.ZipFile, policy: str, campaign: str) -> Log:
    with archive.open(f"obp/dataset/obd/{policy}/{campaign}/{campaign}.csv") as raw:
        rows = list(csv.DictReader(io.TextIOWrapper(raw, "utf-8")))
    rows.sort(key=lambda row: row["timestamp"])
    return Log(
        action=np.array([int(row["item_id"]) for row in rows]),
        position=np.array([int(row["position"]) for row in rows]),
        click=np.array([float(row["click"]) for row in rows]),
        propensity=np.array([float(row["propensity_score"]) for row in rows]),
    )


def _wheel() -> Path:
    """The wheel from the cache, or from the package index with pip."""
    name, version = WHEEL.split("==")
    if not list(WHEELS.glob(f"{name}-{version}-*.whl")):
        only = ["--no-deps", "--only-binary", ":all:", "--dest", str(WHEELS)]
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *only, WHEEL], check=True)
    return next(WHEELS.glob(f"{name}-{version}-*.whl"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Run the gates on real clicks (Open Bandit Dataset).")
    parser.add_argument("--quick", action="store_true", help="a tenth of the repetitions")
    parser.add_argument("--seed", type=int, default=20261121)
    return parser


if __name__ == "__main__":
    sys.exit(main())
