"""The local trainer: the port of `app.domain.ports.Trainer` on torch, alone or as one of several data-parallel workers.

Fed by data and a snapshot folder / feeds gradients into fp32 master weights, and snapshots out. Knows nothing of databases, batches or
rewards, so that a Ray worker imports nothing of them.

    masters (fp32, all that was ever learned) ──round──▶ the model's weights ──forward, backward──▶ gradients ──Adam──▶ masters

The model computes with the bfloat16 values that will be served, from the first step on (`pipelines.training.numerics.rounding`):
what is trained is what is published.
"""

# torch and safetensors leave parts of their types open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import ctypes
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open

from app.domain.learning.training import AdamParams, Datum, ForwardBackward, LossSpec, Place, StepOutcome
from app.policy.decoding.shaping import Bends, BendTensors
from app.policy.model import Unloaded, load_grammars, load_model
from app.policy.scoring.packing import ScoredSequence, pack
from app.policy.scoring.scorer import Cut, Scorer, Scores
from app.policy.storage.remote_files import is_url
from app.policy.storage.snapshot import WEIGHTS, write_snapshot
from pipelines.training.config import Activations, Communication, LoraConfig, RouterReplayConfig
from pipelines.training.numerics.activations import Keeping
from pipelines.training.numerics.adam import AdamState, adam_step
from pipelines.training.numerics.adapters import DOWN, UP, Adapters
from pipelines.training.numerics.loss import Teacher, token_loss
from pipelines.training.numerics.precision import resolve_dtype
from pipelines.training.numerics.rounding import round_into
from pipelines.training.numerics.router_replay import RouterReplay
from pipelines.training.numerics.sharding import Shards
from pipelines.training.numerics.state_files import StateFiles, digest_of, file_of, is_there
from pipelines.training.numerics.tensor_file import TensorFile

