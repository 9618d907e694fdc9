"""Ray workers: one and two give the same gradients; a killed one fails the attempt, and the next attempt ends with the same weights."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from app.domain.errors import Unavailable
from app.domain.learning.training import AdamParams, Datum, LossSpec
from app.domain.release.versions import RunStatus
from pipelines.training import TrainingConfig, TrainingPorts, train
from pipelines.training.config import GuardLimits
from pipelines.training.ray_actors import RayTrainer, RayTrainers
from pipelines.training.trainer import LocalTrainer, TrainerSetup
from tests import ray_manners
from tests.doors import reachable_from_outside
from tests.fakes.learning import (
    FakeProgress,
    fake_ports,
    make_batch,
    put_version,
    random_prompts,
    sample_turns,
    saved_by_several,
    small_snapshot,
)

pytestmark = [pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")]

SPEC = LossSpec(normaliser=10.0)
STEP = AdamParams(learning_rate=1e-3, beta1=0.0, max_grad_norm=0.0)
"""With beta1 = 0 the first moment is the gradient itself, so the saved state shows it."""


@pytest.fixture(scope="module", autouse=True)
def token_file() -> Iterator[Path]:
    """Of one cluster for all tests here; whatever was started ends here."""
    yield ray_manners.TOKEN
    import ray  # only now: after its manners

    ray.shutdown()


@pytest.fixture(scope="module")
def trainers(token_file: Path) -> Iterator[RayTrainers]:
    """One worker that stays, as in a process of the loop: starting one costs more than most of what is asked of it here."""
    kept = RayTrainers(token_file)
    yield kept
    kept.stop()


def data(seed: int = 0) -> list[Datum]:
    generator = torch.Generator().manual_seed(seed)
    lengths = [3, 9, 5, 14, 7]
    return [
        Datum(
            tokens=tuple(torch.randint(24, (6 + length,), generator=generator).tolist()), first_scored=6, logprobs=(-3.0,) * length,
            advantages=tuple(torch.randn(length, generator=generator).tolist()),
        )
        for length in lengths
    ]  # fmt: skip


def test_two_workers_make_the_gradients_of_one(tmp_path: Path, token_file: Path) -> None:
    snapshot = tmp_path / "snapshot"
    small_snapshot(snapshot)
    setup = TrainerSetup(snapshot=snapshot, scratch=tmp_path / "scratch", dtype="float32", threads=1, communication="float32")
    alone = LocalTrainer(setup)
    expected = alone.forward_backward(data(), SPEC)
    step = alone.optim_step(STEP)
    alone.save_state(tmp_path / "one")

    two = RayTrainer(token_file=token_file, workers=2, threads=1, timeout_s=900)
    two.open(setup)
    found = two.forward_backward(data(), SPEC)
    assert two.optim_step(STEP).grad_norm == pytest.approx(step.grad_norm, rel=1e-5)
    two.save_state(tmp_path / "two")
    assert found.loss == pytest.approx(expected.loss, abs=1e-6)
    assert torch.allclose(torch.tensor(sum(found.logprobs, ())), torch.tensor(sum(expected.logprobs, ())), atol=1e-6)
    moments = load_file(tmp_path / "one" / "optimizer.safetensors")
    shared = saved_by_several(tmp_path / "two", "optimizer", moments)
    for name, moment in moments.items():
        assert float((moment - shared[name]).abs().max()) < 1e-6, name
    assert {file.name for file in (tmp_path / "two").iterdir()} == {
        f"{stem}-0000{rank}-of-00002.safetensors" for stem in ("weights", "optimizer") for rank in (1, 2)
    }

    alone.load_state_with_optimizer(tmp_path / "two")  # a state fits any number of workers, whoever wrote it
    alone.save_state(tmp_path / "taken over")
    assert all(torch.equal(moment, shared[name]) for name, moment in load_file(tmp_path / "taken over" / "optimizer.safetensors").items())
    two.load_state_with_optimizer(tmp_path / "one")
    two.save_state(tmp_path / "back")
    assert not reachable_from_outside(), "two workers meet without a listening socket that others reach"
    weights = load_file(tmp_path / "one" / "weights.safetensors")
    back = saved_by_several(tmp_path / "back", "weights", weights)
    assert all(torch.equal(weight, back[name]) for name, weight in weights.items())
    two.close()
    two.stop()


OPEN = GuardLimits(max_kl_champion=99, max_kl_anchor=99, min_entropy_share=0.0)
CONFIG = TrainingConfig(
    learning_rate=3e-3, turns_per_step=8, micro_batch_tokens=64, threads=1, dtype="float32", checkpoint_every_s=0.0, guards=OPEN
)  # fmt: skip


def test_a_killed_worker_fails_the_attempt_and_the_next_one_ends_with_the_same_weights(tmp_path: Path, trainers: RayTrainers) -> None:
    ports: TrainingPorts = replace(fake_ports(tmp_path), trainers=trainers)
    parent = put_version(ports)
    turns = sample_turns(ports.weights.path(parent.digest), random_prompts(32), version=parent.digest, length=5)
    batch = make_batch(ports, turns, [sum(t < 8 for t in turn.completion_tokens) / 5 for turn in turns], champion=parent.digest)
    whole = train(batch, run_id="whole", parent=parent, anchor=parent, config=CONFIG, ports=ports)
    progress = ports.progress
    assert isinstance(progress, FakeProgress)
    told = len(progress.reports)

    def kill(count: int) -> None:
        if count == told + told // 2:
            assert trainers._warm is not None
            os.kill(trainers._warm[1].process_ids()[0], signal.SIGKILL)

    progress.on_report = kill
    with pytest.raises(Unavailable, match="was lost"):
        train(batch, run_id="cut", parent=parent, anchor=parent, config=CONFIG, ports=ports)
    failed = ports.runs.get("cut")
    assert failed is not None
    assert failed.status is RunStatus.FAILED
    progress.on_report = lambda count: None
    resumed = train(batch, run_id="cut", parent=parent, anchor=parent, config=CONFIG, ports=ports)
    assert resumed.metrics["resumed_from_step"] >= 1
    assert resumed.candidate == whole.candidate


def test_the_workers_own_errors_come_through_by_name(tmp_path: Path, trainers: RayTrainers) -> None:
    setup = TrainerSetup(snapshot=tmp_path / "nothing", scratch=tmp_path, threads=1)
    with pytest.raises(Exception, match="there is no model at"), trainers.opened(setup, workers=1, timeout_s=900):
        pass


STRANGER = """
import ray
ray.init(address={address!r}, log_to_driver=False)
print("ran as", ray.get(ray.remote(lambda: "a stranger").remote()))
"""


def test_nobody_runs_a_task_without_the_token(token_file: Path, trainers: RayTrainers) -> None:
    trainers.warm(workers=1, threads=1, timeout_s=240)
    import ray

    address = str(ray.get_runtime_context().gcs_address)
    here = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    here["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # or it would look for 127.0.0.1 at the machine's outside address
    manners = ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64})
    program = [sys.executable, "-c", STRANGER.format(address=address)]
    strangers = [
        subprocess.Popen(program, env=here | given, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for given in manners
    ]
    for stranger in strangers:
        said, complained = stranger.communicate(timeout=240)
        assert stranger.returncode != 0
        assert "a stranger" not in said
        assert "InvalidAuthToken" in complained
    assert not reachable_from_outside()
    assert token_file.stat().st_mode & 0o777 == 0o600


def test_a_configuration_travels_as_json(tmp_path: Path) -> None:
    assert msgspec.json.decode(msgspec.json.encode(CONFIG), type=TrainingConfig) == CONFIG
