"""`make bench-envlearn`: SmolLM2-135M practises the small functions: sample in groups, grade in boxes, learn against the group, again.

    python -m tests.bench.envlearn --quick                                         one seed, one cycle, a third of the tasks
    python -m tests.bench.envlearn --resume build/envlearn.jsonl --minutes 9       again and again: a piece is a cycle of a seed, 2 to 5 min

Everything real: the model, the grades, the update with its guards; one box's gateway and the book are left out. The first version and the
last one of each seed are judged on 64 tries a task that nobody learns from: pass@1 is their mean, pass@8 the unbiased estimate (Chen et al.
2021, arXiv 2107.03374). Intervals are of the rise from the first to the last, drawing tasks and seeds again. The tasks are those that are
practised: what is shown is that practice teaches what is practised. A cheating policy is planted beside: it answers with every stock hack.

The last line is JSON; exit code 1 where a rise is not clear or cheating pays.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from math import comb
from pathlib import Path
from typing import Any

import numpy as np

from app.domain.learning.batches import BatchItem, BatchManifest, TurnPayload
from app.domain.telemetry.turns import SamplingParams
from app.policy.decoding.sampling import sample
from app.policy.model import load_policy
from app.sandbox.bubblewrap import BubblewrapBoxes
from pipelines.rollouts.boxed.agent import code_of
from pipelines.rollouts.grading import Grader, Verdict
from pipelines.rollouts.tasks import TaskData
from pipelines.rollouts.tasksets.small_functions import FILE, SmallFunctions
from pipelines.training import TrainingConfig, train
from tests.architecture.sources import ROOT
from tests.bench.common.pieces import Pieces, add_pieces, pieces_of
from tests.fakes.learning import NOON, FakeTrajectories, FakeWeights, fake_ports, version_of

MODEL = ROOT / ".cache" / "models" / "smollm2-135m-instruct"
CONFIG = TrainingConfig(estimator="group_mean", learning_rate=2e-5, turns_per_step=32, kl_beta=0.0)
K, TOKENS, AT_ONCE = 8, 72, 192
JUDGED = 64
"""Tries a task, before and after. With 16 the noise of pass@8 on tasks that are solved once in twenty tries was as large as their rise."""
GRADER = Grader(boxes=BubblewrapBoxes())


def graded(tries: Sequence[tuple[TaskData, str]]) -> list[float]:
    """What each answer is paid; the same code for the same task is graded once."""
    codes = [(task, code_of(text)) for task, text in tries]
    different = {(task.key, code): (task, code) for task, code in codes}
    with ThreadPoolExecutor(3) as pool:
        grades = pool.map(lambda one: GRADER.grade(one[0], {FILE: one[1]}, seed=1).verdict is Verdict.PASSED, different.values())
        paid = dict(zip(different, grades, strict=True))
    return [float(paid[task.key, code]) for task, code in codes]


def tried(weights: Path, tasks: Sequence[TaskData], *, tries: int, seed: int) -> tuple[list[Any], list[float]]:
    """So many answers to each task, in order of the tasks, and what each is paid."""
    policy = load_policy(weights)  # in what this processor computes fastest, as an engine does
    prompts = [policy.chat.prompt([{"role": "user", "content": task.instruction}]) for task in tasks for _ in range(tries)]
    drawn = [SamplingParams(max_tokens=TOKENS, seed=10_000 * seed + n) for n in range(len(prompts))]
    made = [one for n in range(0, len(prompts), AT_ONCE) for one in sample(policy, prompts[n : n + AT_ONCE], drawn[n : n + AT_ONCE])]
    return made, graded([(tasks[n // tries], one.text) for n, one in enumerate(made)])


def batch_of(
    made: Sequence[Any], paid: Sequence[float], tasks: Sequence[TaskData], *, digest: str, seed: int, trajectories: Any
) -> BatchManifest:
    """One cycle's rollouts as a batch, each in the group of its task."""
    payloads = [
        TurnPayload(
            inference_id=f"{seed}-{n:04d}", episode_id=f"{seed}-{n:04d}", policy="composer", version=digest,
            prompt_tokens=tuple(one.prompt), completion_tokens=tuple(one.tokens), logprobs=tuple(one.logprobs),
            temperature=1.0, top_p=1.0, finished_at=NOON,
        )
        for n, one in enumerate(made)
    ]  # fmt: skip
    assert isinstance(trajectories, FakeTrajectories)
    trajectories.write(f"segment-{seed}", payloads)
    items = tuple(
        BatchItem(
            inference_id=payload.inference_id, episode_id=payload.episode_id, reward=reward, label_revision=1, segment="", actor=None,
            version=digest, payload_segment=f"segment-{seed}", group=tasks[n // K].key,
        )
        for n, (payload, reward) in enumerate(zip(payloads, paid, strict=True))
    )  # fmt: skip
    return BatchManifest(
        id=f"batch-{seed}", policy="composer", slot=seed, champion=digest, anchor=digest, rule_set="graded", window_from=NOON,
        window_to=NOON, items=items,
    )  # fmt: skip


def cycled(folder: Path, tasks: Sequence[TaskData], before: dict[str, Any] | None, *, seed: int, cycle: int) -> dict[str, Any]:
    """One cycle of a seed: practise, learn; the version that came of it, and what the practice was paid [tasks, K]."""
    ports, began = fake_ports(folder), time.monotonic()
    assert isinstance(ports.weights, FakeWeights)
    ports.weights.folder.mkdir(parents=True, exist_ok=True)
    base = (MODEL / "READY").read_text().strip()
    if not (ports.weights.folder / base).exists():
        (ports.weights.folder / base).symlink_to(MODEL)
    version = version_of(base) if before is None else version_of(before["digest"], parent=before["parent"], step=cycle)
    version = replace(version, optimizer_uri=None if before is None else before["optimizer_uri"])
    weights = ports.weights.path(version.digest)
    if not weights.exists():
        raise SystemExit(f"{weights} is gone: name another file to --resume, and begin anew")
    made, paid = tried(weights, tasks, tries=K, seed=1000 * seed + cycle)
    rewards = np.array(paid).reshape(len(tasks), K)
    print(f"seed {seed} cycle {cycle}: pass@1 {rewards.mean():.3f} pass@8 {rewards.max(axis=1).mean():.3f}", end=" ", flush=True)
    print(f"mixed groups {int((rewards.std(axis=1) > 0).sum())} of {len(tasks)} ({time.monotonic() - began:.0f} s)", flush=True)
    batch = batch_of(made, paid, tasks, digest=version.digest, seed=1000 * seed + cycle, trajectories=ports.trajectories)
    run = train(batch, run_id=batch.id, parent=version, anchor=version, config=CONFIG, ports=ports)
    if run.candidate is None:
        raise SystemExit(f"the update was held: {run.message}")
    for state in (ports.folder / "optimizer" / "composer").iterdir():
        if state.name not in (run.candidate, version.digest):  # 1.6 GB each, and nothing goes on from it
            shutil.rmtree(state)
    learned = {name: run.metrics.get(name) for name in ("turns", "steps", "effective_share", "mean_ratio")}
    return {
        "digest": run.candidate, "parent": version.digest, "optimizer_uri": run.metrics.get("optimizer_uri"), "rewards": rewards.tolist(),
        "seconds": round(time.monotonic() - began), "update": learned,
    }  # fmt: skip


def judged(weights: Path, tasks: Sequence[TaskData], *, tries: int, seed: int) -> list[int]:
    """How many of so many fresh tries solve each task."""
    _, paid = tried(weights, tasks, tries=tries, seed=seed)
    return [int(count) for count in np.array(paid).reshape(len(tasks), tries).sum(axis=1)]


def pass_at(k: int, solved: np.ndarray, tries: int) -> np.ndarray:
    """Unbiased: one minus the chance that k tries, drawn without replacement from all of them, have none that solves."""
    return np.array([1.0 - comb(tries - int(c), k) / comb(tries, k) for c in solved.ravel()]).reshape(solved.shape)


def interval(rises: np.ndarray, *, seed: int = 0) -> tuple[float, float]:
    """95 % of the mean of rises [seeds, tasks], drawing seeds and tasks again."""
    drawn = np.random.default_rng(seed)
    seeds, tasks = (drawn.integers(0, size, (4000, size)) for size in rises.shape)
    means = [rises[np.ix_(some, others)].mean() for some, others in zip(seeds, tasks, strict=True)]
    return round(float(np.quantile(means, 0.025)), 4), round(float(np.quantile(means, 0.975)), 4)


def told(pieces: Pieces, folder: Path, tasks: Sequence[TaskData], *, seeds: int, cycles: int, tries: int) -> int:
    """Measure, print, judge."""
    cheated = [(task, f"```python\n{files[FILE]}\n```") for task in tasks for files in task.hacks.values()]
    cheat = float(np.mean(pieces.get("cheats", partial(graded, cheated))))
    first = np.array(pieces.get("first version", partial(judged, MODEL, tasks, tries=tries, seed=777_000)))
    practice: list[list[list[list[float]]]] = []
    last: list[list[int]] = []
    for seed in range(1, seeds + 1):
        before: dict[str, Any] | None = None
        practice.append([])
        for cycle in range(cycles):
            work = partial(cycled, folder / f"seed-{seed}", tasks, before, seed=seed, cycle=cycle)
            before = pieces.get(f"seed {seed} cycle {cycle}", work)
            assert before is not None
            practice[-1].append(before["rewards"])
        assert before is not None
        weights = folder / f"seed-{seed}" / "weights" / before["digest"]
        last.append(pieces.get(f"seed {seed} last version", partial(judged, weights, tasks, tries=tries, seed=777_000 + seed)))
    rises = {k: pass_at(k, np.array(last), tries) - pass_at(k, first, tries)[None] for k in (1, K)}
    paid = np.array(practice)  # [seeds, cycles, tasks, K]
    figures = {
        **{f"pass_at_{k}": [round(float(pass_at(k, solved, tries).mean()), 4) for solved in (first, np.array(last))] for k in (1, K)},
        **{f"pass_at_{k}_rise": interval(rises[k]) for k in (1, K)},
        **{f"pass_at_{k}_rise_by_seed": [round(float(rise), 4) for rise in rises[k].mean(axis=1)] for k in (1, K)},
        "practice_mean": [round(float(mean), 4) for mean in paid.mean(axis=(0, 2, 3))], "cheat_paid": cheat, "cheats": len(cheated),
        "seeds": seeds, "cycles": cycles, "tasks": len(tasks), "tries": tries,
    }  # fmt: skip
    print(json.dumps(figures))
    return 0 if figures["pass_at_1_rise"][0] > 0 and figures[f"pass_at_{K}_rise"][0] > 0 and cheat == 0 else 1


def main() -> int:
    """As asked for on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cycles", type=int, default=3)
    add_pieces(parser)
    asked = parser.parse_args()
    tasks = list(SmallFunctions().load())[:: 3 if asked.quick else 1]
    size = {"seeds": 1, "cycles": 1, "tries": K} if asked.quick else {"seeds": asked.seeds, "cycles": asked.cycles, "tries": JUDGED}
    with tempfile.TemporaryDirectory(prefix="ratchet-envlearn-") as scratch:
        folder = Path(scratch) if asked.resume is None else asked.resume.with_suffix("")
        return pieces_of(asked, __file__).in_turn(lambda pieces: told(pieces, folder, tasks, **size))


if __name__ == "__main__":
    sys.exit(main())
