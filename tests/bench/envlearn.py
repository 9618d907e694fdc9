"""`make bench-envlearn`: SmolLM2-135M practises the small functions: sample in groups, grade in boxes, learn against the group, again.

    python -m tests.bench.envlearn --quick      one seed, half of the tasks
    python -m tests.bench.envlearn --seeds 3 --cycles 3

Everything real: the model, the grades, the update with its guards. pass@1 is the mean over tasks and tries, pass@8 whether any of eight
passes; the interval is of the rise from the first to the last version over tasks and seeds (bootstrap by task). A cheating policy is
planted beside: it answers with every stock hack, and what it is paid is printed. The last line is JSON; exit code 1 where the rise is
not clear or cheating pays.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from app.domain.learning.batches import BatchItem, BatchManifest, TurnPayload
from app.domain.release.versions import Version
from app.domain.telemetry.turns import SamplingParams
from app.policy.decoding.sampling import sample
from app.policy.model import load_policy
from app.sandbox.bubblewrap import BubblewrapBoxes
from pipelines.rollouts.boxed.agent import code_of
from pipelines.rollouts.grading import Grader, Verdict
from pipelines.rollouts.tasks import TaskData
from pipelines.rollouts.tasksets.small_functions import FILE, SmallFunctions
from pipelines.training import TrainingConfig, TrainingPorts, train
from tests.architecture.sources import ROOT
from tests.fakes.learning import NOON, FakeTrajectories, FakeWeights, fake_ports, version_of

MODEL = ROOT / ".cache" / "models" / "smollm2-135m-instruct"
CONFIG = TrainingConfig(estimator="group_mean", learning_rate=2e-5, turns_per_step=32, kl_beta=0.0)
K, TOKENS = 8, 72
GRADER = Grader(boxes=BubblewrapBoxes())


def graded(tries: Sequence[tuple[TaskData, str]]) -> list[float]:
    """What each answer is paid; the same code for the same task is graded once."""
    codes = [(task, code_of(text)) for task, text in tries]
    different = {(task.key, code): (task, code) for task, code in codes}
    with ThreadPoolExecutor(3) as pool:
        grades = pool.map(lambda one: GRADER.grade(one[0], {FILE: one[1]}, seed=1).verdict is Verdict.PASSED, different.values())
        paid = dict(zip(different, grades, strict=True))
    return [float(paid[task.key, code]) for task, code in codes]


def practised(ports: TrainingPorts, version: Version, tasks: Sequence[TaskData], seed: int) -> tuple[BatchManifest, np.ndarray]:
    """One cycle's rollouts: the batch, and rewards [tasks, K]."""
    policy = load_policy(ports.weights.path(version.digest), dtype=torch.bfloat16)
    prompts = [policy.chat.prompt([{"role": "user", "content": task.instruction}]) for task in tasks for _ in range(K)]
    made = sample(policy, prompts, [SamplingParams(max_tokens=TOKENS, seed=10_000 * seed + n) for n in range(len(prompts))])
    paid = graded([(task, made[place * K + n].text) for place, task in enumerate(tasks) for n in range(K)])
    payloads = [
        TurnPayload(
            inference_id=f"{seed}-{n:04d}", episode_id=f"{seed}-{n:04d}", policy="composer", version=version.digest,
            prompt_tokens=tuple(one.prompt), completion_tokens=tuple(one.tokens), logprobs=tuple(one.logprobs), finished_at=NOON,
        )
        for n, one in enumerate(made)
    ]  # fmt: skip
    assert isinstance(ports.trajectories, FakeTrajectories)
    ports.trajectories.write(f"segment-{seed}", payloads)
    items = tuple(
        BatchItem(
            inference_id=payload.inference_id, episode_id=payload.episode_id, reward=reward, label_revision=1, segment="", actor=None,
            version=version.digest, payload_segment=f"segment-{seed}", group=tasks[n // K].key,
        )
        for n, (payload, reward) in enumerate(zip(payloads, paid, strict=True))
    )  # fmt: skip
    batch = BatchManifest(
        id=f"batch-{seed}", policy="composer", slot=seed, champion=version.digest, anchor=version.digest, rule_set="graded",
        window_from=NOON, window_to=NOON, items=items,
    )  # fmt: skip
    return batch, np.array(paid).reshape(len(tasks), K)


def learned(folder: Path, tasks: Sequence[TaskData], *, cycles: int, seed: int) -> list[np.ndarray]:
    """Rewards [tasks, K] of each version, the first to the last."""
    ports = fake_ports(folder)
    assert isinstance(ports.weights, FakeWeights)
    ports.weights.folder.mkdir(parents=True)
    base = (MODEL / "READY").read_text().strip()
    (ports.weights.folder / base).symlink_to(MODEL)
    version, seen = version_of(base), list[np.ndarray]()
    for cycle in range(cycles + 1):
        began = time.monotonic()
        batch, rewards = practised(ports, version, tasks, seed=1000 * seed + cycle)
        seen.append(rewards)
        print(f"seed {seed} version {cycle}: pass@1 {rewards.mean():.3f} pass@8 {rewards.max(axis=1).mean():.3f}", end=" ", flush=True)
        print(f"mixed groups {int((rewards.std(axis=1) > 0).sum())} of {len(tasks)} ({time.monotonic() - began:.0f} s)", flush=True)
        if cycle < cycles:
            run = train(batch, run_id=batch.id, parent=version, anchor=version, config=CONFIG, ports=ports)
            if run.candidate is None:
                print(f"held: {run.message}", flush=True)
                continue
            uri = run.metrics.get("optimizer_uri")
            version = replace(version_of(run.candidate, parent=version.digest, step=cycle + 1), optimizer_uri=uri)
    return seen


def interval(first: np.ndarray, last: np.ndarray, *, seed: int = 0) -> tuple[float, float]:
    """95 % of the mean difference, by drawing tasks of seeds again."""
    drawn = np.random.default_rng(seed).integers(0, len(first), (4000, len(first)))
    means = (last - first)[drawn].mean(axis=1)
    return round(float(np.quantile(means, 0.025)), 4), round(float(np.quantile(means, 0.975)), 4)


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cycles", type=int, default=3)
    asked = parser.parse_args()
    tasks = list(SmallFunctions().load())[:: 2 if asked.quick else 1]
    cheated = [(task, f"```python\n{files[FILE]}\n```") for task in tasks for files in task.hacks.values()]
    cheat = float(np.mean(graded(cheated)))
    runs: list[list[np.ndarray]] = []
    for seed in range(1 if asked.quick else asked.seeds):
        with tempfile.TemporaryDirectory(prefix="ratchet-envlearn-") as folder:
            runs.append(learned(Path(folder), tasks, cycles=asked.cycles, seed=seed + 1))
    first, last = (np.concatenate([run[place] for run in runs]) for place in (0, -1))
    figures = {
        "pass_at_1": [round(float(np.mean([run[n].mean() for run in runs])), 4) for n in range(asked.cycles + 1)],
        "pass_at_8": [round(float(np.mean([run[n].max(axis=1).mean() for run in runs])), 4) for n in range(asked.cycles + 1)],
        "pass_at_1_rise": interval(first.mean(axis=1), last.mean(axis=1)), "pass_at_8_rise": interval(first.max(axis=1), last.max(axis=1)),
        "cheat_paid": cheat, "cheats": len(cheated), "seeds": len(runs), "cycles": asked.cycles, "tasks": len(tasks),
    }  # fmt: skip
    print(json.dumps(figures))
    return 0 if figures["pass_at_1_rise"][0] > 0 and figures["pass_at_8_rise"][0] > 0 and cheat == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
