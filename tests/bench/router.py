"""`make bench-router`: router replay on mixture-of-experts models, bf16 serving against fp32 training of the same weights.

For each architecture: log-probabilities as the engine logged them against those the trainer computes, with the recorded experts replayed
and without; the share of routes that differ from the recorded ones; and the smallest gradient any router gets through replayed routes.
Tiny random models: the size of the gap is theirs, the direction is what is shown.

    python -m tests.bench.router --quick      a sixteenth of the turns
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from app.domain.learning.training import Datum, LossSpec
from app.domain.telemetry.turns import SamplingParams
from app.policy.decoding.sampling import sample
from app.policy.experts import routers
from app.policy.model import load_policy
from app.policy.tiny_moe import Architecture, write_tiny_moe
from pipelines.training.config import RouterReplayConfig
from pipelines.training.guards import ratio_report
from pipelines.training.trainer import LocalTrainer, TrainerSetup

TURNS, TOKENS = 256, 48
PLAUSIBILITY = RouterReplayConfig().plausibility


def sampled(folder: Path, count: int) -> list[Datum]:
    """Turns of the bf16 engine, experts recorded."""
    policy = load_policy(folder, dtype=torch.bfloat16)
    prompts = [[5, 6, 7, 8 + number % 40, 9 + number // 40] for number in range(count)]
    return [
        Datum(
            tokens=(*g.prompt, *g.tokens), first_scored=len(g.prompt), logprobs=tuple(g.logprobs), advantages=(1.0,) * len(g.tokens),
            routes=tuple(tuple(tuple(layer) for layer in step) for step in g.experts),
        )
        for g in sample(policy, prompts, SamplingParams(max_tokens=TOKENS, seed=3), record_experts=True)
    ]  # fmt: skip


def compared(trainer: LocalTrainer, data: Sequence[Datum]) -> dict[str, float]:
    """|Δ log π| between what was logged and what the trainer computes, over tokens."""
    new = [p for start in range(0, len(data), 16) for row in trainer.forward(data[start : start + 16]).logprobs for p in row]
    report = ratio_report(new, [p for datum in data for p in datum.logprobs])
    return {"p99_gap": round(report.p99_gap, 5), "mean_gap": round(report.mean_gap, 6), "kl": float(f"{report.kl:.3g}")}


def measured(architecture: Architecture, count: int) -> dict[str, Any]:
    """One architecture's figures."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        write_tiny_moe(folder, architecture)
        data = sampled(folder, count)
        setup = TrainerSetup(snapshot=folder, scratch=Path(scratch), dtype="float32")
        trainer = LocalTrainer(setup)
        with_replay = compared(trainer, data)
        replay = trainer.replay
        changed, replaced = replay.changed / replay.replayed, replay.replaced / replay.replayed
        without = compared(trainer, [replace(datum, routes=None) for datum in data])
        trainer.forward_backward(data[:16], LossSpec(normaliser=1.0))
        gradients = [float(router.weight.grad.abs().max()) for _, router in routers(trainer.model)]  # type: ignore[union-attr, operator]
    return {
        "with_replay": with_replay | {"changed_routes": round(replaced, 5)},
        "without_replay": without | {"changed_routes": round(changed, 5)},
        "least_router_gradient": float(f"{min(gradients):.3g}"), "tokens": sum(len(d.logprobs) for d in data),
    }  # fmt: skip


def main() -> None:
    """The last line is the JSON of issue 4's router replay."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    count = TURNS // 16 if parser.parse_args().quick else TURNS
    torch.set_num_threads(1)
    found = {architecture.value: measured(architecture, count) for architecture in Architecture}
    print(json.dumps({"plausibility": PLAUSIBILITY, **found}))


if __name__ == "__main__":
    main()
