"""`make bench-gates`: are the gates what they claim to be? Tables V1-V7 of the gates sheet, then one line of JSON.

    python -m tests.bench.gates            full repetitions; each section says what it took of CPU
    python -m tests.bench.gates --quick    few repetitions, three minutes of CPU
    python -m tests.bench.gates --only all_turns who_is_hurt
    python -m tests.bench.gates --keep build/gates.json    goes on where it was broken off, and prints what is kept there

Exit status 1 if a bound is broken. Bounds allow three standard errors of the repetitions used.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.bench.common.sections import Section
from tests.bench.gate_cells import data, erasures, harm, live, people, release, turns
from tests.bench.gate_cells.kept import Kept, Run, commit

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
Cells = Callable[[float, int], Section]
"""A section of the benchmark, of a scale and a seed."""
SECTIONS: dict[str, Cells] = {f"grid-{k + 1}": partial(harm.grid, half=k, halves=PARTS) for k in range(PARTS)} | {
    section.__name__: section
    for section in (
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
}


def main() -> int:
    """Run every section in a small pool, print the tables in order, then the JSON."""
    options = _parser().parse_args()
    scale = QUICK if options.quick else options.scale
    wanted = {name: cells for name, cells in SECTIONS.items() if not options.only or {name, name.partition("-")[0]} & {*options.only}}
    if not wanted:
        sys.exit(f"no section is called {' or '.join(options.only)}; there are {', '.join(SECTIONS)}")
    began, runs = time.perf_counter(), list[Run]()
    for run in gathered(wanted, Kept(path=options.keep), scale=scale, seed=options.seed, processes=options.processes):
        print(run.text(), flush=True)
        runs.append(run)
    print(f"\n{time.perf_counter() - began:.0f} s; the sections took {sum(run.cpu_s for run in runs):.0f} s of CPU")
    broken = [claim for run in runs for claim in run.section.broken]
    for claim in broken:
        print("BROKEN", claim)
    print(json.dumps(figures(runs, whole=not options.only)))
    return 1 if broken else 0


def gathered(sections: Mapping[str, Cells], kept: Kept, *, scale: float, seed: int, processes: int) -> Iterator[Run]:
    """Every section's run, in the order of `sections`; those that are not kept yet are run now, and kept as soon as they end."""
    ran = partial(_run, scale=scale, seed=seed, code=commit())
    found = {name: kept.find(name, scale=scale, seed=seed) for name in sections}
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        running = {name: pool.submit(ran, sections[name]) for name, run in found.items() if run is None}
        for name, job in running.items():
            job.add_done_callback(partial(_keep, kept, name))
        for name, run in found.items():
            yield run if run is not None else running[name].result()


def figures(runs: Sequence[Run], *, whole: bool) -> dict[str, object]:
    """The line of JSON: each key's largest value; every key is there if the run was `whole`."""
    numbers: dict[str, float] = {}
    for run in runs:
        for key, value in run.section.numbers.items():
            numbers[key] = max(value, numbers.get(key, value))
    hacks = {name.removeprefix(HACK): value for name, value in sorted(numbers.items()) if name.startswith(HACK)}
    return {**{key: round(numbers[key], 4) for key in KEYS if key in numbers or whole}, "hack_units": hacks}


def _run(cells: Cells, *, scale: float, seed: int, code: str) -> Run:
    began = time.process_time()
    section = cells(scale, seed)
    return Run(section=section, cpu_s=time.process_time() - began, scale=scale, seed=seed, commit=code)


def _keep(kept: Kept, name: str, job: Future[Run]) -> None:
    if not job.cancelled() and job.exception() is None:
        kept.add(name, job.result())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Simulate the gates and print the tables V1-V7.")
    parser.add_argument("--quick", action="store_true", help="few repetitions, three minutes of CPU")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full repetitions")
    parser.add_argument("--only", nargs="+", default=[], metavar="SECTION", help="these sections alone, by the names of their functions")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FILE",
        help="keep each section there; one that is, with this seed, at this scale or larger, is not run again",
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=20261121)
    return parser


if __name__ == "__main__":
    sys.exit(main())
