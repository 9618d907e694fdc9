"""Snapshots and their digest."""

import hashlib
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.domain.errors import BadInput, NotFound
from app.policy.model import load_model, load_policy
from app.policy.storage.fetch import fetch
from app.policy.storage.snapshot import PARENT, PROBE, require_snapshot, snapshot_digest, verify_snapshot, write_snapshot
from app.policy.storage.store import LocalWeights
from app.policy.storage.weights import digest_of
from app.policy.tiny import write_tiny


def test_the_digest_covers_name_dtype_shape_and_bytes_in_order_of_names() -> None:
    tensors = {"b": torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16), "a": torch.tensor([1.0])}
    # bfloat16 1.0 is 0x3f80 and 2.0 is 0x4000, float32 1.0 is 0x3f800000, all little-endian
    expected = hashlib.sha256(b"a F32 1\n" + bytes.fromhex("0000803f") + b"b BF16 1,2\n" + bytes.fromhex("803f0040"))
    assert digest_of(tensors) == expected.hexdigest()


def test_the_digest_of_a_file_is_that_of_its_tensors(tiny_model: Path) -> None:
    assert verify_snapshot(tiny_model) == digest_of(load_file(tiny_model / "model.safetensors")) == snapshot_digest(tiny_model)


def test_the_digest_does_not_depend_on_the_files_layout(tiny_model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_model, tmp_path / "copy"))
    tensors = load_file(copy / "model.safetensors")
    save_file(dict(reversed(tensors.items())), copy / "model.safetensors", metadata={"written": "again"})
    assert verify_snapshot(copy) == snapshot_digest(tiny_model)


def test_the_same_seed_gives_the_same_tiny_model_and_another_one_another(tiny_model: Path, tmp_path: Path) -> None:
    assert write_tiny(tmp_path / "same") == snapshot_digest(tiny_model)
    assert write_tiny(tmp_path / "other", seed=1) != snapshot_digest(tiny_model)


def test_a_flipped_bit_is_found_when_a_snapshot_is_loaded(tiny_model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_model, tmp_path / "copy"))
    damaged = bytearray((copy / "model.safetensors").read_bytes())
    damaged[-100] ^= 1
    (copy / "model.safetensors").write_bytes(damaged)
    with pytest.raises(BadInput, match="damaged"):
        load_policy(copy)


def test_a_file_that_is_cut_off_is_bad_input(tiny_model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_model, tmp_path / "copy"))
    whole = (copy / "model.safetensors").read_bytes()
    for kept in (0, 5, 100, len(whole) - 1):
        (copy / "model.safetensors").write_bytes(whole[:kept])
        with pytest.raises(BadInput, match="again"):
            verify_snapshot(copy)


def test_a_folder_without_ready_is_no_model_and_the_message_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"make model.*ratchet model fetch"):
        require_snapshot(tmp_path)


def test_other_weights_than_asked_for_are_refused(tiny_model: Path) -> None:
    with pytest.raises(BadInput, match="publish the version again"):
        load_policy(tiny_model, digest="0" * 64)


