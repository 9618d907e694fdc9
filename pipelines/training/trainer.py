"""The local trainer: the port of `app.domain.ports.Trainer` on torch, alone or as one of several data-parallel workers.

Fed by data and a snapshot folder / feeds gradients into fp32 master weights, and snapshots out. Knows nothing of databases, batches or
rewards, so that a Ray worker imports nothing of them.
"""

# torch and safetensors leave parts of their types open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import ctypes
import gc
import itertools
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from app.domain.training import AdamParams, Datum, ForwardBackward, LossSpec, StepOutcome
from app.policy.model import load_model
from app.policy.packing import ScoredSequence, pack
from app.policy.scorer import Scorer, Scores
from app.policy.snapshot import WEIGHTS, write_snapshot
from pipelines.training.activations import Activations, keep_activations
from pipelines.training.adam import AdamState, adam_step
from pipelines.training.adapters import add_adapters, merged_state
from pipelines.training.config import LoraConfig, RouterReplayConfig
from pipelines.training.loss import token_loss
from pipelines.training.precision import resolve_dtype
from pipelines.training.router_replay import RouterReplay
from pipelines.training.sharding import Shards

MASTER = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"


@dataclass(frozen=True, kw_only=True)
class TrainerSetup:
    """What a worker needs to know before it sees data."""

    snapshot: Path
    """Snapshot that gives the architecture and the first weights."""
    scratch: Path
    """Folder for the optimizer state while it is worked on."""
    dtype: str = "auto"
    threads: int = 0
    activations: Activations = "none"
    share_prefixes: bool = True
    lora: LoraConfig | None = None
    router_replay: RouterReplayConfig = RouterReplayConfig()


