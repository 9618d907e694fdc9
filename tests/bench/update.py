"""`make bench-update`: the whole update that a cycle makes, of all parameters of the real model; seconds of each of its parts.

80 turns of the demo's shape: real programming prompts under one system prompt, answers of 20 to 48 real tokens; five Adam steps; the
anchor is another version than the parent, so every turn is scored under it too. In this process, over fakes for database and people; no
Ray.

    python -m tests.bench.update --quick      a fifth of the turns
"""

import argparse
import json
import os
import random
import tempfile
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import torch

from app.domain.learning.batches import TurnPayload
from app.policy.chat import Chat
from pipelines.simulation.people import person
from pipelines.simulation.product import Editor
from pipelines.training import TrainingConfig, train
from pipelines.training.config import GuardLimits
from tests.bench.train import MODEL, conversations
from tests.fakes.learning import NOON, FakeProgress, FakeWeights, fake_ports, make_batch, version_of

PARENT, ANCHOR = "p" * 64, "a" * 64
OPEN = GuardLimits(max_kl_champion=99, max_kl_anchor=99, min_entropy_share=0.0, max_mismatch=99, max_mismatch_p99=99,
                   min_effective_sample_share=0.0, min_mean_ratio=0.0, max_mean_ratio=1e9)  # fmt: skip
"""Guards out of the way: the answers are people's, so no policy drew them."""
CONFIG = TrainingConfig(turns_per_step=16, loss_tokens=48, kl_beta=0.002, final_pass_turns=16, guards=OPEN)


def logged_turns(count: int) -> list[TurnPayload]:
    """Turns of the demo's shape."""
    chat, numbers = Chat.load(MODEL), random.Random(0)
    somebody = person(0, 0)
    answers = [tokens for _, answer in islice(conversations(), 200) if len(tokens := chat.encode(answer)) >= 48]
    turns: list[TurnPayload] = []
    for number in range(count):
        completion = tuple(numbers.choice(answers)[: numbers.choice([20, 30, 40, 48, 48, 48])])
        turns.append(
            TurnPayload(
                inference_id=f"turn-{number:03d}", episode_id=f"episode-{number:03d}", policy="composer", version=PARENT,
                prompt_tokens=tuple(chat.prompt(Editor().ask(somebody, numbers).messages)), completion_tokens=completion,
                logprobs=(-2.0,) * len(completion), temperature=1.0, top_p=1.0, finished_at=NOON,
            )
        )  # fmt: skip
    return turns


class TimedProgress(FakeProgress):
    """Adds up the seconds between reports, by phase."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = {}
        self.tokens: dict[str, int] = {}
        self.last = time.perf_counter()

    def report(self, policy: str, task: str, done: float, total: float, detail: dict[str, Any]) -> None:
        now, phase = time.perf_counter(), str(detail["phase"])
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.last
        self.tokens[phase] = self.tokens.get(phase, 0) + int(detail["tokens"])
        self.last = now


def main() -> None:
    """The last line is JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    arguments = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    turns = logged_turns(16 if arguments.quick else 80)
    numbers = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        ports = fake_ports(Path(folder))
        assert isinstance(ports.weights, FakeWeights)
        ports.weights.folder.mkdir()
        for digest in (PARENT, ANCHOR):
            (ports.weights.folder / digest).symlink_to(MODEL)
        batch = make_batch(ports, turns, [numbers.random() for _ in turns], champion=PARENT)
        config = msgspec.structs.replace(CONFIG, dtype=arguments.dtype)
        progress = TimedProgress()
        started = progress.last = time.perf_counter()
        run = train(
            batch,
            run_id="run",
            parent=version_of(PARENT),
            anchor=version_of(ANCHOR),
            config=config,
            ports=replace(ports, progress=progress),
        )
        whole = time.perf_counter() - started
    assert run.candidate is not None, run.message
    figures = {
        "turns": len(turns), "steps": len(run.metrics["steps"]), "update_s": round(whole, 1), "compute_s": run.metrics["compute_s"],
        "anchor_s": round(progress.seconds["anchor"], 1), "steps_s": round(progress.seconds["update"], 1),
        "rest_s": round(whole - sum(progress.seconds.values()), 1), "tokens_through_the_model": progress.tokens["update"],
        "tokens_logged": sum(len(t.prompt_tokens) + len(t.completion_tokens) for t in turns),
    }  # fmt: skip
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
