"""One suite over every WeightStore."""

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from safetensors.torch import load_file

from app.domain.errors import BadConfig, BadInput, NotFound
from app.domain.ports import WeightStore
from app.policy.storage.remote import RemoteWeights, open_store
from app.policy.storage.remote_files import RemoteFiles
from app.policy.storage.snapshot import HEAD_RECORD, snapshot_digest, verify_snapshot, write_snapshot
from app.policy.storage.store import LocalWeights


@pytest.fixture(params=["local", "remote"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WeightStore]:
    if request.param == "local":
        yield LocalWeights(tmp_path / "weights")
        return
    import fsspec

    url = f"memory://bucket-{uuid4().hex}/weights"
    yield RemoteWeights(url, cache=tmp_path / "cache")
    fsspec.filesystem("memory").store.clear()


def test_a_published_snapshot_is_found_whole_under_its_digest(store: WeightStore, tiny_model: Path) -> None:
    digest = store.publish(tiny_model)
    assert digest == snapshot_digest(tiny_model)
    assert store.exists(digest)
    assert verify_snapshot(store.path(digest)) == digest
    assert {f.name for f in store.path(digest).iterdir()} == {f.name for f in tiny_model.iterdir()}


def test_publishing_again_changes_nothing_and_the_source_stays(store: WeightStore, tiny_model: Path) -> None:
    digest = store.publish(tiny_model)
    assert store.publish(tiny_model) == digest
    assert verify_snapshot(tiny_model) == digest


def test_a_file_beside_a_version_is_added_replaced_and_taken_away_and_changes_no_digest(
    store: LocalWeights | RemoteWeights, tiny_model: Path
) -> None:
    digest = store.publish(tiny_model)
    assert store.read_beside(digest, HEAD_RECORD) is None
    for content in (b"first", b"second"):
        store.put_beside(digest, HEAD_RECORD, content)
        assert store.read_beside(digest, HEAD_RECORD) == content
    assert verify_snapshot(store.path(digest)) == digest
    store.take_beside(digest, HEAD_RECORD)
    store.take_beside(digest, HEAD_RECORD)
    assert store.read_beside(digest, HEAD_RECORD) is None
    store.put_beside(digest, HEAD_RECORD, b"third")
    store.remove(digest)
    assert store.read_beside(digest, HEAD_RECORD) is None, "it goes with its version"
    with pytest.raises(NotFound, match="weights"):
        store.put_beside(digest, HEAD_RECORD, b"fourth")


def test_what_lies_beside_a_version_is_not_fetched_with_its_weights(tiny_model: Path, tmp_path: Path) -> None:
    import fsspec

    url = f"memory://bucket-{uuid4().hex}/weights"
    digest = RemoteWeights(url, cache=tmp_path / "one").publish(tiny_model)
    RemoteWeights(url, cache=tmp_path / "one").put_beside(digest, HEAD_RECORD, b"{}")
    other = RemoteWeights(url, cache=tmp_path / "two")
    assert {file.name for file in other.path(digest).iterdir()} == {file.name for file in tiny_model.iterdir()}
    assert other.read_beside(digest, HEAD_RECORD) == b"{}"
    fsspec.filesystem("memory").store.clear()


def test_what_was_never_published_is_not_found(store: WeightStore) -> None:
    assert not store.exists("0" * 64)
    assert not store.exists("")
    with pytest.raises(NotFound, match="publish"):
        store.path("0" * 64)


def test_a_damaged_snapshot_is_refused_and_leaves_nothing(store: WeightStore, tiny_model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_model, tmp_path / "copy"))
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"ruin")
    with pytest.raises(BadInput, match="damaged"):
        store.publish(copy)
    assert not store.exists(snapshot_digest(tiny_model))


def test_an_unfinished_snapshot_is_refused(store: WeightStore, tiny_model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_model, tmp_path / "copy"))
    (copy / "READY").unlink()
    with pytest.raises(NotFound):
        store.publish(copy)


