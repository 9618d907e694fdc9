"""Parameters split over data-parallel workers with FSDP2, or not split at all: the same trainer, one process or many."""

# torch.distributed leaves parts of its types open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import ctypes
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from pipelines.training.config import Communication
from pipelines.training.numerics.communication import Bfloat16Gather, Bfloat16ReduceScatter
from pipelines.training.numerics.state_files import Rows

Module = TypeVar("Module", bound=torch.nn.Module)
M_MMAP_THRESHOLD, LARGE_BYTES = -3, 256 << 10


@dataclass(frozen=True, kw_only=True)
class Shards:
    """This process's place among the workers."""

    device: torch.device
    rank: int
    count: int
    mesh: DeviceMesh | None

    @staticmethod
    def alone() -> "Shards":
        """The only worker: nothing is split, no process group is needed."""
        return Shards(device=_device(0), rank=0, count=1, mesh=None)

    @staticmethod
    def join(*, rank: int, count: int, address: str) -> "Shards":
        """Meet the other workers at `address`, `tcp://…` or `file://…` (gloo on processors, NCCL on GPUs). Blocks until all are there."""
        device = _device(0)
        if device.type == "cpu":
            _give_large_buffers_back()
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=address, rank=rank, world_size=count)
        return Shards(device=device, rank=rank, count=count, mesh=init_device_mesh(device.type, (count,)))

    @property
    def leads(self) -> bool:
        """Writes what is written once."""
        return self.rank == 0

    def split(
        self, scorer: Module, fill: Callable[[torch.nn.Module], None], *, communication: Communication,
        apart: Collection[torch.nn.Parameter] = (),
    ) -> Module:  # fmt: skip
        """Shard each decoder layer, then what is left; gradients are summed (the loss's constant normaliser already divides).

        `fill` reads a part's weights, right before it is cut: no worker ever holds more than one part whole. What is kept `apart` stays
        whole on every worker, and nobody sums its gradients but `sum_whole`.
        """
        assert self.mesh is not None, "one worker alone splits nothing"
        model: Any = scorer.model
        for parameter in apart:
            parameter.data = parameter.data.to(self.device)
        for part in (*model.base_model.layers, scorer):
            fill(part)
            _sharded(part, self.mesh, communication, set(apart))
        return scorer

    def forget_gathered(self, scorer: torch.nn.Module) -> None:
        """Drop what a forward pass without a backward pass left gathered (embedding, output layer, last norm): the next one would compute
        with it, whatever became of the shards in between."""
        if isinstance(scorer, FSDPModule):
            scorer.reshard()

    def put_off_summing(self, scorer: torch.nn.Module, *, wait: bool) -> None:
        """Whether the next backward pass leaves its gradients unsummed, whole on each worker, for a later one to sum with its own."""
        if isinstance(scorer, FSDPModule):
            scorer.set_requires_gradient_sync(not wait)

    def sum_whole(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Sum over the workers the gradients of what is whole on each of them; who has none (an expert that nobody of its turns took) adds
        nothing."""
        if self.mesh is None or not (whole := [p for p in parameters if not isinstance(p, DTensor)]):
            return
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).view(-1) for p in whole])
        dist.all_reduce(flat)
        for parameter, part in zip(whole, flat.split([p.numel() for p in whole]), strict=True):
            parameter.grad = part.view_as(parameter)

    def cut(self, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """This worker's part of `value`, whose rows are those of `like`."""
        rows = self.rows_of(like)
        return value[rows.first : rows.end] if isinstance(like, DTensor) else value

    def rows_of(self, tensor: torch.Tensor) -> Rows:
        """Which rows of a tensor this worker holds; all of one that is not split."""
        if not isinstance(tensor, DTensor):
            return Rows.all_of(tensor)
        return Rows.dealt(tuple(tensor.shape), rank=tensor.device_mesh.get_local_rank(), count=tensor.device_mesh.size())

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """This worker's part."""
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """The full tensor, on every worker (all must ask)."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def first_place(self, parameter: torch.Tensor) -> int:
        """Index, in the whole flattened tensor, of this worker's first element."""
        return self.rows_of(parameter).first * (parameter.numel() // max(1, parameter.shape[0]))

    def fill(self, target: torch.Tensor, value: torch.Tensor) -> None:
        """Overwrite a (possibly split) tensor with a full one."""
        self.local(target).copy_(self.cut(value, target))

    def norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Euclidean norm over all parameters and workers, fp32 scalar."""
        split = self._square([g for g in gradients if isinstance(g, DTensor)])
        if self.mesh is not None:
            dist.all_reduce(split)
        return (split + self._square([g for g in gradients if not isinstance(g, DTensor)])).sqrt()  # what is whole is so on every worker

    def _square(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        squares = [torch.linalg.vector_norm(self.local(gradient)).square() for gradient in gradients]
        return torch.stack(squares).sum() if squares else torch.zeros((), device=self.device)


def _sharded(module: Module, mesh: DeviceMesh, communication: Communication, apart: set[torch.nn.Parameter]) -> Module:
    sharded: Any = fully_shard(module, mesh=mesh, ignored_params=apart)
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)  # a factor alone asks for an operation that gloo does not have
    if communication == "bfloat16":
        sharded.set_custom_all_gather(Bfloat16Gather())
        sharded.set_custom_reduce_scatter(Bfloat16ReduceScatter())
    return sharded


def _give_large_buffers_back() -> None:
    """Each layer is gathered into a buffer that is freed right after. glibc raises its threshold with every such buffer and then keeps
    them, as holes of its heap that nothing fits: 842 MB instead of 310 beyond the libraries, for half of 42 M parameters."""
    with suppress(AttributeError):  # another C library: it has no such habit
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


def _device(local_rank: int) -> torch.device:
    return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
