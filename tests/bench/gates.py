"""`make bench-gates`: are the gates what they claim to be? Tables V1-V7 of the gates sheet, then one line of JSON.

    python -m tests.bench.gates            full repetitions, about ten minutes on two cores
    python -m tests.bench.gates --quick    few repetitions, within 55 seconds
    python -m tests.bench.gates --only all_turns who_is_hurt

Exit status 1 if a bound is broken. Bounds allow three standard errors of the repetitions used.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.bench.common.sections import Section
from tests.bench.gate_cells import data, erasures, harm, live, people, release, turns

QUICK = 0.05
PARTS = 4
KEYS = (
    "aa_false_abort_max",
    "aa_with_ramp_and_diurnal",
    "aa_clustered",
    "aa_heavy_users",
    "aa_carry_over",
    "aa_holdback_eras",
    "small_baseline_promoted",
    "aa_returning_people",
    "aa_erasures",
    "aa_all_turns",
    "aa_cuped",
    "cuped_promote_at_margin",
    "aa_limits",
    "incident_rollbacks",
    "replica_double_ramps",
    "median_delay_ratio_vs_sprt_5pp",
    "power_minus_2pp",
    "ni_promote_at_minus_delta",
    "ni_promote_at_zero",
    "ratchet_30_days_pp",
    "srm_fpr",
    "post_promotion_aa",
    "delay_10pp_units",
)
HACK = "hack_units: "
SECTIONS: tuple[Callable[[float, int], Section], ...] = (
    *(partial(harm.grid, half=k, halves=PARTS) for k in range(PARTS)),
    harm.controllers,
    harm.ramp,
    harm.repeated_users,
    people.heavy_users,
    people.usual_values,
    people.carry_over,
    people.holdbacks,
    people.small_baselines,
    turns.all_turns,
    turns.identical_people,
    turns.who_is_hurt,
    live.returning_people,
    erasures.erasures,
    live.absolute_limits,
    live.incidents,
    live.replicas,
    harm.delays_and_family,
    harm.delays,
    harm.rare_errors,
    release.promotions,
    release.ratchet,
    data.sample_ratios,
    release.after_promotion,
    data.off_policy_estimates,
    data.hacks,
    data.live_hacks,
)


def main() -> int:
    """Run every section in a small pool, print the tables in order, then the JSON."""
    options = _parser().parse_args()
    scale = QUICK if options.quick else options.scale
    began = time.perf_counter()
    wanted = [section for section in SECTIONS if not options.only or _name(section) in options.only]
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        running = [pool.submit(_timed, section, scale, options.seed) for section in wanted]
        numbers: dict[str, float] = {}
        broken: list[str] = []
        for job in running:
            section, seconds = job.result()
            print(section.text(), f"({seconds:.0f} s)", flush=True)
            broken += section.broken
            for key, value in section.numbers.items():
                numbers[key] = max(value, numbers.get(key, value))
    print(f"\n{time.perf_counter() - began:.0f} s, scale {scale:g}, seed {options.seed}")
    for claim in broken:
        print("BROKEN", claim)
    hacks = {name.removeprefix(HACK): value for name, value in sorted(numbers.items()) if name.startswith(HACK)}
    print(json.dumps({**{key: round(numbers[key], 4) for key in KEYS if key in numbers or not options.only}, "hack_units": hacks}))
    return 1 if broken else 0


def _name(section: Callable[[float, int], Section]) -> str:
    return getattr(section, "func", section).__name__


def _timed(section: Callable[[float, int], Section], scale: float, seed: int) -> tuple[Section, float]:
    began = time.perf_counter()
    return section(scale, seed), time.perf_counter() - began


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Simulate the gates and print the tables V1-V7.")
    parser.add_argument("--quick", action="store_true", help="few repetitions, within 55 seconds")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full repetitions")
    parser.add_argument("--only", nargs="+", default=[], metavar="SECTION", help="these sections alone, by the names of their functions")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=20261121)
    return parser


if __name__ == "__main__":
    sys.exit(main())
