"""The trainer's port over Ray actors: one code path from one processor to many GPUs.

    driver (loop process)             actors, one per worker
    RayTrainer.forward_backward  ──▶  each its share of the micro-batch, gradients summed by FSDP2
                                 ◀──  log-probabilities and entropies, in the order given

`RAY_ADDRESS` picks the cluster; without it a frugal, closed one is started on this machine (`ray_cluster`) and kept for the next
run. Machines of a cluster share no folder: there the driver names snapshots and states by URL (`pipelines.training.elsewhere`).
"""

# Ray leaves parts of its types open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import logging
import shutil
import uuid
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.domain.errors import Held, Unavailable
from app.domain.learning.training import AdamParams, Datum, ForwardBackward, LossSpec, Place, StepOutcome
from app.policy.storage.remote_files import RemoteFiles
from app.policy.storage.snapshot import snapshot_digest
from pipelines.training.elsewhere.sealed import SETTING
from pipelines.training.elsewhere.states import HANDED
from pipelines.training.elsewhere.storage import Storage
from pipelines.training.numerics.state_files import digest_of
from pipelines.training.ray_cluster import join_cluster
from pipelines.training.trainer import TrainerSetup
from pipelines.training.worker import TrainingWorker

log = logging.getLogger(__name__)
OVER = "this update is over, and the next one begins anew"
"""True where a cycle calls: it gives up what failed. Only who was killed is resumed."""

LOSS_S = 60.0
"""How long after one worker's error the others are waited for, to learn whether it fails because one of them is gone: Ray notices a
machine that vanished within half of that."""


class RayTrainer:
    """A trainer made of actors. Keep it between runs: `open` and `close` frame a run, `stop` ends the actors."""

    def __init__(
        self, *, token_file: Path, workers: int = 1, threads: int = 0, timeout_s: float = 3600.0,
        storage: Storage = Storage(),  # noqa: B008 - frozen
    ) -> None:  # fmt: skip
        """Raises `BadConfig` where workers are on other machines and `storage` is not reached by all, before anything is started."""
        self._apart = join_cluster(workers=workers, token_file=token_file, storage=storage)
        import ray

        self.timeout_s = timeout_s
        self.workers = workers
        self.storage = storage
        there = ray.cluster_resources()
        gpus = 1 if there.get("GPU", 0) >= workers else 0
        if there.get("CPU", 0) < workers:
            log.warning("the Ray cluster has %d processors for %d training workers: waiting for a node", there.get("CPU", 0), workers)
        # on processors each gets a machine to itself where there are as many; GPUs are quickest side by side, as Ray places them by itself
        placed = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0, scheduling_strategy="DEFAULT" if gpus else "SPREAD")
        actor = placed(TrainingWorker)
        self.actors: list[Any] = [actor.remote(rank, workers) for rank in range(workers)]
        self.nodes = [str(node) for node in self._every("node")]
        """The address of each worker's machine."""
        self._join(threads)
        self._precision = ""

    def open(self, setup: TrainerSetup) -> None:
        """Build the model on every worker; all compute in what the first one resolves `auto` to."""
        self._precision = str(self._one("resolve", setup.dtype))
        base = None if setup.base is None else self._found(setup.base)
        self._every("open", replace(setup, dtype=self._precision), self._found(setup.snapshot), base)

    def precision(self) -> str:
        """Name of the dtype that the workers compute in."""
        return self._precision

    def close(self) -> None:
        """Free the workers' memory; they stay warm."""
        self._every("close")

    def stop(self) -> None:
        """End the actors."""
        import ray

        for actor in self.actors:
            ray.kill(actor)
        self.actors = []

    def forward(self, data: Sequence[Datum]) -> ForwardBackward:
        """See the port; so for all below."""
        return self._shared("forward", data)

    def forward_backward(self, data: Sequence[Datum], loss: LossSpec) -> ForwardBackward:
        """Every worker takes its share; one without a share of its own joins in with weight zero, because gradients are summed together."""
        return self._shared("forward_backward", data, loss)

    def optim_step(self, params: AdamParams) -> StepOutcome:
        return self._every("optim_step", params)[0]

    def retreat(self, kept: float, start: Place) -> None:
        snapshot = self._found(start) if self._apart and isinstance(start, Path) else None
        self._every("retreat", kept, snapshot or start, is_snapshot=snapshot is not None)

    def load_state(self, snapshot: Path) -> None:
        self._every("load_state", self._found(snapshot))

    def load_state_with_optimizer(self, folder: Place) -> None:
        self._every("load_state_with_optimizer", folder)

    def save_state(self, folder: Place) -> dict[str, str]:
        return {name: digest for written in self._every("save_state", folder) for name, digest in written.items()}

    def save_weights_for_sampler(self, folder: Path, like: Path) -> str:
        if self._apart:
            return self._fetched(folder, like)
        return self._every("save_weights_for_sampler", folder, like)[0]

    def process_ids(self) -> list[int]:
        """Of the workers, for whoever wants to see one die."""
        return self._every("process_id")

    def peak_memory_bytes(self) -> list[int]:
        """Per worker."""
        return self._every("peak_memory_bytes")

    def _join(self, threads: int) -> None:
        """Every worker meets the others; `threads` 0: each its part of its machine's cores."""
        address, beside = self._one("address") if self.workers > 1 else "", Counter(self.nodes)
        self._wait([
            actor.join.remote(address, threads, beside[node]) for actor, node in zip(self.actors, self.nodes, strict=True)
        ])  # fmt: skip

    def _found(self, snapshot: Path) -> Place:
        """A snapshot of this machine as workers find it."""
        return f"{self.storage.weights}/{snapshot_digest(snapshot)}" if self._apart else snapshot

    def _fetched(self, folder: Path, like: Path) -> str:
        """The leading worker's snapshot, through storage. Raises `Unavailable` where it came damaged."""
        name = f"{HANDED}/{uuid.uuid4().hex}"
        found: tuple[str, dict[str, str]] = self._every("hand_over", f"{self.storage.states}/{name}", self._found(like))[0]
        digest, digests = found
        files = RemoteFiles(str(self.storage.states), setting=SETTING)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for file, sent in digests.items():
            files.fetch(name, file, folder / file)
            if digest_of(folder / file) != sent:
                raise Unavailable(f"{self.storage.states}/{name}/{file} is not what a worker sent: {OVER}")
        files.clear(name)
        return digest

    def _shared(self, method: str, data: Sequence[Datum], *arguments: object) -> ForwardBackward:
        shares = share_out(data, self.workers)
        idle = replace(data[0], advantages=(0.0,) * (len(data[0].tokens) - data[0].first_scored), pull=0.0)
        given = [share or [idle] for share in shares]
        found: list[ForwardBackward] = self._wait(
            [getattr(actor, method).remote(share, *arguments) for actor, share in zip(self.actors, given, strict=True)]
        )
        real = [part for part, share in zip(found, shares, strict=True) if share]
        return ForwardBackward(
            loss=sum(part.loss for part in real),
            logprobs=tuple(row for part in real for row in part.logprobs),
            entropy=tuple(row for part in real for row in part.entropy),
            kept_log_mass=tuple(row for part in real for row in part.kept_log_mass),
            tokens=sum(part.tokens for part in real),
        )

    def _every(self, method: str, *arguments: object, **named: object) -> list[Any]:
        return self._wait([getattr(actor, method).remote(*arguments, **named) for actor in self.actors])

    def _one(self, method: str, *arguments: object) -> Any:  # noqa: ANN401 - whatever the method returns
        return self._wait([getattr(self.actors[0], method).remote(*arguments)])[0]

    def _wait(self, calls: list[Any]) -> list[Any]:
        import ray
        from ray.exceptions import GetTimeoutError, RayError, RayTaskError

        try:
            return ray.get(calls, timeout=self.timeout_s)
        except RayTaskError as error:
            if self._is_one_lost(calls):
                raise Unavailable(f"a training worker was lost, and with it what the others waited for; {OVER}") from error
            raise error.as_instanceof_cause() from None  # the worker's own exception, not the news that a task failed
        except GetTimeoutError as error:
            raise Unavailable(f"a training worker did not answer within {self.timeout_s:.0f} s; {OVER}") from error
        except RayError as error:
            raise Unavailable(f"a training worker was lost ({type(error).__name__}); {OVER}") from error

    def _is_one_lost(self, calls: list[Any]) -> bool:
        """Whether one of several workers is gone: what another one says then is that nobody answers it."""
        import ray
        from ray.exceptions import GetTimeoutError, RayError, RayTaskError

        if len(calls) < 2:
            return False
        ended, _ = ray.wait(calls, num_returns=len(calls), timeout=LOSS_S)
        for call in ended:
            try:
                ray.get(call, timeout=LOSS_S)
            except (RayTaskError, GetTimeoutError):
                continue
            except RayError:
                return True
        return False