def test_several_publishers_of_the_same_weights_agree(store: WeightStore, tiny_model: Path) -> None:
    digests: list[str] = []
    threads = [threading.Thread(target=lambda: digests.append(store.publish(tiny_model))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert digests == [snapshot_digest(tiny_model)] * 6
    assert verify_snapshot(store.path(digests[0])) == digests[0]


def test_a_killed_publisher_leaves_nothing_that_is_read_and_its_rest_is_swept(tiny_model: Path, tmp_path: Path) -> None:
    store = LocalWeights(tmp_path / "weights")
    digest = snapshot_digest(tiny_model)
    shutil.copytree(tiny_model, store.root / f".{digest}.dead.incoming")
    assert not store.exists(digest)
    assert store.sweep() == 1
    assert store.publish(tiny_model) == digest


def test_remote_weights_are_downloaded_once(tiny_model: Path, tmp_path: Path) -> None:
    import fsspec

    url = f"memory://bucket-{uuid4().hex}/weights"
    digest = RemoteWeights(url, cache=tmp_path / "one").publish(tiny_model)
    reader = RemoteWeights(url, cache=tmp_path / "two")
    path = reader.path(digest)
    fsspec.filesystem("memory").store.clear()
    assert reader.path(digest) == path


def lineage(tiny_model: Path, tmp_path: Path, length: int) -> list[Path]:
    """Snapshots, each trained a little from the one before."""
    folders = [tiny_model]
    for step in range(length):
        tensors = load_file(folders[-1] / "model.safetensors")
        tensors["lm_head.weight"][step] += 0.25
        write_snapshot(tmp_path / f"v{step}", tensors, like=folders[-1])
        folders.append(tmp_path / f"v{step}")
    return folders


def test_trained_versions_travel_as_deltas_and_keyframes_follow(tiny_model: Path, tmp_path: Path) -> None:
    import fsspec

    url = f"memory://bucket-{uuid4().hex}/weights"
    folders = lineage(tiny_model, tmp_path, 5)
    writer = RemoteWeights(url, cache=tmp_path / "one", keyframe_every=3)
    digests: list[str] = []
    for folder in folders:
        digests.append(writer.publish(folder))
        writer.settle()
    files = fsspec.filesystem("memory").find(url.removeprefix("memory:/"))
    assert [any(f"{digest}/model.delta" in file for file in files) for digest in digests] == [False, True, True, True, True, True]
    assert [any(f"{digest}/KEYFRAME" in file for file in files) for digest in digests] == [False, False, False, True, False, False]
    reader = RemoteWeights(url, cache=tmp_path / "two")
    assert verify_snapshot(reader.path(digests[5])) == digests[5]
    assert {file.name for file in reader.path(digests[5]).iterdir()} == {file.name for file in folders[5].iterdir()}
    assert not reader._cache.exists(digests[2]), "the keyframe was the nearest"
    assert writer.built_on(digests[3]) == set()


def test_a_broken_delta_is_gone_round_where_a_keyframe_is(tiny_model: Path, tmp_path: Path) -> None:
    import fsspec

    url = f"memory://bucket-{uuid4().hex}/weights"
    writer = RemoteWeights(url, cache=tmp_path / "one", keyframe_every=1)
    digests = [writer.publish(folder) for folder in lineage(tiny_model, tmp_path, 2)]
    writer.settle()
    memory, root = fsspec.filesystem("memory"), url.removeprefix("memory:/")
    reader = RemoteWeights(url, cache=tmp_path / "two")
    reader.path(digests[0])
    memory.pipe_file(f"{root}/{digests[1]}/model.delta", b"RATCHETD2")
    assert verify_snapshot(reader.path(digests[1])) == digests[1]
    memory.pipe_file(f"{root}/{digests[2]}/model.safetensors", b"x")
    assert verify_snapshot(reader.path(digests[2])) == digests[2]


def test_the_same_weights_from_another_parent_are_published_whole(tiny_model: Path, tmp_path: Path) -> None:
    """Otherwise one publisher's delta could stand beside the other's parent."""
    url = f"memory://bucket-{uuid4().hex}/weights"
    _, one, two = lineage(tiny_model, tmp_path, 2)
    writer = RemoteWeights(url, cache=tmp_path / "one")
    writer.publish(tiny_model)
    writer.publish(one)
    writer._files.claim(snapshot_digest(two), "PARENT", snapshot_digest(tiny_model).encode() + b"\n")
    digest = writer.publish(two)
    assert verify_snapshot(RemoteWeights(url, cache=tmp_path / "two").path(digest)) == digest
    assert "model.delta" not in writer._files.names(digest)


class CutOff:
    """A storage that nobody reaches any more from its n-th operation on."""

    def __init__(self, files: Any, after: int) -> None:
        self._files, self._left = files, after

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._files, name)
        if name not in ("put_file", "pipe_file", "rm_file", "cat_file"):
            return found

        def act(*given: Any, **more: Any) -> Any:
            self._left -= 1
            if self._left < 0:
                raise OSError("the storage is away")
            return found(*given, **more)

        return act


def test_a_version_is_seen_whole_or_not_at_all_wherever_its_publisher_was_cut_off(tiny_model: Path, tmp_path: Path) -> None:
    """Before each operation of publishing a delta with its keyframe; what is seen is read, and publishing again mends the rest."""
    seen: list[bool] = []
    _, parent, child = lineage(tiny_model, tmp_path, 2)
    while not seen or not seen[-1]:
        after, url = len(seen), f"memory://bucket-{uuid4().hex}/weights"
        whole = RemoteWeights(url, cache=tmp_path / f"whole-{after}")
        whole.publish(tiny_model)
        whole.publish(parent)
        cut = RemoteWeights(url, cache=tmp_path / f"cut-{after}", keyframe_every=2, wrap=lambda files, after=after: CutOff(files, after))
        with suppress(OSError):
            cut.publish(child)
            cut.settle()
        reader, digest = RemoteWeights(url, cache=tmp_path / f"reader-{after}"), snapshot_digest(child)
        if reader.exists(digest):
            assert verify_snapshot(reader.path(digest)) == digest
        seen.append("KEYFRAME" in cut._files.names(digest))
        assert whole.publish(child) == digest
        assert verify_snapshot(RemoteWeights(url, cache=tmp_path / f"again-{after}").path(digest)) == digest
    assert len(seen) > 8, "it was cut off in many places"


def test_a_name_is_written_once(tmp_path: Path) -> None:
    for url, promises in ((f"memory://bucket-{uuid4().hex}/w", True), (f"local://{tmp_path}/w", True)):
        files = RemoteFiles(url)
        assert files.writes_once is promises
        assert files.claim("d", "READY", b"1") == b"1"
        assert files.claim("d", "READY", b"2") == b"1"
        assert files.names("d") == ["READY"]


def test_a_delta_that_was_damaged_on_the_way_is_never_served(tiny_model: Path, tmp_path: Path) -> None:
    import fsspec

    url = f"memory://bucket-{uuid4().hex}/weights"
    folders = lineage(tiny_model, tmp_path, 1)
    writer = RemoteWeights(url, cache=tmp_path / "one")
    digest = [writer.publish(folder) for folder in folders][-1]
    memory = fsspec.filesystem("memory")
    place = f"{url.removeprefix('memory:/')}/{digest}/model.delta"
    memory.pipe_file(place, memory.cat_file(place)[:-40] + bytes(40))
    reader = RemoteWeights(url, cache=tmp_path / "two")
    with pytest.raises(BadInput, match="keyframe"):
        reader.path(digest)
    with pytest.raises(BadInput, match="keyframe"):
        reader.path(digest)


def test_a_storage_that_cannot_be_spoken_names_the_package(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="pip install s3fs"):
        open_store("s3://bucket/weights", cache=tmp_path)
    assert isinstance(open_store(str(tmp_path), cache=tmp_path), LocalWeights)


def test_a_delta_that_a_killed_publisher_left_hides_no_whole_snapshot(tiny_model: Path, tmp_path: Path) -> None:
    """Killed before READY, its parent cleared away, and the same weights published again, whole."""
    url = f"memory://bucket-{uuid4().hex}/weights"
    _, child = lineage(tiny_model, tmp_path, 1)
    writer = RemoteWeights(url, cache=tmp_path / "one")
    parent, digest = writer.publish(tiny_model), writer.publish(child)
    writer.take_beside(digest, "READY")
    writer.remove(parent)
    again = RemoteWeights(url, cache=tmp_path / "again")
    assert again.publish(child) == digest
    assert "model.delta" in again._files.names(digest)
    assert verify_snapshot(RemoteWeights(url, cache=tmp_path / "two").path(digest)) == digest
    assert again.built_on(digest) == set()