class LocalTrainer:
    """One process's trainer; with `shards`, one of several that hold a part of the parameters each and see different data."""

    def __init__(self, setup: TrainerSetup, *, shards: Shards | None = None) -> None:
        if setup.threads:
            torch.set_num_threads(setup.threads)
        self.setup = setup
        self.shards = shards or Shards.alone()
        self.dtype = resolve_dtype(setup.dtype)
        self.device = self.shards.device
        model: Any = load_model(setup.snapshot, dtype=torch.float32)
        if setup.lora is not None:
            add_adapters(model, setup.lora)
        keep_activations(model, setup.activations)
        self.replay = RouterReplay(model, setup.router_replay)
        self.model = model.to(self.device).train()
        self.scorer: Scorer = self.shards.split(Scorer(model))
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.adam: AdamState | None = None

    def forward(self, data: Sequence[Datum]) -> ForwardBackward:
        """Score without a gradient."""
        with torch.no_grad():
            scores, row_tokens = self._score(data)
        self.replay.finish()
        return _report(data, scores, loss=0.0, tokens=row_tokens)

    def forward_backward(self, data: Sequence[Datum], loss: LossSpec) -> ForwardBackward:
        """Add the gradient of the loss over `data`."""
        scores, row_tokens = self._score(data)
        behaviour_M = self._column(data, lambda d: d.logprobs or (0.0,) * _scored(d))
        advantages_M = self._column(data, lambda d: d.advantages or (1.0,) * _scored(d))
        value = token_loss(loss, scores.logprobs, behaviour_M, advantages_M)
        value.backward()
        self.replay.finish()
        return _report(data, scores, loss=float(value.detach()), tokens=row_tokens)

    def optim_step(self, params: AdamParams) -> StepOutcome:
        """Clip, apply, forget. A gradient that is not finite changes nothing."""
        norm = self.shards.norm([p.grad for p in self.parameters.values() if p.grad is not None])
        finite = bool(torch.isfinite(norm))
        if finite:
            scale = params.max_grad_norm / float(norm) if 0 < params.max_grad_norm < float(norm) else None
            local = {name: self.shards.local(p.data) for name, p in self.parameters.items()}
            adam_step(local, self._gradients(scale), self._adam_state(), params)
        self._forget_gradients()
        return StepOutcome(grad_norm=float(norm), applied=finite)

    def load_state(self, snapshot: Path) -> None:
        """Weights from a snapshot; the optimizer starts anew, adapters too."""
        self._copy_weights(snapshot / WEIGHTS)
        self._forget_gradients()
        self.adam = None

    def load_state_with_optimizer(self, folder: Path) -> None:
        """Master weights and optimizer state as `save_state` wrote them."""
        self._copy_weights(folder / MASTER)
        self._forget_gradients()
        self._adam_state().load(folder / OPTIMIZER, self.shards.part_of(self.parameters))

    def save_state(self, folder: Path) -> None:
        """Write master weights and optimizer state, whole, whatever the number of workers."""
        folder.mkdir(parents=True, exist_ok=True)
        state = self._adam_state()
        weights = {name: self.shards.whole(p) for name, p in self.model.state_dict().items() if _is_stored(name, self.model)}
        moments = (
            None
            if state.file
            else {name: self.shards.whole_like(t, self.parameters.get(_owner(name))) for name, t in state.tensors.items()}
        )
        if not self.shards.leads:
            return
        save_file({name: tensor.cpu().contiguous() for name, tensor in weights.items()}, folder / MASTER)
        if moments is not None:
            save_file({name: tensor.cpu().contiguous() for name, tensor in moments.items()}, folder / OPTIMIZER)
        elif state.file is not None:
            state.flush()
            shutil.copyfile(state.file, folder / OPTIMIZER)

    def save_weights_for_sampler(self, folder: Path, like: Path) -> str:
        """Write a bf16 snapshot; returns its digest (empty on workers that do not lead)."""
        tensors = merged_state(self.model) if self.setup.lora is not None else self.model.state_dict()
        whole = {name: self.shards.whole(tensor) for name, tensor in tensors.items() if _is_stored(name, self.model)}
        return write_snapshot(folder, whole, like=like) if self.shards.leads else ""

    def close(self) -> None:
        """Give the memory back; the trainer is not usable afterwards."""
        self.adam = None
        self.replay.remove()
        self.parameters = {}
        del self.scorer, self.model
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)

    def _score(self, data: Sequence[Datum]) -> tuple[Scores, int]:
        share = self.setup.share_prefixes and not any(d.routes for d in data)
        row = pack([ScoredSequence(tokens=d.tokens, first_scored=d.first_scored) for d in data], share_prefixes=share).to(self.device)
        self.replay.start(data, row)
        temperature_M = self._column(data, lambda d: (d.temperature,) * _scored(d))
        scores: Scores = self.scorer(row, temperature_M, self.dtype)
        self.replay.forwarded()
        if any(d.kept_log_mass for d in data):
            mass_M = self._column(data, lambda d: d.kept_log_mass or (0.0,) * _scored(d))
            scores = Scores(logprobs=scores.logprobs - mass_M, entropy=scores.entropy)
        return scores, len(row.input_ids)

    def _column(self, data: Sequence[Datum], values: Callable[[Datum], Sequence[float]]) -> torch.Tensor:
        """One fp32 number per scored token, [M]."""
        return torch.tensor([value for datum in data for value in values(datum)], dtype=torch.float32, device=self.device)

    def _gradients(self, scale: float | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Clipped local gradients by name."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                gradient = self.shards.local(parameter.grad)
                yield name, gradient.mul_(scale) if scale is not None else gradient

    def _forget_gradients(self) -> None:
        """Zero, not free: freed gradients leave holes in the heap that activations do not fill, and the process grows by their size."""
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                self.shards.local(parameter.grad).zero_()

    def _adam_state(self) -> AdamState:
        if self.adam is None:
            local = {name: self.shards.local(p.data) for name, p in self.parameters.items()}
            in_file = self.device.type == "cpu" and self.shards.count == 1
            self.adam = AdamState(local, file=self.setup.scratch / "adam.safetensors" if in_file else None)
        return self.adam

    @torch.no_grad()
    def _copy_weights(self, file: Path) -> None:
        targets = self.model.state_dict()
        with safe_open(file, framework="pt") as opened:
            names = set(opened.keys())
            for name in sorted(names):
                self.shards.fill(targets[self._name_in_model(name, targets)], opened.get_tensor(name))

    def _name_in_model(self, name: str, targets: dict[str, torch.Tensor]) -> str:
        """A snapshot's name of a tensor; under adapters the base layers carry a prefix."""
        if name in targets:
            return name
        return next(key for key in targets if key.replace(".base_layer", "") == name)


def _scored(datum: Datum) -> int:
    return len(datum.tokens) - datum.first_scored


def _owner(moment_name: str) -> str:
    """Parameter that a moment belongs to: `first.NAME` → `NAME`."""
    return moment_name.partition(".")[2]


def _is_stored(name: str, model: torch.nn.Module) -> bool:
    """Tied tensors are stored under their first name only."""
    return not (name == "lm_head.weight" and getattr(model.config, "tie_word_embeddings", False))


def _report(data: Sequence[Datum], scores: Scores, *, loss: float, tokens: int) -> ForwardBackward:
    counts = [_scored(datum) for datum in data]
    return ForwardBackward(loss=loss, logprobs=_rows(scores.logprobs, counts), entropy=_rows(scores.entropy, counts), tokens=tokens)


def _rows(values_M: torch.Tensor, counts: Sequence[int]) -> tuple[tuple[float, ...], ...]:
    """One row of numbers per datum."""
    flat = iter(cast("list[float]", values_M.detach().cpu().tolist()))  # pyright: ignore[reportUnknownMemberType] - torch types it loosely
    return tuple(tuple(itertools.islice(flat, count)) for count in counts)
