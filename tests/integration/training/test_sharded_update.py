"""Two workers that share a model against one that has it alone: what they send, what they lose by it, and what they may not keep.

All that the two find is found in one meeting (`tests.learning.sharing`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.multiprocessing.spawn import spawn

from app.domain.learning.training import Datum
from pipelines.training.ray_actors import share_out
from pipelines.training.trainer import LocalTrainer
from tests.fakes.learning import saved_by_several, small_snapshot
from tests.learning.sharing import RATE, VOCABULARY, half_way_back, setup, turns, update, work

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning")]

ROUNDING = 2.0**-8
"""Of a value to the nearest bfloat16, as a share of it: 8 significant bits."""
SUMMING = 1e-6
"""What another order of sums in fp32 makes of gradients of this size (below 1)."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both have been, and one alone."""
    made = tmp_path_factory.mktemp("sharded")
    small_snapshot(made / "snapshot", vocabulary=VOCABULARY)
    spawn(work, args=(made,), nprocs=2)
    return made


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    """By worker."""
    return [torch.load(folder / f"found-{rank}") for rank in range(2)]


def alone(folder: Path, way: str, given: Sequence[Datum], name: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The state after one worker's step, and its log-probabilities."""
    trainer = LocalTrainer(setup(folder, way, scratch=name))
    logprobs = update(trainer, [given])
    trainer.save_state(folder / name / way)
    trainer.save_weights_for_sampler(folder / name / f"{way}-made", folder / "snapshot")
    return load_file(folder / name / way / "optimizer.safetensors"), logprobs


def gradients(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("first."): tensor for name, tensor in state.items() if name.startswith("first.")}


def test_no_worker_ever_holds_more_than_one_part_of_the_model_whole(folder: Path, found: list[dict[str, Any]]) -> None:
    parts: Counter[str] = Counter()
    for name, tensor in load_file(folder / "snapshot" / "model.safetensors").items():
        parts[name.split(".")[2] if ".layers." in name else "rest"] += tensor.numel()
    assert parts.keys() == {"0", "1", "rest"}
    assert [one["uncut"] for one in found] == [max(parts.values())] * 2


def test_weights_and_gradients_travel_as_bfloat16(found: list[dict[str, Any]]) -> None:
    sent: dict[tuple[str, str], int] = found[0]["bfloat16"]["sent"]
    assert {dtype for operation, dtype in sent if operation != "allreduce_"} == {"torch.bfloat16"}
    assert sent["allreduce_", "torch.float32"] == 1, "the norm, one number"
    whole: dict[tuple[str, str], int] = found[0]["float32"]["sent"]
    assert {dtype for _, dtype in whole} == {"torch.float32"}
    assert sent["_allgather_base_", "torch.bfloat16"] == whole["_allgather_base_", "torch.float32"], "all of the weights"
    # of G elements each worker gives G, and is given its half of both workers' (2 G in all), or of their sum (3/2 G)
    assert 3 * sent["alltoall_base_", "torch.bfloat16"] == 4 * whole["_reduce_scatter_base_", "torch.float32"], "all of the gradients"


def test_the_update_is_that_of_one_worker_within_the_rounding_of_each_workers_gradient(folder: Path, found: list[dict[str, Any]]) -> None:
    expected, logprobs = alone(folder, "bfloat16", turns(), "one")
    said = [*found[0]["bfloat16"]["logprobs"], *found[1]["bfloat16"]["logprobs"]]
    assert said == pytest.approx(logprobs, abs=1e-6), "both compute with the very same weights: what is served is bfloat16"
    parts = [gradients(alone(folder, "bfloat16", share, f"part-{rank}")[0]) for rank, share in enumerate(share_out(turns(), 2))]
    two = gradients(saved_by_several(folder / "two" / "bfloat16", "optimizer", expected))
    one = load_file(folder / "one" / "bfloat16" / "weights.safetensors")
    masters = [one, saved_by_several(folder / "two" / "bfloat16", "weights", one)]
    apart = 0
    for name, gradient in gradients(expected).items():
        bound = ROUNDING * (parts[0][name].abs() + parts[1][name].abs()) + SUMMING
        assert bool(((two[name] - gradient).abs() <= bound).all()), name
        apart += int((two[name] != gradient).sum())
        moved = (masters[0][name] - masters[1][name]).abs()
        certain = gradient.abs() > 2 * bound  # its sign is the same on both sides, and the step is the rate times the sign
        assert float(moved[certain].max()) < 0.02 * RATE, name
        assert float(moved.max()) <= 2 * RATE + 1e-6, name
    assert apart > 0, "something was rounded"


@pytest.mark.parametrize("way", ["float32", "recomputed"])
def test_in_float32_two_workers_make_the_gradients_of_one(folder: Path, way: str) -> None:
    expected = alone(folder, way, turns(), f"one-{way}")[0]
    two = gradients(saved_by_several(folder / "two" / way, "optimizer", expected))
    assert all(float((two[name] - gradient).abs().max()) < SUMMING for name, gradient in gradients(expected).items())


def test_gradients_can_be_summed_once_a_step(folder: Path, found: list[dict[str, Any]]) -> None:
    parts = 3  # two layers, and what is left
    assert (found[0]["each"], found[0]["once"]) == (3 * parts, parts), "three micro-batches"
    like = alone(folder, "float32", turns(), "as one")[0]
    each, once = (gradients(saved_by_several(folder / "two" / name, "optimizer", like)) for name in ("each", "once"))
    assert all(float((once[name] - gradient).abs().max()) < SUMMING for name, gradient in each.items())


def test_weights_that_change_between_two_passes_without_a_gradient_are_gathered_anew(folder: Path, found: list[dict[str, Any]]) -> None:
    """As when a candidate beyond its budget is taken back and judged again; FSDP2 leaves the root's weights gathered after such a pass."""
    trainer = LocalTrainer(setup(folder, "float32", scratch="other"))
    expected = half_way_back(trainer, folder / "snapshot", turns())
    assert max(map(abs, expected)) > 0.1
    assert [*found[0]["after"], *found[1]["after"]] == pytest.approx(expected, abs=0.01)


def test_adapters_learn_on_a_base_that_several_workers_share(folder: Path, found: list[dict[str, Any]]) -> None:
    expected, logprobs = alone(folder, "lora", turns(), "one")
    assert [*found[0]["lora"]["logprobs"], *found[1]["lora"]["logprobs"]] == pytest.approx(logprobs, abs=1e-6)
    two = gradients(saved_by_several(folder / "two" / "lora", "optimizer", expected))
    for name, gradient in gradients(expected).items():
        assert float((two[name] - gradient).abs().max()) < SUMMING, name
    assert any(float(gradient.abs().max()) > 1e-3 for gradient in two.values())
    served = [load_file(folder / name / "lora-made" / "model.safetensors") for name in ("one", "two")]
    changed = load_file(folder / "snapshot" / "model.safetensors")
    assert any(not torch.equal(served[0][name], tensor) for name, tensor in changed.items()), "the merge moved what is served"
    for name, tensor in served[0].items():
        assert torch.allclose(served[1][name].float(), tensor.float(), rtol=2.0**-7), name  # a place of bfloat16 where rounding is close
    sent: dict[tuple[str, str], int] = found[0]["lora"]["sent"]
    adapters = sum(gradient.numel() for gradient in two.values())
    assert sent["allreduce_", "torch.float32"] == adapters + 1, "adapters' gradients, and the norm"


def test_the_base_of_adapters_is_held_as_it_is_served(folder: Path, found: list[dict[str, Any]]) -> None:
    assert found[0]["held"] == "torch.bfloat16"
    sent: dict[tuple[str, str], int] = found[0]["lora_bfloat16"]["sent"]
    assert {dtype for operation, dtype in sent if operation == "_allgather_base_"} == {"torch.uint8", "torch.bfloat16"}, (
        "layers, and the rest"
    )
    logprobs = alone(folder, "lora_bfloat16", turns(), "one")[1]
    assert [*found[0]["lora_bfloat16"]["logprobs"], *found[1]["lora_bfloat16"]["logprobs"]] == pytest.approx(logprobs, abs=0.02)
