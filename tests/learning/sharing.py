"""One of two workers that share a model, each a process of its own that meets the other over gloo, without Ray: what it sends and finds.

Imported by the processes, so it is no test itself (`tests/integration/training/test_sharded_update.py`).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from app.domain.learning.training import AdamParams, Datum, LossSpec
from pipelines.training.config import LoraConfig
from pipelines.training.numerics.sharding import Shards
from pipelines.training.ray_actors import share_out
from pipelines.training.trainer import LocalTrainer, TrainerSetup

SPEC = LossSpec(normaliser=10.0)
RATE = 1e-3
STEP = AdamParams(learning_rate=RATE, beta1=0.0, max_grad_norm=0.0)
"""With beta1 = 0 the first moment is the gradient itself, so the saved state shows it; a weight's step is its rate times the sign."""
LORA = LoraConfig(rank=4, alpha=8)
WAYS: dict[str, dict[str, Any]] = {
    "bfloat16": {}, "float32": {"communication": "float32"}, "recomputed": {"communication": "float32", "activations": "full"},
    "lora": {"lora": LORA}, "lora_bfloat16": {"lora": LORA, "dtype": "bfloat16"},
}  # fmt: skip
VOCABULARY = 25
"""Odd, so that the two workers' rows are not equally many."""


def turns(seed: int = 0) -> list[Datum]:
    generator = torch.Generator().manual_seed(seed)
    lengths = [3, 9, 5, 14, 7, 8]
    return [
        Datum(
            tokens=tuple(torch.randint(VOCABULARY, (6 + length,), generator=generator).tolist()), first_scored=6,
            logprobs=(-3.0,) * length, advantages=tuple(torch.randn(length, generator=generator).tolist()),
        )
        for length in lengths
    ]  # fmt: skip


@dataclass
class Sent(TorchDispatchMode):
    """What collective operations are given, as the dispatcher of torch sees it: operation and dtype, with the elements of all calls."""

    elements: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    calls: Counter[str] = field(default_factory=Counter[str])

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func.namespace == "c10d":
            self.calls[func._opname] += 1
            for tensor in tree_leaves(args):
                if isinstance(tensor, torch.Tensor):
                    self.elements[func._opname, str(tensor.dtype)] += tensor.numel()
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, kw_only=True)
class Watched(Shards):
    """Notes, whenever a part of the model has been read, how many weights this worker holds uncut."""

    uncut: list[int] = field(default_factory=list[int])

    def split(self, scorer: Any, fill: Callable[[torch.nn.Module], None], **given: Any) -> Any:
        def filling(part: torch.nn.Module) -> None:
            fill(part)
            self.uncut.append(sum(p.numel() for p in scorer.parameters() if not p.is_meta and not isinstance(p, DTensor)))

        return super().split(scorer, filling, **given)


def setup(folder: Path, way: str, *, scratch: str) -> TrainerSetup:
    given = {"dtype": "float32", "threads": 1} | WAYS[way]
    return TrainerSetup(snapshot=folder / "snapshot", scratch=folder / scratch / way, **given)


def update(trainer: LocalTrainer, micro_batches: Sequence[Sequence[Datum]], *, once: bool = False) -> list[float]:
    """One step; returns the log-probabilities of all scored tokens."""
    found: list[float] = []
    for number, micro in enumerate(micro_batches, start=1):
        answer = trainer.forward_backward(micro, replace(SPEC, more_follows=once and number < len(micro_batches)))
        found += sum(answer.logprobs, ())
    trainer.optim_step(STEP)
    return found


def half_way_back(trainer: LocalTrainer, start: Path, given: Sequence[Datum]) -> list[float]:
    """What a large step and half of it back makes of the log-probabilities, which were asked for in between, as guards do."""
    trainer.load_state(start)
    trainer.forward_backward(given, SPEC)
    trainer.optim_step(replace(STEP, learning_rate=0.05))
    before = sum(trainer.forward(given).logprobs, ())
    trainer.retreat(0.5, start)
    return [after - one for after, one in zip(sum(trainer.forward(given).logprobs, ()), before, strict=True)]


def work(rank: int, folder: Path) -> None:
    """One of the two; leaves what it found in files."""
    torch.set_num_threads(1)
    shards = Watched(**vars(Shards.join(rank=rank, count=2, address=f"file://{folder}/meet")))
    mine = share_out(turns(), 2)[rank]
    found: dict[str, Any] = {}
    for way in WAYS:
        trainer = LocalTrainer(setup(folder, way, scratch="two"), shards=shards)
        with Sent() as sent:
            logprobs = update(trainer, [mine])
        found[way] = {"logprobs": logprobs, "sent": dict(sent.elements)}
        trainer.save_state(folder / "two" / way)
        trainer.save_weights_for_sampler(folder / "two" / f"{way}-made", folder / "snapshot")
        if way == "lora_bfloat16":
            found["held"] = str(trainer.model.model.layers[0].mlp.up_proj.weight.dtype)
        trainer.close()
    shards.uncut.clear()
    trainer = LocalTrainer(setup(folder, "float32", scratch="more"), shards=shards)
    found["uncut"] = max(shards.uncut)
    for once in (False, True):
        trainer.load_state(folder / "snapshot")
        with Sent() as sent:
            update(trainer, [mine[:1], mine[1:2], mine[2:]], once=once)
        found["once" if once else "each"] = sent.calls["_reduce_scatter_base_"]
        trainer.save_state(folder / "two" / ("once" if once else "each"))
    found["after"] = half_way_back(trainer, folder / "snapshot", mine)
    torch.save(found, folder / f"found-{rank}")
    torch.distributed.destroy_process_group()
