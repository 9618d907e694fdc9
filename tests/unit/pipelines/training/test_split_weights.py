"""Weights that several workers share: read part by part, cut by rows, put together one tensor at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from app.policy.model import Unloaded, load_model
from pipelines.training.numerics.tensor_file import TensorFile
from tests.fakes.learning import small_snapshot


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_that_is_read_part_by_part_is_the_model(tmp_path: Path, tied: bool) -> None:
    small_snapshot(tmp_path / "snapshot", tied=tied)
    unloaded = Unloaded(tmp_path / "snapshot", dtype=torch.float32)
    model = unloaded.model
    layers: Sequence[torch.nn.Module] = model.base_model.layers  # pyright: ignore[reportAssignmentType] - transformers leaves it open
    unloaded.fill(layers[0])
    assert not any(parameter.is_meta for parameter in layers[0].parameters())
    assert all(parameter.is_meta for parameter in layers[1].parameters()), "what was not asked for takes no memory"
    unloaded.fill(model)
    whole = load_model(tmp_path / "snapshot", dtype=torch.float32).state_dict()
    found = model.state_dict()
    assert found.keys() == whole.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in whole.items())
    head = model.get_output_embeddings()
    assert head is not None
    assert (head.weight is model.get_input_embeddings().weight) is tied


@dataclass(frozen=True)
class InTwo:
    """What gathers the rows of two workers; the other's are known."""

    others: dict[str, torch.Tensor]
    leads: bool

    def shape(self, name: str) -> tuple[int, ...]:
        return (5, 2) if name == "rows" else (3,)

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        return torch.cat([part, self.others[name]]) if name in self.others else part


@pytest.mark.parametrize("in_file", [True, False])
def test_full_tensors_are_written_from_the_workers_parts(tmp_path: Path, in_file: bool) -> None:
    rows, norm = torch.arange(10.0).view(5, 2), torch.tensor([1.0, 2.0, 3.0])
    mine = TensorFile({"rows": rows[:3], "norm": norm}, file=tmp_path / "mine.safetensors" if in_file else None)
    mine.tensors["rows"].copy_(rows[:3])
    mine.tensors["norm"].copy_(norm)
    mine.save(tmp_path / "led.safetensors", InTwo({"rows": rows[3:]}, leads=True))
    mine.save(tmp_path / "followed.safetensors", InTwo({"rows": rows[3:]}, leads=False))
    written = load_file(tmp_path / "led.safetensors")
    assert torch.equal(written["rows"], rows)
    assert torch.equal(written["norm"], norm)
    assert not (tmp_path / "followed.safetensors").exists()
    mine.save(tmp_path / "alone.safetensors")
    assert torch.equal(load_file(tmp_path / "alone.safetensors")["rows"], rows[:3])
