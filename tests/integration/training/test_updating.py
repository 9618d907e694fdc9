"""Whole updates in one process, over fakes: candidates, refusals and resumption."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from app.domain.errors import Unavailable
from app.domain.learning.batches import TurnPayload
from app.domain.release.versions import HoldReason, RunStatus
from pipelines.training import TrainingPorts
from pipelines.training.checkpoint import newest_checkpoint, seal
from pipelines.training.config import LoraConfig
from pipelines.training.numerics.precision import resolve_name
from tests.fakes.learning import (
    FakeProgress,
    FakeRuns,
    broken,
    fake_ports,
    put_version,
    version_of,
)
from tests.fakes.updating import CONFIG, a_batch, assert_held, broken_guards, one_update, run


@pytest.fixture
def ports(tmp_path: Path) -> TrainingPorts:
    return fake_ports(tmp_path)


def test_an_update_makes_a_candidate_and_says_how(ports: TrainingPorts) -> None:
    parent = put_version(ports)
    made = run(ports, a_batch(ports, parent), parent)
    assert made.status is RunStatus.SUCCEEDED, made.message
    assert made.candidate is not None
    assert made.candidate != parent.digest
    assert ports.weights.exists(made.candidate)
    assert made.metrics["turns"] == 32
    assert len(made.metrics["steps"]) == 4
    assert made.metrics["mismatch"] < 1e-6
    assert made.metrics["segments"][""]["turns"] == 32
    assert sum(made.metrics["ratio_histogram"]) == 8 * 5
    assert made.metrics["ratio_histogram"][6] == 8 * 5  # at step zero every ratio is in 0.99…1.01
    assert made.config["learning_rate"] == 3e-3
    assert Path(made.metrics["optimizer_uri"]).is_dir()
    assert isinstance(ports.runs, FakeRuns)
    assert ports.runs.trackers[made.candidate]["segments"][""][0] == 32
    msgspec.json.encode(made.metrics)


def test_progress_is_told_per_micro_step(ports: TrainingPorts) -> None:
    parent, anchor = put_version(ports), put_version(ports, seed=1)
    run(ports, a_batch(ports, parent), parent, anchor=anchor)
    assert isinstance(ports.progress, FakeProgress)
    done = [report[1] for report in ports.progress.reports]
    assert done == sorted(done)
    assert ports.progress.reports[-1][1] == ports.progress.reports[-1][2]
    assert {report[3]["phase"] for report in ports.progress.reports} == {"anchor", "update"}


def test_a_finished_run_is_not_made_again(ports: TrainingPorts) -> None:
    parent = put_version(ports)
    batch = a_batch(ports, parent)
    assert run(ports, batch, parent) is run(ports, batch, parent)


def test_the_same_batch_gives_the_same_weights_to_the_bit(ports: TrainingPorts, tmp_path: Path) -> None:
    parent = put_version(ports)
    batch = a_batch(ports, parent)
    assert run(ports, batch, parent, name="one").candidate == run(ports, batch, parent, name="two").candidate


def test_a_run_that_was_cut_off_and_reconfigured_ends_as_it_began(tmp_path: Path) -> None:
    whole, cut = fake_ports(tmp_path / "whole"), fake_ports(tmp_path / "cut")
    parent = put_version(whole)
    put_version(cut)
    expected = run(whole, a_batch(whole, parent), parent)
    batch = a_batch(cut, parent)
    assert isinstance(cut.progress, FakeProgress)

    def interrupt(count: int) -> None:
        if count == 5:
            raise Killed

    cut.progress.on_report = interrupt
    with pytest.raises(Killed):
        run(cut, batch, parent)
    other = msgspec.structs.replace(CONFIG, turns_per_step=16, learning_rate=1.0, seed=5, dtype="bfloat16", checkpoint_every_s=60.0)
    resumed = run(cut, batch, parent, config=other)
    assert resumed.candidate == expected.candidate
    assert (resumed.config["turns_per_step"], resumed.config["seed"]) == (8, 0)
    assert resumed.config["checkpoint_every_s"] == 60.0  # how it is worked on follows the operator
    assert resumed.metrics["dtype"] == "float32"


def test_what_auto_was_resolved_to_is_recorded_and_the_rest_of_the_run_keeps_to_it(ports: TrainingPorts) -> None:
    parent = put_version(ports)
    batch, auto = a_batch(ports, parent), msgspec.structs.replace(CONFIG, dtype="auto")
    here = resolve_name("auto")
    assert run(ports, batch, parent, config=auto, name="whole").metrics["dtype"] == here
    cutting = FakeProgress()

    def interrupt(count: int) -> None:
        if count == 5:
            raise Killed

    cutting.on_report = interrupt
    with pytest.raises(Killed):
        run(replace(ports, progress=cutting), batch, parent, config=auto)
    left = newest_checkpoint(ports.folder / "runs" / "run")
    assert isinstance(left.folder, Path)
    assert left.progress is not None
    assert left.progress["dtype"] == here
    other = {"float32": "bfloat16", "bfloat16": "float32"}[here]  # as a machine on which the other one is faster would have left it
    (left.folder / "progress.json").write_bytes(msgspec.json.encode(left.progress | {"dtype": other}))
    seal(left.folder)
    resumed = run(ports, batch, parent, config=auto)
    assert (resumed.metrics["resumed_from_step"] > 0, resumed.metrics["dtype"]) == (True, other)


def test_a_missing_optimizer_state_is_recorded_and_not_a_default(ports: TrainingPorts) -> None:
    _, child = one_update(ports)
    shutil.rmtree(child.optimizer_uri or "")
    made = run(ports, a_batch(ports, child, slot=1), child, name="two")
    assert made.metrics["optimizer"] == "missing"
    assert child.optimizer_uri is not None
    assert child.optimizer_uri in made.metrics["alarms"][0]


def test_updates_of_one_policy_leave_the_optimizer_of_another_alone(tmp_path: Path) -> None:
    pins: set[str] = set()
    ports = replace(fake_ports(tmp_path), pinned=lambda policy: pins)
    _, child = one_update(ports)
    made: list[Path] = []
    for number in range(8):
        parent = replace(put_version(ports, seed=number + 10), policy="tab")
        batch = replace(a_batch(ports, parent, count=8, slot=number + 1), policy="tab")
        ran = run(ports, batch, parent, name=f"tab-{number}")
        assert ran.candidate is not None, ran.message
        if number == 0:
            pins.add(ran.candidate)  # what a rollback may return to
        made.append(Path(ran.metrics["optimizer_uri"]))
    assert Path(child.optimizer_uri or "").is_dir()
    assert [path.is_dir() for path in made] == [True, False, False, True, True, True, True, True]
    assert run(ports, a_batch(ports, child, slot=20), child, name="two").metrics["optimizer"] == "inherited"


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the run may catch it."""


