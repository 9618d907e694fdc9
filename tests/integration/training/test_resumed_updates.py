"""Updates that were killed and go on: with turns that were erased meanwhile, and with what they began from gone."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from shutil import rmtree

import msgspec
import pytest

from app.domain.learning.batches import BatchManifest
from app.domain.learning.training import AdamParams, Datum, ForwardBackward, LossSpec, StepOutcome
from app.domain.release.versions import HoldReason, RunStatus, Version
from pipelines.training import TrainingPorts
from pipelines.training.config import LoraConfig
from pipelines.training.trainer import LocalTrainer, TrainerSetup
from tests.fakes.learning import FakeProgress, FakeTrajectories, fake_ports, put_version
from tests.fakes.updating import CONFIG, a_batch, assert_held, one_update, run


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the run may catch it."""


class Counting(LocalTrainer):
    """Counts how often each turn was in a step that Adam made."""

    def __init__(self, setup: TrainerSetup, learned: Counter[tuple[int, ...]]) -> None:
        super().__init__(setup)
        self.learned = learned
        self.coming: list[tuple[int, ...]] = []

    def forward_backward(self, data: Sequence[Datum], loss: LossSpec) -> ForwardBackward:
        self.coming += [datum.tokens for datum in data]
        return super().forward_backward(data, loss)

    def optim_step(self, params: AdamParams) -> StepOutcome:
        self.learned.update(self.coming)
        self.coming = []
        return super().optim_step(params)


class CountingTrainers:
    """Opens one that counts, over all attempts."""

    def __init__(self) -> None:
        self.learned = Counter[tuple[int, ...]]()

    @contextmanager
    def opened(self, setup: TrainerSetup, *, workers: int, timeout_s: float) -> Iterator[LocalTrainer]:
        trainer = Counting(setup, self.learned)
        yield trainer
        trainer.close()


class BrokenTrainers:
    """Has a mistake in it."""

    @contextmanager
    def opened(self, setup: TrainerSetup, *, workers: int, timeout_s: float) -> Iterator[LocalTrainer]:
        raise KeyError("odd")
        yield


def kill(ports: TrainingPorts, batch: BatchManifest, parent: Version, *, after: int, name: str = "run", **more: object) -> None:
    """An attempt that dies in its micro-step `after`, counted from one."""
    assert isinstance(ports.progress, FakeProgress)

    def interrupt(count: int) -> None:
        if count == after:
            raise Killed

    ports.progress.reports.clear()
    ports.progress.on_report = interrupt
    with pytest.raises(Killed):
        run(ports, batch, parent, name=name, **more)  # pyright: ignore[reportArgumentType]
    ports.progress.on_report = lambda count: None


def erase(ports: TrainingPorts, gone: Sequence[str]) -> None:
    """As an erasure does: no segment has the turns any more."""
    assert isinstance(ports.trajectories, FakeTrajectories)
    for segment in ports.trajectories.segments.values():
        for name in gone:
            segment.pop(name, None)


@pytest.mark.parametrize("gone", [1, 4])
def test_whoever_is_erased_between_a_kill_and_its_resume_is_missing_and_moves_no_other_turn(tmp_path: Path, gone: int) -> None:
    trainers = CountingTrainers()
    ports = replace(fake_ports(tmp_path), trainers=trainers)
    parent = put_version(ports)
    batch = a_batch(ports, parent)
    kill(ports, batch, parent, after=5)
    erased = [item.inference_id for item in batch.items[:gone]]
    left = [turn for turn in batch.items if turn.inference_id not in erased]
    tokens = [turn.tokens for turn in ports.trajectories.read((i.payload_segment or "", i.inference_id) for i in left).values()]
    erase(ports, erased)
    made = run(ports, batch, parent)
    assert made.status is RunStatus.SUCCEEDED, made.message
    assert made.metrics["resumed_from_step"] > 0
    assert made.metrics["left_out"] == {"payload_missing": gone}
    assert {count: tokens.count(count) - trainers.learned[count] for count in tokens} == dict.fromkeys(tokens, 0)


def test_an_update_whose_compared_turns_are_all_erased_is_held_and_says_so(tmp_path: Path) -> None:
    ports = fake_ports(tmp_path)
    parent = put_version(ports)
    batch = a_batch(ports, parent)
    kill(ports, batch, parent, after=5)
    restored = ports.states.newest_checkpoint("run").progress
    assert restored is not None
    erase(ports, [name for micro in restored["plan"][0] for name in micro])
    made = run(ports, batch, parent)
    assert_held(made, ports, HoldReason.TOO_FEW_LABELS)
    assert "0 of the turns that the candidate is compared with its parent on are left" in (made.message or "")


def test_a_run_that_a_mistake_of_ours_ends_is_failed_with_its_sentence_and_not_left_running(tmp_path: Path) -> None:
    ports = replace(fake_ports(tmp_path), trainers=BrokenTrainers())
    parent = put_version(ports)
    with pytest.raises(KeyError):
        run(ports, a_batch(ports, parent), parent, config=CONFIG)
    ended = ports.runs.get("run")
    assert ended is not None
    assert (ended.status, ended.message) == (RunStatus.FAILED, "KeyError: 'odd'; this is a mistake in Ratchet")


def test_a_resumed_update_still_says_what_it_began_from_and_what_was_lost(tmp_path: Path) -> None:
    ports = fake_ports(tmp_path)
    _, child = one_update(ports)
    kept = Path(child.optimizer_uri or "")
    aside = kept.rename(tmp_path / "aside")
    batch = a_batch(ports, child, slot=1)
    kill(ports, batch, child, after=3, name="two")
    aside.rename(kept)  # a share that is mounted again: what was begun without it goes on without it
    made = run(ports, batch, child, name="two")
    assert made.metrics["resumed_from_step"] > 0
    assert made.metrics["optimizer"] == "missing"
    assert str(kept) in made.metrics["alarms"][0]


def test_adapters_whose_parents_state_is_gone_at_the_resume_begin_again_and_are_not_laid_on_the_parent_twice(tmp_path: Path) -> None:
    config = msgspec.structs.replace(CONFIG, lora=LoraConfig(rank=4, learning_rate=2e-2))
    ports = fake_ports(tmp_path)
    _, child = one_update(ports, config)
    batch = a_batch(ports, child, slot=1)
    kill(ports, batch, child, after=3, name="two", config=config)
    rmtree(child.optimizer_uri or "")
    resumed = run(ports, batch, child, name="two", config=config)
    assert resumed.metrics["optimizer"] == "missing"
    assert resumed.metrics["alarms"]
    assert "resumed_from_step" not in resumed.metrics
    assert resumed.candidate == run(ports, batch, child, name="whole", config=config).candidate
