"""States and checkpoints in object storage: sealed last, believed only whole, fetched by who needs them, compared where they are read."""

import json
import os
import pickle
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import fsspec
import pytest
import torch
from safetensors.torch import save_file

from app.domain.errors import BadConfig, DamagedState, Unavailable
from app.domain.ports import Trainer
from app.policy.storage.remote import RemoteWeights
from app.policy.storage.remote_files import RemoteFiles
from pipelines.training.elsewhere.node import NodeFiles
from pipelines.training.elsewhere.sealed import download
from pipelines.training.elsewhere.states import RemoteStates, open_states
from pipelines.training.elsewhere.storage import Storage
from pipelines.training.numerics.state_files import MANIFEST, Rows, StateFiles, digest_of
from pipelines.training.states import Inheritance, LocalStates
from tests.fakes.learning import small_snapshot
from tests.fakes.releases import version

FILES = [f"{stem}-{part:05d}-of-00002.safetensors" for stem in ("weights", "optimizer") for part in (1, 2)]
PLAIN: dict[str, Any] = {}


class Sending:
    """A trainer of two workers, whose state is a number: each sends its files through the files of its own machine."""

    def __init__(self, root: Path, number: float = 0.0, *, breaks: bool = False) -> None:
        self.root, self.number, self.breaks = root, number, breaks

    def save_state(self, place: str) -> dict[str, str]:
        digests: dict[str, str] = {}
        for part in (0, 1):
            with NodeFiles(self.root / f"node-{part}").sending(place, digests) as folder:
                for name in FILES[part::2]:
                    save_file({"w": torch.full((1, 2), self.number + part)}, folder / name)
            if self.breaks:
                raise Unavailable("a training worker was lost")
        return digests


@pytest.fixture
def url() -> Iterator[str]:
    """A bucket of one's own."""
    made = f"memory://states-{uuid.uuid4().hex}"
    yield made
    files = fsspec.filesystem("memory")
    if files.exists(made):
        files.rm(made, recursive=True)


@pytest.fixture
def states(url: str) -> RemoteStates:
    return RemoteStates(url)


def sender(root: Path, number: float = 0.0, *, breaks: bool = False) -> Trainer:
    return cast(Trainer, Sending(root, number, breaks=breaks))


def names(url: str, below: str) -> list[str]:
    """Of the folders below."""
    found = fsspec.filesystem("memory").ls(f"{url}/{below}", detail=False)
    return sorted(str(path).rsplit("/", 1)[-1] for path in found)


def spoil(place: str, name: str, content: bytes = b"something else") -> None:
    fsspec.filesystem("memory").pipe_file(f"{place}/{name}", content)


def test_the_newest_whole_checkpoint_is_found_and_older_and_unfinished_ones_go(tmp_path: Path, url: str, states: RemoteStates) -> None:
    assert states.newest_checkpoint("run").folder is None
    for step in (1, 2, 3):
        states.write_checkpoint("run", sender(tmp_path, step), {"next_step": step}, step=step)
    with pytest.raises(Unavailable):
        states.write_checkpoint("run", sender(tmp_path, 4, breaks=True), {"next_step": 4}, step=4)
    found = states.newest_checkpoint("run")
    assert (found.progress, found.damaged) == ({"next_step": 3}, ())
    assert str(found.folder).startswith(f"{url}/runs/run/checkpoint-00003-")
    assert [name[:16] for name in names(url, "runs/run")] == ["checkpoint-00002", "checkpoint-00003", "checkpoint-00004"]
    states.write_checkpoint("run", sender(tmp_path, 5), {"next_step": 5}, step=5)
    assert [name[:16] for name in names(url, "runs/run")] == ["checkpoint-00003", "checkpoint-00005"]
    assert list(states.begun()) == ["run"]
    states.end_run("run")
    assert states.newest_checkpoint("run").folder is None
    assert list(states.begun()) == []


def test_an_attempt_that_should_be_dead_writes_into_nothing_that_another_one_sealed(tmp_path: Path, url: str, states: RemoteStates) -> None:
    with pytest.raises(Unavailable):
        states.write_checkpoint("run", sender(tmp_path, 7, breaks=True), {"next_step": 1}, step=1)
    states.write_checkpoint("run", sender(tmp_path, 1), {"next_step": 1}, step=1)
    assert len(names(url, "runs/run")) == 1, "the unfinished one is gone"
    place = str(states.newest_checkpoint("run").folder)
    assert NodeFiles(tmp_path / "reader").state(place, [FILES[0], FILES[2]]).is_dir()


