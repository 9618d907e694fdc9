"""Weights that several workers share: read part by part, cut by rows, written and read again by whoever holds them."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from app.policy.model import Unloaded, load_model
from pipelines.training.numerics.state_files import Rows, StateFiles, file_of, is_there
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


def write(folder: Path, tensors: Mapping[str, torch.Tensor], *, count: int, in_file: bool = True) -> None:
    """As `count` workers do it that share everything of two dimensions."""
    for rank in range(count):
        mine = {name: whole[held(whole, rank, count)] if whole.dim() > 1 else whole for name, whole in tensors.items()}
        kept = TensorFile(mine, file=folder / f"scratch-{rank}.safetensors" if in_file else None)
        for name, part in mine.items():
            kept.tensors[name].copy_(part)
        kept.save(folder / file_of("state", rank=rank, count=count))


def held(whole: torch.Tensor, rank: int, count: int) -> slice:
    rows = Rows.dealt(tuple(whole.shape), rank=rank, count=count)
    return slice(rows.first, rows.end)


@pytest.mark.parametrize("in_file", [True, False])
def test_what_two_workers_wrote_is_read_whole_and_each_wrote_its_rows_alone(tmp_path: Path, in_file: bool) -> None:
    tensors = {"rows": torch.arange(10.0).view(5, 2), "norm": torch.tensor([1.0, 2.0, 3.0])}
    write(tmp_path, tensors, count=2, in_file=in_file)
    second = load_file(tmp_path / "state-00002-of-00002.safetensors")
    assert second["rows"].tolist() == [[6.0, 7.0], [8.0, 9.0]]
    assert second["norm"].tolist() == [1.0, 2.0, 3.0]
    with StateFiles(tmp_path, "state") as state:
        assert state.names == {"rows", "norm"}
        assert all(torch.equal(state.read(name, Rows.all_of(tensor)), tensor) for name, tensor in tensors.items())


@given(rows=st.integers(1, 12), writers=st.integers(1, 5), readers=st.integers(1, 5))
def test_any_number_of_workers_reads_what_any_other_number_wrote(rows: int, writers: int, readers: int) -> None:
    tensors = {"rows": torch.arange(3.0 * rows).view(rows, 3), "norm": torch.arange(float(rows))}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), tensors, count=writers)
        with StateFiles(Path(folder), "state") as state:
            found = [state.read("rows", Rows.dealt((rows, 3), rank=rank, count=readers)) for rank in range(readers)]
            assert [len(part) for part in found] == [len(tensors["rows"][held(tensors["rows"], rank, readers)]) for rank in range(readers)]
            assert torch.equal(torch.cat(found), tensors["rows"])
            assert torch.equal(state.read("norm", Rows.all_of(tensors["norm"])), tensors["norm"])


@pytest.mark.parametrize(("rows", "count"), [(25, 2), (5, 4), (2, 3), (1, 3), (8, 4)])
def test_rows_are_dealt_as_torch_chunk_deals_them(rows: int, count: int) -> None:
    whole = torch.arange(float(rows))
    chunks = [chunk.tolist() for chunk in whole.chunk(count)]
    assert [whole[held(whole, rank, count)].tolist() for rank in range(count)] == chunks + [[]] * (count - len(chunks))


def test_a_state_that_lacks_a_worker_or_is_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, {"rows": torch.zeros(5, 2)}, count=3)
    assert is_there(tmp_path, "state")
    with StateFiles(tmp_path, "state") as state:
        with pytest.raises(ValueError, match=r"rows has the shape \[5, 2\] in .* and \[6, 2\] here"):
            state.read("rows", Rows((6, 2), 0, 6))
        with pytest.raises(KeyError, match="lacks others"):
            state.read("others", Rows((5, 2), 0, 5))
    (tmp_path / "state-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks state-00002-of-00003\.safetensors"):
        StateFiles(tmp_path, "state")
    assert not is_there(tmp_path, "other")
    with pytest.raises(FileNotFoundError, match=r"lacks other\.safetensors"):
        StateFiles(tmp_path, "other")
