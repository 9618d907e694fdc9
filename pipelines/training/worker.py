"""One Ray worker: a local trainer behind method calls. Imports neither a run's ports nor wiring: a worker knows tensors and folders, and
fetches (`pipelines.training.elsewhere`) what is named by a URL."""

import os
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from app.domain.learning.training import AdamParams, Datum, ForwardBackward, LossSpec, Place, StepOutcome
from app.machine import usable_cores
from pipelines.training.elsewhere.node import NodeFiles
from pipelines.training.numerics.precision import resolve_name
from pipelines.training.numerics.sharding import Shards
from pipelines.training.numerics.state_files import file_of
from pipelines.training.ray_cluster import LOOPBACK, interface_of
from pipelines.training.trainer import MASTERS, OPTIMIZER, LocalTrainer, TrainerSetup


def node_address() -> str:
    """The address of the Ray node that this process runs on."""
    import ray.util

    return str(ray.util.get_node_ip_address())  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


class TrainingWorker:
    """An actor that outlives runs, so that the next run finds its libraries loaded; between runs it holds no model."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank = rank
        self.count = count
        self.files = NodeFiles()
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

    def node(self) -> str:
        """The address of the machine that this worker is on."""
        return node_address()

    def join(self, address: str, threads: int, neighbours: int) -> None:
        """Meet the other workers (a worker alone meets nobody). `threads`; 0: this machine's cores, divided by the workers on it."""
        torch.set_num_threads(threads or max(1, usable_cores() // neighbours))
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

    def open(self, setup: TrainerSetup, snapshot: Place, base: Place | None) -> None:
        """Build a trainer; what an earlier run left is dropped first. `snapshot` and `base` are those of the setup, as this machine finds
        them; its scratch is a folder of this machine where they are URLs."""
        self.close()
        if isinstance(snapshot, str):
            setup = replace(
                setup, scratch=self.files.scratch, snapshot=self.files.snapshot(snapshot), base=base and self.files.snapshot(base)
            )
        self.trainer = LocalTrainer(setup, shards=self.shards)

    def close(self) -> None:
        """Drop the model and the optimizer."""
        if self.trainer is not None:
            self.trainer.close()
            self.trainer = None
            self.files.close()

    def forward(self, data: Sequence[Datum]) -> ForwardBackward:
        """See the trainer's port; so for all below."""
        return self._open().forward(data)

    def forward_backward(self, data: Sequence[Datum], loss: LossSpec) -> ForwardBackward:
        return self._open().forward_backward(data, loss)

    def optim_step(self, params: AdamParams) -> StepOutcome:
        return self._open().optim_step(params)

    def retreat(self, kept: float, start: Place, *, is_snapshot: bool) -> None:
        self._open().retreat(kept, self.files.snapshot(start) if is_snapshot else self._state(start))

    def load_state(self, snapshot: Place) -> None:
        self._open().load_state(self.files.snapshot(snapshot))

    def load_state_with_optimizer(self, folder: Place) -> None:
        self._open().load_state_with_optimizer(self._state(folder))

    def save_state(self, folder: Place) -> dict[str, str]:
        """The digests of the files that this worker wrote; to a URL they are on their way no longer when this returns."""
        if not isinstance(folder, str):
            return self._open().save_state(folder)
        digests: dict[str, str] = {}
        with self.files.sending(folder, digests) as outgoing:
            digests |= self._open().save_state(outgoing)
        return digests

    def save_weights_for_sampler(self, folder: Path, like: Path) -> str:
        return self._open().save_weights_for_sampler(folder, like)

    def hand_over(self, place: str, like: Place) -> tuple[str, dict[str, str]]:
        """Send the snapshot to a URL, where whoever publishes it takes it from: its digest, and those of its files by name; both empty on
        workers that do not lead."""
        digests: dict[str, str] = {}
        with self.files.sending(place, digests) as outgoing:
            digest = self._open().save_weights_for_sampler(outgoing, self.files.snapshot(like))
        return digest, digests

    def process_id(self) -> int:
        return os.getpid()

    def peak_memory_bytes(self) -> int:
        """Highest resident memory of this process so far (VmHWM)."""
        status = Path("/proc/self/status").read_text()
        return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])

    def _state(self, place: Place) -> Path:
        return self.files.state(place, [file_of(stem, rank=self.rank, count=self.count) for stem in (MASTERS, OPTIMIZER)])

    def _open(self) -> LocalTrainer:
        assert self.trainer is not None, "open() comes first"
        return self.trainer
