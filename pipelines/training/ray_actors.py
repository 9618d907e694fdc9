"""The trainer's port over Ray actors: one code path from one processor to many GPUs.

    driver (loop process)             actors, one per worker
    RayTrainer.forward_backward  ──▶  each its share of the micro-batch, gradients summed by FSDP2
                                 ◀──  log-probabilities and entropies, in the order given

`RAY_ADDRESS` picks the cluster; without it a frugal, closed one is started on this machine (`ray_cluster`) and kept for the next
run. Scratch folders must be seen by driver and workers alike (on a cluster: shared storage).
"""

# Ray leaves parts of its types open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.domain.errors import Unavailable
from app.domain.learning.training import AdamParams, Datum, ForwardBackward, LossSpec, StepOutcome
from app.machine import usable_cores
from pipelines.training.ray_cluster import join_cluster
from pipelines.training.trainer import TrainerSetup
from pipelines.training.worker import TrainingWorker


class RayTrainer:
    """A trainer made of actors. Keep it between runs: `open` and `close` frame a run, `stop` ends the actors."""

    def __init__(self, *, token_file: Path, workers: int = 1, threads: int = 0, timeout_s: float = 3600.0) -> None:
        join_cluster(workers=workers, token_file=token_file)
        import ray

        self.timeout_s = timeout_s
        self.workers = workers
        threads = threads or max(1, usable_cores() // workers)
        gpus = 1 if ray.cluster_resources().get("GPU", 0) >= workers else 0
        actor = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0)(TrainingWorker)
        self.actors: list[Any] = [actor.remote(rank, workers, threads) for rank in range(workers)]
        self._every("join", self._one("address") if workers > 1 else "")
        self._precision = ""

    def open(self, setup: TrainerSetup) -> None:
        """Build the model on every worker; all compute in what the first one resolves `auto` to."""
        self._precision = str(self._one("resolve", setup.dtype))
        self._every("open", replace(setup, dtype=self._precision))

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

    def retreat(self, kept: float, start: Path) -> None:
        self._every("retreat", kept, start)

    def load_state(self, snapshot: Path) -> None:
        self._every("load_state", snapshot)

    def load_state_with_optimizer(self, folder: Path) -> None:
        self._every("load_state_with_optimizer", folder)

    def save_state(self, folder: Path) -> None:
        self._every("save_state", folder)

    def save_weights_for_sampler(self, folder: Path, like: Path) -> str:
        return self._every("save_weights_for_sampler", folder, like)[0]

    def process_ids(self) -> list[int]:
        """Of the workers, for whoever wants to see one die."""
        return self._every("process_id")

    def peak_memory_bytes(self) -> list[int]:
        """Per worker."""
        return self._every("peak_memory_bytes")

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

    def _every(self, method: str, *arguments: object) -> list[Any]:
        return self._wait([getattr(actor, method).remote(*arguments) for actor in self.actors])

    def _one(self, method: str, *arguments: object) -> Any:  # noqa: ANN401 - whatever the method returns
        return self._wait([getattr(self.actors[0], method).remote(*arguments)])[0]

    def _wait(self, calls: list[Any]) -> list[Any]:
        import ray
        from ray.exceptions import GetTimeoutError, RayError, RayTaskError

        try:
            return ray.get(calls, timeout=self.timeout_s)
        except RayTaskError as error:
            raise error.as_instanceof_cause() from None  # the worker's own exception, not the news that a task failed
        except GetTimeoutError as error:
            raise Unavailable(
                f"a training worker did not answer within {self.timeout_s:.0f} s; the next attempt resumes this run"
            ) from error
        except RayError as error:
            raise Unavailable(f"a training worker was lost ({type(error).__name__}); the next attempt resumes this run") from error


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

    def __init__(self, token_file: Path) -> None:
        self._token_file = token_file
        self._warm: tuple[tuple[int, int], RayTrainer] | None = None

    @contextmanager
    def opened(self, setup: TrainerSetup, *, workers: int, timeout_s: float) -> Generator[RayTrainer]:
        """A trainer for one run; afterwards the actors drop the model and stay, unless one was lost: then all are replaced next time."""
        trainer = self._trainer(workers, setup.threads, timeout_s)
        try:
            trainer.open(setup)
            yield trainer
        except Unavailable:
            self.stop()
            raise
        finally:
            if self._warm is not None:
                trainer.close()

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
            trainer = RayTrainer(token_file=self._token_file, workers=workers, threads=threads, timeout_s=timeout_s)
            self._warm = ((workers, threads), trainer)
        return self._warm[1]