MASTERS, OPTIMIZER = "weights", "optimizer"
"""What the files of a saved state are called, see `pipelines.training.numerics.state_files`."""


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
    most_tokens_kept: int = 0
    """A row of more tokens, such as a long turn that goes alone, keeps the inputs of the layers alone; 0: none is too long."""
    share_prefixes: bool = True
    lora: LoraConfig | None = None
    base: Path | None = None
    """Snapshot that the adapters lie on; None: they begin on `snapshot`."""
    communication: Communication = "bfloat16"
    """What several workers send each other."""
    offload: bool = False
    """Keep masters and moments in a file, out of a GPU's memory; beside a processor they always are."""
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
        unloaded = Unloaded(setup.snapshot, dtype=torch.float32) if self.shards.count > 1 else None
        model: Any = unloaded.model if unloaded else load_model(setup.snapshot, dtype=torch.float32)
        self.adapters: Adapters | None = None
        if setup.lora is not None:
            self.adapters = Adapters(model, setup.lora, base=setup.base or setup.snapshot, held_in=self.dtype, shards=self.shards)
        self.keeping = Keeping(model, setup.activations, most_tokens=setup.most_tokens_kept)
        self.replay = RouterReplay(model, setup.router_replay)
        self.model = model.train()
        if unloaded is None:
            self.model.to(self.device)
        self.scorer = Scorer(model)
        if unloaded is not None:
            apart = [p for p in model.parameters() if p.requires_grad] if self.adapters else []
            self.shards.split(self.scorer, unloaded.fill, communication=setup.communication, apart=apart)
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.grammars = load_grammars(setup.snapshot)
        self.masters: TensorFile | None = None
        self.adam: AdamState | None = None

    def precision(self) -> str:
        """Name of the dtype of the matrix products, as resolved on this machine."""
        return str(self.dtype).removeprefix("torch.")

    def forward(self, data: Sequence[Datum]) -> ForwardBackward:
        """Score without a gradient."""
        with torch.no_grad():
            scores, row_tokens = self._score(data, kept=any((d.top_p < 1 or d.top_k) and not d.kept_log_mass for d in data))
        self.shards.forget_gathered(self.scorer)
        self.replay.finish()
        return _report(data, scores, loss=0.0, tokens=row_tokens)

    def forward_backward(self, data: Sequence[Datum], loss: LossSpec) -> ForwardBackward:
        """Add the gradient of the loss over `data`."""
        self.shards.put_off_summing(self.scorer, wait=loss.more_follows)
        scores, row_tokens = self._score(data)
        behaviour_M = self._column(data, lambda d: d.logprobs or (0.0,) * _scored(d))
        advantages_M = self._column(data, lambda d: d.advantages or (1.0,) * _scored(d))
        turns_M = torch.repeat_interleave(torch.tensor([_scored(d) for d in data])).to(self.device)
        value = token_loss(loss, scores.logprobs, behaviour_M, advantages_M, self._teacher(data), turns_M)
        value.backward()
        self.replay.finish()
        return _report(data, scores, loss=float(value.detach()), tokens=row_tokens)

    def optim_step(self, params: AdamParams) -> StepOutcome:
        """Clip, apply, forget. A gradient that is not finite changes nothing."""
        self.shards.sum_whole(self.parameters.values())
        norm = self.shards.norm([p.grad for p in self.parameters.values() if p.grad is not None])
        finite = bool(torch.isfinite(norm))
        if finite:
            scale = params.max_grad_norm / float(norm) if 0 < params.max_grad_norm < float(norm) else None
            masters, adam = self._state()
            adam_step(masters, self._gradients(scale), adam, params, changed=self._serve)
            self._merge()
        self._forget_gradients()
        return StepOutcome(grad_norm=float(norm), applied=finite)

    @torch.no_grad()
    def retreat(self, kept: float, start: Place) -> None:
        """Keep a share of the way that the masters came from `start`, the folder of a snapshot or of a saved state."""
        masters, _ = self._state()
        folder = _here(start)
        with self._saved(folder, MASTERS) if is_there(folder, MASTERS) else StateFiles(folder, Path(WEIGHTS).stem) as begun:
            for name, master in masters.tensors.items():
                if name in begun.names:
                    before = begun.read(name, self.shards.rows_of(self.parameters[name])).to(master.device, torch.float32)
                    torch.lerp(before, master.clone(), kept, out=master)
                elif name.endswith(UP):
                    master.mul_(kept)  # fresh adapters began at zero
                self._serve(name)
                masters.rest()
        self._merge()

    def load_state(self, snapshot: Path) -> None:
        """Weights from a snapshot; the optimizer starts anew, adapters too."""
        self._copy_weights(snapshot / WEIGHTS)
        if self.adapters is not None:
            self.adapters.base = snapshot
            self.adapters.forget()
        self._forget_gradients()
        self.masters = self.adam = None

    def load_state_with_optimizer(self, folder: Place) -> None:
        """Masters and optimizer state as `save_state` wrote them; adapters lie on the base that the trainer was set up with."""
        if self.adapters is not None:
            self.adapters.base = self.setup.base or self.setup.snapshot
        masters, adam = self._state()
        with self._saved(_here(folder), MASTERS) as saved:
            masters.load(saved, lambda name: self.shards.rows_of(self.parameters[name]))
        with self._saved(_here(folder), OPTIMIZER) as saved:
            adam.load(saved, lambda name: self.shards.rows_of(self.parameters.get(_owner(name), adam.tensors[name])))
        for name in self.parameters:
            self._serve(name)
        masters.rest()
        self._merge()
        self._forget_gradients()

    def save_state(self, folder: Place) -> dict[str, str]:
        """Write masters and optimizer state: each worker what it holds of them; any number of workers reads them again. Returns the digests
        of the files that this worker wrote, by name."""
        here = _here(folder)
        here.mkdir(parents=True, exist_ok=True)
        masters, adam = self._state()
        files = [here / self._own(stem) for stem in (MASTERS, OPTIMIZER)]
        masters.save(files[0])
        adam.save(files[1])
        return {file.name: digest_of(file) for file in files}

    def save_weights_for_sampler(self, folder: Path, like: Path) -> str:
        """Write a bf16 snapshot, bit for bit the weights in the model, its adapter beside it where there is one; returns its digest (empty
        on workers that do not lead)."""
        whole: dict[str, torch.Tensor] = {}
        for name, tensor in self.model.state_dict().items():
            if _is_stored(name, self.model):
                gathered = self.shards.whole(tensor.bfloat16() if tensor.is_floating_point() else tensor)  # all have to ask; one keeps it
                if self.shards.leads:
                    whole[name] = gathered
        digest = write_snapshot(folder, whole, like=like) if self.shards.leads else ""
        if digest and self.adapters is not None:
            self.adapters.write(folder)
        return digest

    def close(self) -> None:
        """Give the memory back; the trainer is not usable afterwards."""
        self.masters = self.adam = None
        self.replay.remove()
        self.parameters = {}
        del self.scorer, self.model
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)

    def _score(self, data: Sequence[Datum], *, kept: bool = False) -> tuple[Scores, int]:
        share = self.setup.share_prefixes and not any(d.routes for d in data)
        row = pack([ScoredSequence(tokens=d.tokens, first_scored=d.first_scored) for d in data], share_prefixes=share).to(self.device)
        self.keeping.start(len(row.input_ids))
        self.replay.start(data, row)
        temperature_M = self._column(data, lambda d: (d.temperature,) * _scored(d))
        scores: Scores = self.scorer(row, temperature_M, self.dtype, self._cut(data) if kept else None, self._bends(data))
        self.replay.forwarded()
        if any(d.kept_log_mass for d in data):
            mass_M = self._column(data, lambda d: d.kept_log_mass or (0.0,) * _scored(d))
            scores = Scores(logprobs=scores.logprobs - mass_M, entropy=scores.entropy, kept_log_mass=scores.kept_log_mass)
        return scores, len(row.input_ids)

    def _teacher(self, data: Sequence[Datum]) -> Teacher | None:
        if not any(datum.teacher for datum in data):
            return None
        logprobs_M = self._column(data, lambda d: d.teacher or (0.0,) * _scored(d))
        return Teacher(logprobs_M=logprobs_M, pull_M=self._column(data, lambda d: (d.pull if d.teacher else 0.0,) * _scored(d)))

    def _cut(self, data: Sequence[Datum]) -> Cut:
        top_k_M = torch.tensor([d.top_k for d in data for _ in range(_scored(d))], dtype=torch.int64, device=self.device)
        return Cut(top_p_M=self._column(data, lambda d: (d.top_p,) * _scored(d)), top_k_M=top_k_M)

    def _bends(self, data: Sequence[Datum]) -> BendTensors | None:
        """What the turns' shapes add to the logits of the scored tokens, in their order."""
        bends, at = Bends(), 0
        for datum in data:
            bends.add(datum.shape, datum.tokens[datum.first_scored :], self.grammars, at=at)
            at += _scored(datum)
        return bends.on(self.device)

    def _column(self, data: Sequence[Datum], values: Callable[[Datum], Sequence[float]]) -> torch.Tensor:
        """One fp32 number per scored token, [M]."""
        return torch.tensor([value for datum in data for value in values(datum)], dtype=torch.float32, device=self.device)

    def _gradients(self, scale: float | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Clipped local gradients by name, beside their masters."""
        masters, _ = self._state()
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                gradient = self.shards.local(parameter.grad).to(masters.tensors[name].device)
                yield name, gradient.mul_(scale) if scale is not None else gradient

    def _forget_gradients(self) -> None:
        """Zero, not free: freed gradients leave holes in the heap that activations do not fill, and the process grows by their size."""
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                self.shards.local(parameter.grad).zero_()

    def _state(self) -> tuple[TensorFile, AdamState]:
        """Masters and moments; made when they are first needed, the masters from the weights as they are."""
        if self.masters is None or self.adam is None:
            local = {name: self.shards.local(p.data) for name, p in self.parameters.items()}
            in_file, mine = self.device.type == "cpu" or self.setup.offload, "" if self.shards.count == 1 else f"-{self.shards.rank}"
            self.masters = TensorFile(local, file=self.setup.scratch / f"masters{mine}.safetensors" if in_file else None)
            for name, tensor in local.items():
                self.masters.tensors[name].copy_(tensor)
            self.masters.rest()
            self.adam = AdamState(local, file=self.setup.scratch / f"adam{mine}.safetensors" if in_file else None)
        return self.masters, self.adam

    def _own(self, stem: str) -> str:
        """Name of the file that this worker writes, and the only one that it reads again where there are as many as wrote."""
        return file_of(stem, rank=self.shards.rank, count=self.shards.count)

    def _saved(self, folder: Path, stem: str) -> StateFiles:
        return StateFiles(folder, stem, own=self._own(stem))

    @torch.no_grad()
    def _serve(self, name: str) -> None:
        """Bring a parameter up to its master: rounded where it is served itself, as it is where it is part of an adapter."""
        assert self.masters is not None
        parameter, master = self.parameters[name], self.masters.tensors[name]
        if self.adapters is not None:
            parameter.copy_(master)
        else:
            round_into(self.shards.local(parameter.data), master, first=self.shards.first_place(parameter))

    def _merge(self) -> None:
        if self.adapters is not None:
            self.adapters.merge()

    @torch.no_grad()
    def _copy_weights(self, file: Path) -> None:
        targets = self.model.state_dict()
        with safe_open(file, framework="pt") as opened:
            for name in sorted(opened.keys()):
                self.shards.fill(targets[name], opened.get_tensor(name))


def _here(place: Place) -> Path:
    """A folder of this machine. Raises `ValueError` for a URL: only workers that fetch can read one."""
    if isinstance(place, str) and is_url(place):
        raise ValueError(f"{place} is not a folder: a trainer in this process reads folders only")
    return Path(place)


def _scored(datum: Datum) -> int:
    return len(datum.tokens) - datum.first_scored


def _owner(moment_name: str) -> str:
    """Parameter that a moment belongs to: `first.NAME` → `NAME`."""
    return moment_name.partition(".")[2]


def _is_stored(name: str, model: torch.nn.Module) -> bool:
    """Tied tensors are stored under their first name only, adapters with the optimizer's state."""
    if name.endswith((DOWN, UP)):
        return False
    return not (name == "lm_head.weight" and getattr(model.config, "tie_word_embeddings", False))


def _report(data: Sequence[Datum], scores: Scores, *, loss: float, tokens: int) -> ForwardBackward:
    counts = [_scored(datum) for datum in data]
    kept = () if scores.kept_log_mass is None else _rows(scores.kept_log_mass, counts)
    return ForwardBackward(
        loss=loss, logprobs=_rows(scores.logprobs, counts), entropy=_rows(scores.entropy, counts), kept_log_mass=kept, tokens=tokens
    )


def _rows(values_M: torch.Tensor, counts: Sequence[int]) -> tuple[tuple[float, ...], ...]:
    """One row of numbers per datum."""
    flat = iter(cast("list[float]", values_M.detach().cpu().tolist()))  # pyright: ignore[reportUnknownMemberType] - torch types it loosely
    return tuple(tuple(itertools.islice(flat, count)) for count in counts)