def test_a_float32_model_is_written_as_bfloat16_and_comes_back_rounded(tiny_model: Path, tmp_path: Path) -> None:
    model = load_model(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        model.get_parameter("model.norm.weight").add_(1e-4)  # below half a step of bfloat16 at 1.0 (2⁻⁸): lost
        model.get_parameter("lm_head.weight")[0].add_(1.0)
    digest = write_snapshot(tmp_path / "new", model.state_dict(), like=tiny_model)
    again = load_model(tmp_path / "new", dtype=torch.float32)
    assert digest == verify_snapshot(tmp_path / "new") != snapshot_digest(tiny_model)
    assert torch.equal(again.get_parameter("model.norm.weight"), torch.ones(128))
    assert torch.equal(again.get_parameter("lm_head.weight"), model.get_parameter("lm_head.weight").bfloat16().float())


def test_writing_what_was_loaded_gives_the_same_digest_tied_or_not(tiny_model: Path, tied_model: Path, tmp_path: Path) -> None:
    for source in (tiny_model, tied_model):
        state = load_model(source, dtype=torch.float32).state_dict()
        assert write_snapshot(tmp_path / source.name, state, like=source) == snapshot_digest(source)


def test_tied_weights_are_stored_once_and_shared_when_loaded(tied_model: Path) -> None:
    assert "lm_head.weight" not in load_file(tied_model / "model.safetensors")
    model = load_model(tied_model)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight  # type: ignore[union-attr] - it has one


def test_a_failed_write_leaves_the_old_snapshot_and_nothing_else(tiny_model: Path, tmp_path: Path) -> None:
    target = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    with pytest.raises(KeyError):
        write_snapshot(target, {"x": torch.zeros(2, dtype=torch.complex64)}, like=tiny_model)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert verify_snapshot(target) == snapshot_digest(tiny_model)


# --- a folder of versions ---------------------------------------------------------------------------------------------------------


def line_of(root: Path, count: int) -> None:
    """Versions v0, v1, …, each made from the one before."""
    for number in range(count):
        folder = root / f"v{number}"
        folder.mkdir(parents=True)
        (folder / "READY").write_text(f"v{number}\n")
        if number:
            (folder / PARENT).write_text(f"v{number - 1}\n")


def test_a_snapshot_takes_the_place_of_a_snapshot_or_of_nothing_and_deletes_nothing_else(tmp_path: Path) -> None:
    models, notes, empty = tmp_path / "models", tmp_path / "notes.txt", tmp_path / "empty"
    write_tiny(models / "tiny")
    notes.write_text("mine")
    empty.mkdir()
    for folder in (models, notes):
        with pytest.raises(BadInput, match="is no snapshot, and would be deleted"):
            write_tiny(folder)
        with pytest.raises(BadInput, match="is no snapshot, and would be deleted"):
            fetch(folder, wheel_cache=tmp_path / "wheels")
    assert ((models / "tiny" / "READY").is_file(), notes.read_text()) == (True, "mine")
    assert write_tiny(empty) == write_tiny(models / "tiny")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "models", "notes.txt"]


def test_a_version_is_reached_from_the_nearest_ancestor_that_is_held_over_twenty_steps_at_most(tmp_path: Path) -> None:
    line_of(tmp_path, 23)
    store = LocalWeights(tmp_path)
    (tmp_path / "v20" / PROBE).write_bytes(b"probe")
    found = store.way("v20", {"v0"})
    assert found is not None
    assert (found.base, found.snapshot, found.probe) == ("v0", tmp_path / "v20", b"probe")
    assert store.way("v21", {"v0"}) is None
    near = store.way("v21", {"v0", "v3", "v21"})
    assert near is not None
    assert (near.base, near.probe) == ("v3", None)
    assert store.way("v5", {"other"}) is None
    assert store.way("gone", {"v0"}) is None


def test_a_version_is_there_when_it_is_whole_and_gone_when_it_was_removed(tmp_path: Path) -> None:
    line_of(tmp_path, 2)
    (tmp_path / "half").mkdir()
    store = LocalWeights(tmp_path)
    assert [store.exists(name) for name in ("v0", "half", "", "gone")] == [True, False, False, False]
    assert store.path("v0") == tmp_path / "v0"
    with pytest.raises(NotFound, match="the weights half are not in"):
        store.path("half")
    assert store.ages_s().keys() == {"v0", "v1"}
    os.utime(tmp_path / "v0" / "READY", (time.time() - 100.0, time.time() - 100.0))
    assert store.ages_s()["v0"] == pytest.approx(100.0, abs=5.0)
    store.remove("v0")
    store.remove("v0")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["half", "v1"], "nothing is left lying about"


def test_what_a_killed_publisher_left_is_swept_and_counted(tmp_path: Path) -> None:
    line_of(tmp_path, 1)
    for name in (".d.1.incoming", ".d.2.incoming", ".other"):
        (tmp_path / name / "deep").mkdir(parents=True)
    assert LocalWeights(tmp_path).sweep() == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other", "v0"]
