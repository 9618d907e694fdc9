"""`python -m tests.bench.train_gpu`: model FLOPs utilisation of our training step on one GPU, with random weights of a 0.5-3 B Llama.

Self-contained: needs torch, transformers, safetensors and this repository on the path; no Ray, no database. The utilisation counts
6 FLOPs per parameter of a matrix and token, and attention's 6·L·H·T² per sequence (causal), over the card's bf16 peak; what is
computed again is not counted.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from app.domain.learning.training import AdamParams, Datum, LossSpec
from pipelines.training.trainer import LocalTrainer, TrainerSetup
from tests.bench.llamas import SHAPES, VOCABULARY, random_llama

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}


def main() -> None:
    """Measure; the last line is JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=list(SHAPES), default="1.5b")
    parser.add_argument("--turns", type=int, default=32, help="per optimizer step")
    parser.add_argument("--prompt", type=int, default=1536)
    parser.add_argument("--completion", type=int, default=512)
    parser.add_argument("--per-pass", type=int, default=8)
    parser.add_argument("--activations", choices=["none", "selective", "full"], default="none")
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        snapshot = Path(folder) / "model"
        snapshot.mkdir()
        random_llama(snapshot, arguments.size, device=torch.device("cuda"), context=8192)
        torch.cuda.empty_cache()
        setup = TrainerSetup(
            snapshot=snapshot, scratch=Path(folder), dtype="bfloat16", activations=arguments.activations, share_prefixes=False
        )
        measure(LocalTrainer(setup), arguments)


def measure(trainer: LocalTrainer, arguments: argparse.Namespace) -> None:
    """Median over steps after the first two."""
    length = arguments.prompt + arguments.completion
    generator = torch.Generator().manual_seed(0)
    data = [
        Datum(
            tokens=tuple(torch.randint(VOCABULARY, (length,), generator=generator).tolist()), first_scored=arguments.prompt,
            logprobs=(-10.0,) * arguments.completion, advantages=(1.0,) * arguments.completion,
        )
        for _ in range(arguments.turns)
    ]  # fmt: skip
    seconds: list[float] = []
    for _ in range(arguments.steps):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for first in range(0, len(data), arguments.per_pass):
            trainer.forward_backward(data[first : first + arguments.per_pass], LossSpec(normaliser=1e4))
        trainer.optim_step(AdamParams(learning_rate=1e-6))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    median = sorted(seconds[2:])[len(seconds[2:]) // 2]
    model = trainer.model.config
    head = model.vocab_size * model.hidden_size
    body = sum(p.numel() for n, p in trainer.model.named_parameters() if p.dim() == 2) - head
    attention = 6 * model.num_hidden_layers * model.hidden_size * length * length
    flops = arguments.turns * (6 * body * length + 6 * head * arguments.completion + attention)
    name = torch.cuda.get_device_name()
    peak = next((value for card, value in PEAK_FLOPS.items() if card in name), float("nan"))
    figures = {
        "gpu": name, "parameters_m": round((body + head) / 1e6), "tokens_per_s": round(arguments.turns * length / median),
        "step_s": round(median, 3), "mfu": round(flops / median / peak, 4),
        "peak_memory_gb": round(torch.cuda.max_memory_allocated() / 2**30, 1),
    }  # fmt: skip
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
