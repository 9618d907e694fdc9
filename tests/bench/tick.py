"""`make bench-tick`: CPU seconds of one look of the live judges at all closed units, with what the look before knew and from the beginning.

Synthetic units of the default metrics in the default windows, half of them treated, ramped over two stages. Each size is looked at five
times, fifty units apart, as the watch does; the peer is the same judge over the same evidence when it remembers nothing of it (another
variance in every reference, so that each question is a new one). Evidence is built, hashed and judged; it is not read from a database.

    python -m tests.bench.tick --quick

    {"judge", "units", "whole_s", "tick_s", "ratio"}

`ratio`: whole_s / tick_s, of medians. Bound: at least 2 at the largest size (exit code 1 where it is less).
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np

from pipelines.evaluation.config import GatesConfig
from pipelines.evaluation.counting.evidence import Assigned, Evidence, Lane
from pipelines.evaluation.counting.references import Reference
from pipelines.evaluation.live.champion import decide_champion
from pipelines.evaluation.live.decide import Decision, decide
from tests.fakes.evidence import calm

CONFIG = GatesConfig()
SIZES = (20_000, 100_000, 400_000)
LOOKS, APART = 5, 50
SECOND_US = 1_000_000
LEAST_RATIO = 2.0
MEAN = 0.6
Judge = Callable[[GatesConfig, Evidence], Decision]


class Release:
    """All units that there will ever be; evidence is the first of them."""

    def __init__(self, units: int, *, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.units = units
        self.treated = draw.random(units) < 0.5
        self.stratum = (np.arange(units) > units // 4).astype("<i8")
        self.outcomes = {metric.name: (draw.random(units) < MEAN).astype("<f8") for metric in CONFIG.metrics}

    def evidence(self, units: int, *, variance: float) -> Evidence:
        """After so many."""
        treated = int(self.treated[:units].sum())
        row = Assigned(
            stratum=0, probability=0.5, treated=treated, control=units - treated, covered_treated=treated, covered_control=units - treated
        )
        at = units * SECOND_US
        return calm(
            at=at, stage=1, stage_since=0, since=0, assigned=(row,), lasts_s=float(at),
            lanes=tuple(self._lane(window, units) for window in sorted({CONFIG.window_of(metric) for metric in CONFIG.metrics})),
            references={metric.name: Reference(mean=MEAN, variance=variance, units=1000) for metric in CONFIG.metrics},
            n_max={metric.name: 1_000_000 for metric in CONFIG.required},
        )  # fmt: skip

    def _lane(self, window_s: float, units: int) -> Lane:
        names = [metric.name for metric in CONFIG.metrics if CONFIG.window_of(metric) == window_s]
        closed_at = (np.arange(units) * SECOND_US + int(window_s * SECOND_US)).astype("<i8")
        return Lane(
            window_s=window_s, treated=self.treated[:units].astype("u1").tobytes(), stratum=self.stratum[:units].tobytes(),
            probability=np.full(units, 0.5).tobytes(), closed_at=closed_at.tobytes(), covered=np.ones(units, dtype="u1").tobytes(),
            outcomes={name: self.outcomes[name][:units].tobytes() for name in names}, missing=dict.fromkeys(names, 0),
        )  # fmt: skip


def looks(judge: Judge, release: Release, variances: Sequence[float]) -> float:
    """Median CPU seconds of one look per variance, each fifty units after the one before."""
    took: list[float] = []
    for look, variance in enumerate(variances):
        evidence = release.evidence(release.units - APART * (len(variances) - 1 - look), variance=variance)
        began = time.process_time()
        judge(CONFIG, evidence)
        took.append(time.process_time() - began)
    return statistics.median(took)


def row(name: str, judge: Judge, units: int, *, count: int, seed: int) -> dict[str, object]:
    """One judge at one size."""
    release, variance = Release(units, seed=seed), MEAN * (1.0 - MEAN)
    whole_s = looks(judge, release, [variance + look * 1e-6 for look in range(1, count + 1)])
    tick_s = looks(judge, release, [variance] * (count + 1))  # of these the first knows nothing
    return {"judge": name, "units": units, "whole_s": round(whole_s, 3), "tick_s": round(tick_s, 3), "ratio": round(whole_s / tick_s, 1)}


def main() -> int:
    """The last line is JSON."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="the largest size alone, looked at twice")
    options.add_argument("--seed", type=int, default=1)
    given = options.parse_args()
    rows: list[dict[str, object]] = []
    sizes, count = (SIZES[-1:], 2) if given.quick else (SIZES, LOOKS)
    for units in sizes:
        for name, judge in (("canary", decide), ("champion", decide_champion)):
            rows.append(row(name, judge, units, count=count, seed=given.seed))
            print(json.dumps(rows[-1]), flush=True)
    enough = all(float(str(found["ratio"])) >= LEAST_RATIO for found in rows[-2:])
    print(json.dumps({"rows": rows, "bounds_hold": enough}))
    return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(main())
