"""Versions that cannot be had, in every way the store can be wrong: a sentence with the cure, and the engine serves on what it has."""

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType] - its PathLike has no parameter

from app.domain.ports import EngineState
from app.policy.model import load_policy
from app.policy.storage.delta import encode_delta
from app.policy.storage.remote import DELTA, RemoteWeights
from app.policy.storage.snapshot import READY, WEIGHTS, finish_snapshot, snapshot_digest
from app.policy.storage.store import LocalWeights
from app.policy.storage.weights import digest_of_file
from tests.integration.serving.running import RunningEngine, ask, engine, request, until
from tests.integration.serving.test_patched_versions import Loads, is_of, moved


@dataclass(frozen=True, kw_only=True)
class Room:
    """A remote store with a base, a version made from it, and one made from that."""

    folder: Path
    url: str
    folders: list[Path]

    @property
    def digests(self) -> list[str]:
        return [snapshot_digest(folder) for folder in self.folders]

    def place(self, index: int, name: str) -> str:
        return f"{self.url.removeprefix('memory:/')}/{self.digests[index]}/{name}"

    def bytes_of(self, index: int, name: str) -> bytes:
        return fsspec.filesystem("memory").cat_file(self.place(index, name))

    def put(self, index: int, name: str, content: bytes) -> None:
        fsspec.filesystem("memory").pipe_file(self.place(index, name), content)


@pytest.fixture
def room(tiny_model: Path, tmp_path: Path) -> Room:
    one = moved(tiny_model, tmp_path / "one", 1.5)
    made = Room(folder=tmp_path, url=f"memory://bucket-{uuid4().hex}/weights", folders=[tiny_model, one, moved(one, tmp_path / "two", 1.5)])
    writer = RemoteWeights(made.url, cache=tmp_path / "publisher")
    for folder in made.folders:
        writer.publish(folder)
    return made


def refused(running: RunningEngine, digest: str) -> str:
    """Want a version, wait until it failed, and read why."""
    running.ledger.wants.add(("composer", digest))
    until(lambda: running.ledger.states.get(("composer", digest), (None,))[0] is EngineState.FAILED)
    assert not running.worker.holds(digest)
    return str(running.ledger.states["composer", digest][1])


def another_base(room: Room) -> None:
    """The delta was made from weights that nobody here has."""
    tensors = load_file(room.folders[2] / WEIGHTS)
    other = {name: tensor + 1 if tensor.dim() == 1 else tensor for name, tensor in tensors.items()}
    room.put(2, DELTA, encode_delta(other, tensors))


def cut_off(room: Room) -> None:
    room.put(2, DELTA, room.bytes_of(2, DELTA)[:-7])


def other_shape(room: Room) -> None:
    """The delta's tensors are of another model's shapes."""
    tensors = {name: torch.zeros(3, dtype=torch.bfloat16) for name in load_file(room.folders[1] / WEIGHTS)}
    changed = {name: tensor + 1 for name, tensor in tensors.items()}
    room.put(2, DELTA, encode_delta(tensors, changed, digests=(room.digests[1], room.digests[2])))


def other_kind(room: Room) -> None:
    """The delta's tensors are of another kind."""
    tensors = {name: tensor.half() for name, tensor in load_file(room.folders[1] / WEIGHTS).items()}
    changed = {name: tensor + 1 for name, tensor in tensors.items()}
    room.put(2, DELTA, encode_delta(tensors, changed, digests=(room.digests[1], room.digests[2])))


def other_digest(room: Room) -> None:
    """A delta that fits, and leads to other weights than it says."""
    tensors = load_file(room.folders[1] / WEIGHTS)
    changed = {name: tensor * 3 if tensor.dim() == 1 else tensor for name, tensor in tensors.items()}
    room.put(2, DELTA, encode_delta(tensors, changed, digests=(room.digests[1], room.digests[2])))


def no_chain(room: Room) -> None:
    """Everything below the delta is gone, and there is no keyframe."""
    memory = fsspec.filesystem("memory")
    for index in (0, 1):
        memory.rm(room.place(index, "").rstrip("/"), recursive=True)


@pytest.mark.parametrize(
    ("fault", "cure"),
    [
        (another_base, "publish them again"),
        (cut_off, "fetch it again, or load a keyframe"),
        (other_shape, "fetch it again, or load a keyframe"),
        (other_kind, "fetch it again, or load a keyframe"),
        (other_digest, "fetch it again, or load a keyframe"),
        (no_chain, "publish them again"),
    ],
)
def test_a_delta_that_leads_nowhere_is_refused_with_the_cure(room: Room, fault: Callable[[Room], None], cure: str, tmp_path: Path) -> None:
    base, _, digest = room.digests
    with engine(RemoteWeights(room.url, cache=tmp_path / "engine"), base, load=Loads()) as running:
        fault(room)
        shutil.rmtree(tmp_path / "engine" / base)
        assert cure in refused(running, digest)
        assert is_of(load_policy(room.folders[0], dtype=torch.float32), asyncio.run(ask(request(base), running.url)))


def truncated(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2])


def foreign(folder: Path) -> None:
    """An architecture that nobody here knows."""
    tensors = load_file(folder / WEIGHTS)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 2
    again(folder, tensors)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "unheard_of", "architectures": ["UnheardOf"]}))


def wider(folder: Path) -> None:
    """Tensors of other shapes than the configuration's."""
    tensors = {name: torch.cat([tensor, tensor]) for name, tensor in load_file(folder / WEIGHTS).items()}
    again(folder, tensors)


def lacking(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors.pop("model.norm.weight")
    again(folder, tensors)


def again(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    (folder / READY).unlink()
    finish_snapshot(folder, tensors)


def unknown_kind(folder: Path) -> None:
    """A safetensors file of a kind that this version does not know."""
    tensors = load_file(folder / WEIGHTS)
    save_file(tensors, folder / WEIGHTS)
    raw = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(raw.replace(b'"BF16"', b'"F4E2"'))
    (folder / READY).write_text(digest_of_file(folder / WEIGHTS) + "\n")


def damaged(folder: Path) -> None:
    """A bit that READY knows nothing of."""
    raw = bytearray((folder / WEIGHTS).read_bytes())
    raw[-1] ^= 1
    (folder / WEIGHTS).write_bytes(raw)


@pytest.mark.parametrize(
    ("fault", "cure"),
    [
        (truncated, "publish the snapshot again"),
        (foreign, "serve it on vLLM or SGLang"),
        (wider, "make the snapshot again"),
        (lacking, "make the snapshot again"),
        (unknown_kind, "make the snapshot again"),
        (damaged, "make it again"),
    ],
)
def test_a_snapshot_that_is_no_model_of_ours_is_refused_with_the_cure(
    tiny_model: Path, tmp_path: Path, fault: Callable[[Path], None], cure: str
) -> None:
    store = LocalWeights(tmp_path / "store")
    base = store.publish(tiny_model)
    bad = tmp_path / "bad"
    shutil.copytree(tiny_model, bad)
    fault(bad)
    digest = (bad / READY).read_text().strip()
    digest = digest if digest != base else "b" * 64
    shutil.copytree(bad, store.root / digest)  # past the store's own look, as somebody's upload would come
    with engine(store, base, load=Loads()) as running:
        assert cure in refused(running, digest)
        assert is_of(load_policy(tiny_model, dtype=torch.float32), asyncio.run(ask(request(base), running.url)))