def share_out(data: Sequence[Datum], workers: int) -> list[list[Datum]]:
    """Cut the data, in order, into one share per worker of about equally many tokens; late shares may be empty."""
    total = sum(len(datum.tokens) for datum in data)
    shares: list[list[Datum]] = [[] for _ in range(workers)]
    before = 0
    for datum in data:
        middle = before + len(datum.tokens) / 2
        shares[min(workers - 1, int(middle * workers / total))].append(datum)
        before += len(datum.tokens)
    return shares


class RayTrainers:
    """Opens trainers for runs and keeps the actors warm in between; hold one for the life of the process."""

    def __init__(self, token_file: Path, storage: Storage = Storage()) -> None:  # noqa: B008 - frozen
        self._token_file = token_file
        self._storage = storage
        self._warm: tuple[tuple[int, int], RayTrainer] | None = None

    @contextmanager
    def opened(self, setup: TrainerSetup, *, workers: int, timeout_s: float) -> Generator[RayTrainer]:
        """A trainer for one run; afterwards the actors drop the model and stay, unless one was lost, or one of several failed, which leaves
        the others waiting for it: then all are replaced next time."""
        trainer = self._trainer(workers, setup.threads, timeout_s)
        try:
            trainer.open(setup)
            yield trainer
        except Exception as error:
            if isinstance(error, Unavailable) or (workers > 1 and not isinstance(error, Held)):
                self.stop()
            raise
        finally:
            if self._warm is not None:
                self._close(trainer)

    def _close(self, trainer: RayTrainer) -> None:
        """A worker that dies here has given all that the run asked of it: the run stands, and the next one starts actors of its own."""
        try:
            trainer.close()
        except Unavailable as error:
            log.warning("training workers are started anew for the next run: %s", error)
            self.stop()

    def warm(self, *, workers: int, threads: int, timeout_s: float) -> None:
        """Start the actors now, so that the first run does not wait for them."""
        self._trainer(workers, threads, timeout_s)

    def stop(self) -> None:
        """End the actors."""
        if self._warm is not None:
            trainer = self._warm[1]
            self._warm = None
            trainer.stop()

    def _trainer(self, workers: int, threads: int, timeout_s: float) -> RayTrainer:
        if self._warm is None or self._warm[0] != (workers, threads):
            self.stop()
            trainer = RayTrainer(token_file=self._token_file, workers=workers, threads=threads, timeout_s=timeout_s, storage=self._storage)
            self._warm = ((workers, threads), trainer)
        self._warm[1].timeout_s = timeout_s  # of this run, not of the one that started the actors
        return self._warm[1]
