"""One Ray worker: a local trainer behind method calls. Imports neither ports nor wiring: a worker knows tensors and folders only."""

import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from app.domain.learning.training import AdamParams, Datum, ForwardBackward, LossSpec, StepOutcome
from app.machine import usable_cores
from pipelines.training.numerics.precision import resolve_name
from pipelines.training.numerics.sharding import Shards
from pipelines.training.ray_cluster import LOOPBACK
from pipelines.training.trainer import LocalTrainer, TrainerSetup


def node_address() -> str:
    """The address of the Ray node that this process runs on."""
    import ray.util

    return str(ray.util.get_node_ip_address())  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


def interface_of(address: str) -> str | None:
    """The network interface that has an address; None where it is none of this machine's, as behind some container networks."""
    import psutil

    return next((name for name, own in psutil.net_if_addrs().items() if address in {one.address for one in own}), None)


class TrainingWorker:
    """An actor that outlives runs, so that the next run finds its libraries loaded; between runs it holds no model."""

    def __init__(self, rank: int, count: int, threads: int) -> None:
        torch.set_num_threads(threads or max(1, usable_cores() // count))
        self.rank = rank
        self.count = count
        self.shards: Shards | None = None
        self.trainer: LocalTrainer | None = None

    def address(self) -> str:
        """Where the others meet this worker: a free port of its node or, where all are on this machine, a file of ours alone.

        torch's store listens on every interface and asks nobody who they are, so on one machine there is none.
        """
        host = node_address()
        if host == LOOPBACK:
            return f"file://{tempfile.mkdtemp(prefix='ratchet-workers-')}/store"
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"tcp://{host}:{probe.getsockname()[1]}"

    def join(self, address: str) -> None:
        """Meet the other workers (a worker alone meets nobody)."""
        if address.startswith("file:"):
            os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
        elif (interface := interface_of(node_address())) is not None:
            # Else gloo takes the address of the host's name, which is loopback on many machines: workers of other nodes never reach it.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        self.shards = Shards.join(rank=self.rank, count=self.count, address=address) if self.count > 1 else Shards.alone()

    def resolve(self, dtype: str) -> str:
        """Name of the dtype that a configured one, such as `auto`, means on this machine."""
        return resolve_name(dtype)

    def open(self, setup: TrainerSetup) -> None:
        """Build a trainer; what an earlier run left is dropped first."""
        self.close()
        self.trainer = LocalTrainer(setup, shards=self.shards)

    def close(self) -> None:
        """Drop the model and the optimizer."""
        if self.trainer is not None:
            self.trainer.close()
            self.trainer = None

    def forward(self, data: Sequence[Datum]) -> ForwardBackward:
        """See the trainer's port; so for all below."""
        return self._open().forward(data)

    def forward_backward(self, data: Sequence[Datum], loss: LossSpec) -> ForwardBackward:
        return self._open().forward_backward(data, loss)

    def optim_step(self, params: AdamParams) -> StepOutcome:
        return self._open().optim_step(params)

    def retreat(self, kept: float, start: Path) -> None:
        self._open().retreat(kept, start)

    def load_state(self, snapshot: Path) -> None:
        self._open().load_state(snapshot)

    def load_state_with_optimizer(self, folder: Path) -> None:
        self._open().load_state_with_optimizer(folder)

    def save_state(self, folder: Path) -> None:
        self._open().save_state(folder)

    def save_weights_for_sampler(self, folder: Path, like: Path) -> str:
        return self._open().save_weights_for_sampler(folder, like)

    def process_id(self) -> int:
        return os.getpid()

    def peak_memory_bytes(self) -> int:
        """Highest resident memory of this process so far (VmHWM)."""
        status = Path("/proc/self/status").read_text()
        return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])

    def _open(self) -> LocalTrainer:
        assert self.trainer is not None, "open() comes first"
        return self.trainer
