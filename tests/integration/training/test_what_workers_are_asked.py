"""What an update asks of its trainer micro-batch by micro-batch, what it leaves unsaid, and where workers of several machines meet."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import msgspec
import pytest

from app.domain.learning.training import AdamParams, Datum, ForwardBackward, LossSpec, StepOutcome
from pipelines.training.config import TrainingConfig
from pipelines.training.trainer import LocalTrainer, TrainerSetup
from pipelines.training.worker import TrainingWorker
from tests.fakes.learning import fake_ports, put_version
from tests.fakes.updating import CONFIG, a_batch, run


class Asked(LocalTrainer):
    """Remembers, per step, which micro-batches more were to follow."""

    def __init__(self, setup: TrainerSetup, steps: list[list[bool]]) -> None:
        super().__init__(setup)
        self.steps = steps

    def forward_backward(self, data: Sequence[Datum], loss: LossSpec) -> ForwardBackward:
        self.steps[-1].append(loss.more_follows)
        return super().forward_backward(data, loss)

    def optim_step(self, params: AdamParams) -> StepOutcome:
        self.steps.append([])
        return super().optim_step(params)


class Trainers:
    """Opens one that remembers."""

    def __init__(self) -> None:
        self.steps: list[list[bool]] = [[]]

    @contextmanager
    def opened(self, setup: TrainerSetup, *, workers: int, timeout_s: float) -> Iterator[LocalTrainer]:
        trainer = Asked(setup, self.steps)
        yield trainer
        trainer.close()


@pytest.mark.parametrize("when", ["each", "last"])
def test_gradients_are_summed_after_each_micro_batch_or_with_the_last_one(tmp_path: Path, when: Literal["each", "last"]) -> None:
    trainers = Trainers()
    ports = replace(fake_ports(tmp_path), trainers=trainers)
    parent = put_version(ports)
    config = msgspec.structs.replace(CONFIG, sum_gradients=when, micro_batch_tokens=24)
    made = run(ports, a_batch(ports, parent, count=16), parent, config=config)
    assert made.candidate is not None, made.message
    steps = [step for step in trainers.steps if step]
    assert len(steps) == 2
    assert all(len(step) > 2 for step in steps)
    assert [step[-1] for step in steps] == [False, False]
    assert {more for step in steps for more in step[:-1]} == {when == "last"}


def test_a_trainer_that_is_told_no_more_takes_the_vetted_setting() -> None:
    config, adam, loss = TrainingConfig(), AdamParams(learning_rate=1e-5), LossSpec(normaliser=1.0)
    assert (adam.beta1, adam.beta2, adam.eps) == (config.beta1, config.beta2, config.eps)
    assert (adam.weight_decay, adam.max_grad_norm) == (config.weight_decay, config.max_grad_norm)
    assert (loss.correction, loss.clip_high) == (config.correction.name, config.correction.high)
    assert loss.teacher_clip == config.hindsight.clip
    assert (loss.clip_low, loss.delta, loss.more_follows) == (0.0, 0.0, False), "bounds that no turn is beyond"
    datum = Datum(tokens=(1, 2), first_scored=1)
    assert (datum.temperature, datum.top_p, datum.top_k, datum.pull) == (1.0, 1.0, 0, 0.0)


def test_workers_of_one_machine_meet_in_a_file_and_others_at_a_free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("127.0.0.1", "127.0.0.2"):
        util = SimpleNamespace(get_node_ip_address=lambda host=host: host)
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(util=util))
        monkeypatch.setitem(sys.modules, "ray.util", util)
        worker = TrainingWorker(0, 2)
        assert worker.node() == host
        kind, _, place = worker.address().partition("://")
        if host == "127.0.0.1":
            assert (kind, Path(place).name, Path(place).exists(), Path(place).parent.is_dir()) == ("file", "store", False, True)
            Path(place).parent.rmdir()
        else:
            assert (kind, place.partition(":")[0]) == ("tcp", host)
            assert 1024 <= int(place.partition(":")[2]) < 1 << 16, "one that anybody may use"