def test_a_worker_fetches_what_it_wrote_and_another_number_of_workers_everything(tmp_path: Path, states: RemoteStates) -> None:
    states.write_checkpoint("run", sender(tmp_path, 3), {}, step=1)
    place = str(states.newest_checkpoint("run").folder)
    second = NodeFiles(tmp_path / "second")
    folder = second.state(place, [FILES[1], FILES[3]])
    assert sorted(file.name for file in folder.iterdir()) == sorted([FILES[1], FILES[3]])
    with StateFiles(folder, "weights", own=FILES[1]) as own:
        assert own.read("w", Rows((2, 2), 1, 2)).tolist() == [[4.0, 4.0]]
    assert second.state(place, [FILES[1], FILES[3]]) == folder, "not fetched twice"
    alone = NodeFiles(tmp_path / "alone").state(place, ["weights.safetensors", "optimizer.safetensors"])
    with StateFiles(alone, "weights", own="weights.safetensors") as all_:
        assert all_.read("w", Rows((2, 2), 0, 2)).tolist() == [[3.0, 3.0], [4.0, 4.0]]
    second.close()
    assert not folder.exists()


def test_a_file_that_is_not_what_was_written_is_found_by_its_reader_and_the_state_set_aside(tmp_path: Path, states: RemoteStates) -> None:
    states.write_checkpoint("run", sender(tmp_path, 1), {"next_step": 1}, step=1)
    states.write_checkpoint("run", sender(tmp_path, 2), {"next_step": 2}, step=2)
    place = str(states.newest_checkpoint("run").folder)
    spoil(place, FILES[0])
    node = NodeFiles(tmp_path / "reader")
    assert NodeFiles(tmp_path / "other").state(place, [FILES[1], FILES[3]]).is_dir(), "whoever does not read it is not concerned"
    with pytest.raises(DamagedState, match=f"is damaged \\({FILES[0]}\\): it is set aside") as raised:
        node.state(place, [FILES[0], FILES[2]])
    travelled = pickle.loads(pickle.dumps(raised.value))
    assert (str(travelled), travelled.place) == (str(raised.value), place)
    states.set_aside(travelled.place)
    older = states.newest_checkpoint("run")
    assert (older.progress, older.damaged) == ({"next_step": 1}, (f"{place}/DAMAGED",))


def test_what_is_missing_and_what_is_another_thing_is_told_by_name(tmp_path: Path, url: str) -> None:
    files, folder = RemoteFiles(url), "sealed"
    (tmp_path / "to").mkdir()
    assert download(files, folder, ["a"], tmp_path / "to") == [MANIFEST]
    filesystem = fsspec.filesystem("memory")
    (tmp_path / "a").write_bytes(b"as written")
    filesystem.pipe_file(f"{url}/{folder}/{MANIFEST}", json.dumps(dict.fromkeys(("a", "b", "c"), digest_of(tmp_path / "a"))).encode())
    for name, content in (("a", b"as written"), ("b", b"something else"), ("d", b"as written")):
        filesystem.pipe_file(f"{url}/{folder}/{name}", content)
    assert download(files, folder, ["a", "b", "c", "d"], tmp_path / "to") == ["b", "c", "d"]
    assert download(files, folder, ["a"], tmp_path / "to") == []


def test_what_is_missing_or_changed_in_a_checkpoint_is_passed_over_by_name(tmp_path: Path, states: RemoteStates) -> None:
    for step in (1, 2):
        states.write_checkpoint("run", sender(tmp_path, step), {"next_step": step}, step=step)
    newest = str(states.newest_checkpoint("run").folder)
    fsspec.filesystem("memory").rm_file(f"{newest}/{FILES[2]}")
    older = states.newest_checkpoint("run")
    assert (older.progress, older.damaged) == ({"next_step": 1}, (f"{newest}/{FILES[2]}",))
    spoil(str(older.folder), "progress.json", b'{"next_step": 9}')
    none = states.newest_checkpoint("run")
    assert (none.folder, none.damaged) == (None, (f"{newest}/{FILES[2]}", f"{older.folder}/progress.json"))


def test_a_state_is_inherited_whole_and_by_training_of_the_same_kind(tmp_path: Path, url: str, states: RemoteStates) -> None:
    assert states.inherited(version("d0"), shape=PLAIN).kind is Inheritance.NEW
    place = states.keep(sender(tmp_path), policy="p", digest="d1", shape=PLAIN, base="snapshot")
    assert place.startswith(f"{url}/optimizer/p/d1-")
    parent = replace(version("d1"), optimizer_uri=place)
    found = states.inherited(parent, shape=PLAIN)
    assert (found.kind, found.start, found.base, found.loss) == (Inheritance.INHERITED, place, "snapshot", None)
    assert states.inherited(parent, shape={"rank": 4}).kind is Inheritance.OTHER
    gone = states.inherited(replace(parent, optimizer_uri=f"{url}/optimizer/p/d2-none"), shape=PLAIN)
    assert (gone.kind, gone.start) == (Inheritance.MISSING, None)
    assert states.inherited(replace(parent, optimizer_uri="memory://elsewhere/x"), shape=PLAIN).kind is Inheritance.MISSING
    fsspec.filesystem("memory").rm_file(f"{place}/{FILES[3]}")
    damaged = states.inherited(parent, shape=PLAIN)
    assert (damaged.kind, damaged.damaged) == (Inheritance.DAMAGED, (f"{place}/{FILES[3]}",))


