"""`make bench-demo`: the whole demo with the real model, once per population of people, and what it gained over all of them.

Each run prints its own table. Required: every run ends with exit code 0, the median gain in edit persistence is 30 % or more,
answers do not collapse in length, and the divergence from the anchor stays within its budget.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Run the bench; the last line is JSON."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", default="1,2,3,4,5", help="populations, separated by commas")
    options.add_argument("--model", default="smollm2")
    options.add_argument("--quick", action="store_true", help="one population, the tiny model (a minute and a half)")
    given = options.parse_args()
    seeds, model = ([1], "tiny") if given.quick else ([int(seed) for seed in given.seeds.split(",")], given.model)
    runs = [_run(seed, model) for seed in seeds]
    print(json.dumps(_summary(seeds, runs)))
    return 0 if all(not run["failures"] for run in runs) else 1


def _run(seed: int, model: str) -> dict[str, Any]:
    """One demo; its output goes to the terminal, its last line is the summary."""
    command = [sys.executable, "-m", "pipelines", "demo", "--model", model, "--seed", str(seed), "--json"]
    lines: list[str] = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            lines.append(line)
            sys.stdout.write(line)
            sys.stdout.flush()
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def _summary(seeds: list[int], runs: list[dict[str, Any]]) -> dict[str, Any]:
    measured = [run for run in runs if run["persistence"] is not None]
    before = [run["persistence"]["first"]["mean"] for run in measured]
    after = [run["persistence"]["second"]["mean"] for run in measured]
    gains = [(new - old) / old for old, new in zip(before, after, strict=True)]
    caught = [run["harm"] for run in runs if run["harm"] is not None]
    return {
        "seeds": seeds, "failures": [run["failures"] for run in runs], "wall_s": [run["wall_s"] for run in runs],
        "persistence_first": before, "persistence_last": after, "relative_gain": [round(gain, 3) for gain in gains],
        "relative_gain_median": round(statistics.median(gains), 3) if gains else None,
        "low": [run["persistence"]["low"] for run in measured],
        "tokens_first": [run["lengths"]["first"]["mean"] for run in measured],
        "tokens_last": [run["lengths"]["second"]["mean"] for run in measured],
        "anchor_budget_used_max": max((share for run in runs for share in run["anchor_budget_used"]), default=None),
        "served_badly": [harm["requests"] for harm in caught], "detect_s": [round(harm["detect_s"], 1) for harm in caught],
        "roll_back_s": [round(harm["roll_back_s"], 1) for harm in caught],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