@pytest.mark.parametrize(("after", "lora"), [(2, None), (5, None), (9, None), (13, None), (13, LoraConfig(rank=4))])
def test_a_run_that_was_cut_off_ends_with_the_same_weights(tmp_path: Path, after: int, lora: LoraConfig | None) -> None:
    config = msgspec.structs.replace(CONFIG, lora=lora)
    whole, cut = fake_ports(tmp_path / "whole"), fake_ports(tmp_path / "cut")
    parent, anchor = put_version(whole), put_version(whole, seed=1)
    assert [put_version(cut), put_version(cut, seed=1)] == [parent, anchor]
    expected = run(whole, a_batch(whole, parent), parent, anchor=anchor, config=config)
    batch = a_batch(cut, parent)
    assert isinstance(cut.progress, FakeProgress)

    def interrupt(count: int) -> None:
        if count == after:
            raise Killed

    cut.progress.on_report = interrupt
    with pytest.raises(Killed):
        run(cut, batch, parent, anchor=anchor, config=config)
    resumed = run(cut, batch, parent, anchor=anchor, config=config)
    assert resumed.candidate == expected.candidate
    assert [s["loss"] for s in resumed.metrics["steps"]] == [s["loss"] for s in expected.metrics["steps"]]


def test_what_earlier_updates_of_a_policy_left_goes_when_its_next_one_begins(ports: TrainingPorts) -> None:
    parent = put_version(ports)
    cutting = FakeProgress()
    left = ports.folder / "runs"

    def interrupt(count: int) -> None:
        if count == 5:
            raise Killed

    cutting.on_report = interrupt
    for policy, name in (("composer", "ours"), ("tab", "theirs")):
        cutting.reports.clear()
        with pytest.raises(Killed):
            of = replace(parent, policy=policy)
            run(replace(ports, progress=cutting), replace(a_batch(ports, parent), policy=policy), of, name=name)
        assert list(left.glob(f"{name}/checkpoint-*")) != []
    (left / "of-nobody-we-know").mkdir()
    assert run(ports, a_batch(ports, parent, slot=1), parent, name="next").status is RunStatus.SUCCEEDED
    assert {path.name for path in left.iterdir()} == {"theirs", "of-nobody-we-know"}


