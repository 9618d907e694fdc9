"""`make bench-learning`: a small language model against simulated users with a known optimum.

Labels to 90 % of the way from the first policy to the oracle for each estimator; final liking and effective sample size over the lag of the
data for each correction; final liking over label noise. Medians over seeds. `--quick` does the smallest form of each.
"""

import argparse
import gc
import json
import logging
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch

from app.domain.batches import TurnPayload
from pipelines.training import TrainingConfig
from pipelines.training.config import CorrectionConfig
from tests.fakes.learning import fake_ports
from tests.learning.policy_iteration import CONFIG, Curve, iterate, liking

TURNS = 48
CORRECTIONS = ("tis", "icepop", "cispo", "none")
ORACLE = 1.0


def run(config: TrainingConfig, *, cycles: int, seeds: int, lag: int = 0, noise: float = 0.0, repeat: int = 1) -> list[Curve]:
    """One curve per seed."""
    curves: list[Curve] = []
    for seed in range(seeds):
        numbers = random.Random(seed)

        def noisy(turn: TurnPayload, numbers: random.Random = numbers) -> float:
            return numbers.random() if numbers.random() < noise else liking(turn)

        with tempfile.TemporaryDirectory() as folder:
            ports = fake_ports(Path(folder))
            curves.append(iterate(ports, cycles=cycles, turns=TURNS, lag=lag, seed=seed, repeat=repeat, reward=noisy, config=config))
    return curves


def with_(**changes: Any) -> TrainingConfig:
    """The tests' configuration with something else."""
    return msgspec.structs.replace(CONFIG, **changes)


def labels_to_90pct(curve: Curve) -> float:
    """Labels until liking first reaches 90 % of the way to the oracle; infinite where it does not."""
    goal = curve.liked[0] + 0.9 * (ORACLE - curve.liked[0])
    reached = next((cycle for cycle, liked in enumerate(curve.liked) if liked >= goal), None)
    return float("inf") if reached is None else reached * TURNS


def final(curves: list[Curve]) -> float:
    """Median over seeds of the mean of the last three readings."""
    return round(statistics.median(statistics.fmean(curve.liked[-3:]) for curve in curves), 4)


def main() -> None:
    """Run the sweeps; the last line is the JSON of issue 4."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # a run that is held because the optimum is reached
    gc.freeze()  # an update collects garbage, and would look through everything that was imported
    cycles, seeds = (32, 1) if quick else (40, 5)
    estimators = {name: run(with_(estimator=name), cycles=cycles, seeds=seeds) for name in ("segment_tracker", "batch_mean")}
    estimators["group_mean"] = run(with_(estimator="group_mean"), cycles=cycles, seeds=seeds, repeat=4)  # groups of four
    lag: dict[str, dict[str, Any]] = {}
    for correction in ("tis", "none") if quick else CORRECTIONS:
        lag[correction] = {}
        for versions in (0, 2, 16) if quick else (0, 1, 2, 4, 8, 16):
            curves = run(with_(correction=CorrectionConfig(name=correction)), cycles=cycles, seeds=seeds, lag=versions)
            shares = [min(curve.effective_share) for curve in curves if curve.effective_share]
            lag[correction][str(versions)] = {"liked": final(curves), "min_effective_share": round(statistics.median(shares), 4)}
            print(f"lag {versions} {correction}: {lag[correction][str(versions)]}", flush=True)
    noise = {
        str(share): final(run(CONFIG, cycles=cycles, seeds=seeds, noise=share)) for share in ((0.0, 0.4) if quick else (0.0, 0.1, 0.2, 0.4))
    }
    labels = {name: statistics.median(labels_to_90pct(curve) for curve in curves) for name, curves in estimators.items()}
    finite = {name: None if value == float("inf") else value for name, value in labels.items()}
    print(json.dumps({"labels_to_90pct": finite, "lag": lag, "noise": noise}))


if __name__ == "__main__":
    main()