def test_a_state_from_before_there_was_object_storage_is_brought_there(tmp_path: Path, url: str, states: RemoteStates) -> None:
    class Local:
        def save_state(self, folder: Path) -> dict[str, str]:
            folder.mkdir(parents=True)
            save_file({"w": torch.ones(1, 2)}, folder / "weights.safetensors")
            return {}

    place = LocalStates(tmp_path / "old").keep(cast(Trainer, Local()), policy="p", digest="d1", shape=PLAIN, base=None)
    found = states.inherited(replace(version("d1"), optimizer_uri=place), shape=PLAIN)
    assert found.kind is Inheritance.INHERITED
    assert str(found.start).startswith(f"{url}/optimizer/")
    fetched = NodeFiles(tmp_path / "node").state(str(found.start), ["weights.safetensors"])
    assert (fetched / "weights.safetensors").read_bytes() == (Path(place) / "weights.safetensors").read_bytes()


def test_pinned_states_and_the_newest_few_stay(tmp_path: Path, url: str, states: RemoteStates) -> None:
    for number in range(7):
        states.keep(sender(tmp_path), policy="p", digest=f"d{number}", shape=PLAIN, base=None)
    states.keep(sender(tmp_path), policy="q", digest="other", shape=PLAIN, base=None)
    states.forget("p", keep={"d0"})
    assert [name[:2] for name in names(url, "optimizer/p")] == ["d0", "d3", "d4", "d5", "d6"]
    assert len(names(url, "optimizer/q")) == 1
    states.forget("nobody's", keep=set())


def test_a_snapshot_is_fetched_by_its_digest_and_goes_when_nobody_asked_for_it_within_a_day(tmp_path: Path, url: str) -> None:
    digest = small_snapshot(tmp_path / "snapshot")
    RemoteWeights(url, cache=tmp_path / "publisher").publish(tmp_path / "snapshot")
    node = NodeFiles(tmp_path / "node")
    folder = node.snapshot(f"{url}/{digest}")
    assert folder == tmp_path / "node" / "weights" / digest
    assert node.snapshot(tmp_path) == tmp_path, "a folder is a folder"
    node.close()
    assert folder.is_dir()
    os.utime(folder / "READY", (0, 0))
    node.close()
    assert not folder.exists()


def test_storage_that_a_machine_does_not_reach_is_told_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(
        Unavailable, match=r"does not reach http://127.0.0.1:9/states/run.*give Ray's nodes the address and the credentials"
    ):
        NodeFiles(tmp_path).state("http://127.0.0.1:9/states/run", FILES[::2])


def test_scratch_of_a_killed_worker_goes_with_the_next_one(tmp_path: Path) -> None:
    left, own = tmp_path / "worker-999999999", tmp_path / f"worker-{os.getpid()}"
    for folder in (left, own):
        folder.mkdir()
    NodeFiles(tmp_path)
    assert (left.exists(), own.exists()) == (False, True)


def test_machines_that_share_no_folder_are_refused_without_object_storage() -> None:
    nodes = ["10.0.0.3"]
    Storage.of(weights="s3://b/weights", states="s3://b/states").require("head:6379", nodes)
    lacking = Storage.of(weights="s3://b/weights", states="/data/training")
    assert not lacking.is_reached_by_all
    with pytest.raises(BadConfig) as raised:
        lacking.require("head:6379", nodes)
    assert str(raised.value) == (
        "the Ray cluster at head:6379 trains on other machines (10.0.0.3), which do not see the folder of this one that "
        "RATCHET_STATES names: name object storage, such as RATCHET_STATES=s3://bucket/states"
    )
    with pytest.raises(BadConfig, match="the folders of this one that RATCHET_WEIGHTS and RATCHET_STATES name: name object storage"):
        Storage.of(weights="file:///w", states="/s").require("head:6379", nodes)


def test_whoever_is_named_beside_the_tensors_is_found(tmp_path: Path, url: str, states: RemoteStates) -> None:
    states.write_checkpoint("run", sender(tmp_path), {"authors": ["zoe"]}, step=1)
    assert [RemoteFiles(url).texts_with(words) for words in (b"zoe", b"max")] == [1, 0]


def test_where_states_lie_is_a_folder_or_a_url(tmp_path: Path, url: str) -> None:
    local = open_states(str(tmp_path))
    assert isinstance(local, LocalStates)
    assert local.folder == tmp_path
    assert isinstance(open_states(url), RemoteStates)
    with pytest.raises(BadConfig, match="RATCHET_STATES is 'nobody://x' and this installation cannot speak nobody"):
        open_states("nobody://x")


def test_a_manifest_that_cannot_be_read_is_damage(tmp_path: Path, states: RemoteStates) -> None:
    states.write_checkpoint("run", sender(tmp_path), {}, step=1)
    place = str(states.newest_checkpoint("run").folder)
    assert json.loads(fsspec.filesystem("memory").cat_file(f"{place}/MANIFEST")).keys() == {*FILES, "progress.json"}
    spoil(place, "MANIFEST")
    found = states.newest_checkpoint("run")
    assert (found.folder, len(found.damaged)) == (None, 1)