@pytest.mark.parametrize("file", ["weights.safetensors", "optimizer.safetensors", "progress.json", "MANIFEST"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(tmp_path: Path, file: str) -> None:
    ports = fake_ports(tmp_path)
    parent = put_version(ports)
    batch = a_batch(ports, parent)
    expected = run(ports, batch, parent, name="whole")
    assert isinstance(ports.progress, FakeProgress)
    ports.progress.reports.clear()
    cutting = replace(ports, runs=FakeRuns())
    micro_steps = 4

    def interrupt(count: int) -> None:
        if len(list((ports.folder / "runs" / "cut").glob("checkpoint-*"))) == 2 and count > micro_steps:
            raise Killed

    ports.progress.on_report = interrupt
    with pytest.raises(Killed):
        run(cutting, batch, parent, name="cut")
    ports.progress.on_report = lambda count: None
    newest = sorted((ports.folder / "runs" / "cut").glob("checkpoint-*"))[-1]
    content = bytearray((newest / file).read_bytes())
    content[len(content) // 2] ^= 0xFF
    (newest / file).write_bytes(content)
    resumed = run(cutting, batch, parent, name="cut")
    assert resumed.metrics["damaged_checkpoints"] == [str(newest / file)]
    assert resumed.metrics["resumed_from_step"] == 1
    assert resumed.candidate == expected.candidate


def test_the_optimizer_follows_the_lineage(ports: TrainingPorts) -> None:
    parent = put_version(ports)
    first = run(ports, a_batch(ports, parent), parent, name="one")
    assert first.candidate is not None
    child = version_of(first.candidate, parent=parent.digest, step=1, optimizer_uri=first.metrics["optimizer_uri"])
    batch = a_batch(ports, child, slot=1)
    inherited = run(ports, batch, child, name="two")
    anew = run(ports, batch, replace(child, optimizer_uri=None), name="three")
    assert inherited.metrics["optimizer"] == "inherited"
    assert inherited.metrics["mismatch"] < 1e-3  # master weights are fp32, served ones bf16: close, not equal
    assert anew.metrics["optimizer"] == "new"
    assert inherited.candidate != anew.candidate


def test_a_damaged_optimizer_is_named_and_left_behind(ports: TrainingPorts) -> None:
    parent = put_version(ports)
    first = run(ports, a_batch(ports, parent), parent, name="one")
    assert first.candidate is not None
    uri = first.metrics["optimizer_uri"]
    (Path(uri) / "optimizer.safetensors").write_bytes(b"rotten")
    child = version_of(first.candidate, parent=parent.digest, step=1, optimizer_uri=uri)
    second = run(ports, a_batch(ports, child, slot=1), child, name="two")
    assert second.metrics["damaged_checkpoints"] == [f"{uri}/optimizer.safetensors"]
    assert second.metrics["optimizer"] == "damaged"
    assert "what rounding had kept back is lost" in second.metrics["alarms"][0]


def test_bad_turns_are_counted_and_the_rest_is_learned_from(ports: TrainingPorts) -> None:
    parent = put_version(ports)

    def spoil(turn: TurnPayload) -> TurnPayload:
        number = int(turn.inference_id[-4:])
        changes: dict[int, dict[str, Any]] = {
            0: {"logprobs": None},
            1: {"completion_tokens": (1, 2, 3, 4, 99)},
            2: {"prompt_tokens": (1,) * 200},
        }
        return broken(turn, **changes.get(number, {}))

    made = run(ports, a_batch(ports, parent, change=spoil), parent)
    assert made.metrics["left_out"] == {"no_logprobs": 1, "tokens_out_of_range": 1, "too_long": 1}
    assert made.metrics["turns"] == 29


def test_equal_rewards_hold(ports: TrainingPorts) -> None:
    parent = put_version(ports)
    assert_held(run(ports, a_batch(ports, parent, reward=lambda turn: 0.5), parent), ports, HoldReason.EQUAL_REWARDS)


@pytest.mark.parametrize("estimator", ["batch_mean", "group_mean"])
def test_every_turn_of_a_try_is_measured_against_its_group(ports: TrainingPorts, estimator: str) -> None:
    """Two groups of two tries of two turns, all prompts different. Paid 1 and 0: half above and half below the group's mean, four turns of
    eight; paid 2 and 2: nothing. sqrt(4 · 0.25 / 8) = 0.353553. By its prompt each turn would be alone and teach nothing."""
    parent, paid = put_version(ports), (1.0, 0.0, 2.0, 2.0)
    batch = a_batch(ports, parent, count=8)
    items = tuple(
        replace(item, episode_id=f"e{n // 2}", group=f"g{n // 4}", reward=paid[n // 2], segment="task=add")
        for n, item in enumerate(batch.items)
    )
    made = run(ports, replace(batch, items=items), parent, config=msgspec.structs.replace(CONFIG, estimator=estimator))
    assert made.candidate is not None, made.message
    assert (made.metrics["advantage_mean"], made.metrics["advantage_std"]) == pytest.approx((0.0, 0.353553), abs=1e-6)


def test_too_few_readable_turns_hold(ports: TrainingPorts) -> None:
    parent = put_version(ports)
    made = run(ports, a_batch(ports, parent, count=10, change=lambda t: broken(t, logprobs=None)), parent)
    assert_held(made, ports, HoldReason.TOO_FEW_LABELS)
    assert made.metrics["left_out"] == {"no_logprobs": 10}


@pytest.mark.parametrize("logged", [-0.01, -9.0])
def test_log_probabilities_of_another_model_hold(ports: TrainingPorts, logged: float) -> None:
    parent = put_version(ports)
    made = run(ports, a_batch(ports, parent, change=lambda t: broken(t, logprobs=(logged,) * 5)), parent)
    assert_held(made, ports, HoldReason.ENGINE_MISMATCH)


def test_data_too_far_off_policy_hold(ports: TrainingPorts) -> None:
    parent = put_version(ports)
    stale = broken_guards(max_mismatch=99.0, max_mismatch_p99=99.0, min_mean_ratio=0.0, max_mean_ratio=1e9)
    made = run(ports, a_batch(ports, parent, change=lambda t: broken(t, logprobs=(-0.1, -8.0, -0.1, -0.1, -0.1))), parent, config=stale)
    assert_held(made, ports, HoldReason.LOW_ESS)


def test_logged_probabilities_that_are_all_too_low_hold(ports: TrainingPorts) -> None:
    parent = put_version(ports)
    # every ratio is e^1.2 = 3.3: no token stands out, so the effective sample is whole and only their mean says that something is wrong
    batch = a_batch(ports, parent, change=lambda t: broken(t, logprobs=tuple(p - 1.2 for p in t.logprobs or ())))
    assert_held(run(ports, batch, parent, config=broken_guards(max_mismatch=99.0, max_mismatch_p99=99.0)), ports, HoldReason.MEAN_RATIO)


def test_weights_that_are_no_numbers_hold(ports: TrainingPorts) -> None:
    parent = put_version(ports)
    batch = a_batch(ports, parent)
    file = ports.weights.path(parent.digest) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, file)
    assert_held(run(ports, batch, parent), ports, HoldReason.NOT_FINITE)


def test_a_learning_rate_that_blows_up_is_held(ports: TrainingPorts) -> None:
    parent = put_version(ports)
    config = msgspec.structs.replace(CONFIG, learning_rate=1e30)
    made = run(ports, a_batch(ports, parent), parent, config=config)
    assert made.status is RunStatus.HELD
    assert made.hold_reason in {HoldReason.NOT_FINITE, HoldReason.LOW_ESS, HoldReason.MEAN_RATIO}


def test_an_update_too_small_for_bf16_is_held(ports: TrainingPorts) -> None:
    parent = put_version(ports)
    made = run(ports, a_batch(ports, parent), parent, config=msgspec.structs.replace(CONFIG, learning_rate=1e-12))
    assert_held(made, ports, HoldReason.EQUAL_REWARDS)


def test_a_lost_worker_fails_the_attempt_and_the_next_one_succeeds(ports: TrainingPorts) -> None:
    parent = put_version(ports)
    batch = a_batch(ports, parent)
    assert isinstance(ports.progress, FakeProgress)

    def lose(count: int) -> None:
        if count == 7:
            raise Unavailable("a training worker was lost")

    ports.progress.on_report = lose
    with pytest.raises(Unavailable):
        run(ports, batch, parent)
    failed = ports.runs.get("run")
    assert failed is not None
    assert failed.status is RunStatus.FAILED
    assert run(ports, batch, parent).status is RunStatus.SUCCEEDED


def test_the_baselines_start_anew_under_another_rule_set(ports: TrainingPorts) -> None:
    parent = put_version(ports)
    ports.runs.put_tracker(parent.digest, "composer", {"rule_set": "old", "segments": {"": [96.0, 3.0]}})
    made = run(ports, a_batch(ports, parent), parent)
    assert abs(made.metrics["advantage_mean"]) < 0.05, "not three below an expectation of other rewards"
    assert isinstance(ports.runs, FakeRuns)
    assert made.candidate is not None
    assert ports.runs.trackers[made.candidate]["rule_set"] == "rules"
