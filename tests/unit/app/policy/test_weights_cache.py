"""What a reader of remote weights keeps on its disk: what it asked for lately, and nothing that it only passed through."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import torch

from app.policy.model import load_policy
from app.policy.patching import LiveWeights, places_of
from app.policy.storage.remote import KEPT, UNASKED_S, RemoteWeights
from app.policy.storage.snapshot import READY, verify_snapshot
from app.policy.storage.weights import digest_of
from tests.ports.test_weight_store_port import lineage


@pytest.fixture
def url() -> Iterator[str]:
    import fsspec

    yield f"memory://cache-{uuid4().hex}/weights"
    fsspec.filesystem("memory").store.clear()


def published(url: str, tiny_model: Path, tmp_path: Path, length: int, *, keyframe_every: int = 20) -> list[str]:
    """The digests of a line of versions, each but the first a delta to the one before."""
    writer = RemoteWeights(url, cache=tmp_path / "publisher", keyframe_every=keyframe_every)
    digests = [writer.publish(folder) for folder in lineage(tiny_model, tmp_path, length)]
    writer.settle()
    return digests


def kept(cache: Path) -> set[str]:
    return {ready.parent.name for ready in cache.glob(f"*/{READY}")}


def asked_for(cache: Path, digest: str, *, ago_s: float) -> None:
    then = time.time() - ago_s
    os.utime(cache / digest / READY, (then, then))


def test_a_late_joiner_keeps_the_version_and_none_of_those_that_it_is_made_from(url: str, tiny_model: Path, tmp_path: Path) -> None:
    digests, cache = published(url, tiny_model, tmp_path, 5), tmp_path / "reader"
    reader = RemoteWeights(url, cache=cache)
    assert verify_snapshot(reader.path(digests[5])) == digests[5]
    assert kept(cache) == {digests[5]}
    assert [folder.name for folder in cache.iterdir()] == [digests[5]]
    assert {file.name for file in reader.path(digests[5]).iterdir()} == {file.name for file in (tmp_path / "v4").iterdir()}
    assert verify_snapshot(reader.path(digests[3])) == digests[3]
    assert kept(cache) == {digests[5], digests[3]}


def test_the_way_begins_at_what_is_in_the_cache_and_leaves_it_there(url: str, tiny_model: Path, tmp_path: Path) -> None:
    digests, cache = published(url, tiny_model, tmp_path, 4), tmp_path / "reader"
    reader, fetched = RemoteWeights(url, cache=cache), list[str]()
    reader.path(digests[2])
    get = reader._files.fetch
    reader._files.fetch = lambda digest, name, target: (fetched.append(digest), get(digest, name, target))[1]
    assert verify_snapshot(reader.path(digests[4])) == digests[4]
    assert kept(cache) == {digests[2], digests[4]}
    assert set(fetched) == {digests[3], digests[4]}


def test_what_nobody_asked_for_in_a_day_goes_when_something_new_comes_but_for_the_newest(
    url: str, tiny_model: Path, tmp_path: Path
) -> None:
    digests, cache = published(url, tiny_model, tmp_path, 8), tmp_path / "reader"
    reader = RemoteWeights(url, cache=cache)
    for digest in digests[:6]:
        reader.path(digest)
    for hours, digest in zip((60, 50, 40, 30, 20, 10), digests, strict=False):
        asked_for(cache, digest, ago_s=hours * 3600)
    reader.path(digests[0])
    assert len(kept(cache)) == 6, "nothing new came"
    reader.path(digests[8])
    assert kept(cache) == {digests[index] for index in (8, 0, 5, 4)}, "asked for now, and within the day"
    for digest in kept(cache):
        asked_for(cache, digest, ago_s=UNASKED_S)
    reader.path(digests[7])
    assert len(kept(cache)) == KEPT
    assert {digests[7], digests[5]} < kept(cache), "the version, and what it is made from"


def test_what_was_asked_for_today_stays_however_much_it_is(url: str, tiny_model: Path, tmp_path: Path) -> None:
    digests, cache = published(url, tiny_model, tmp_path, KEPT + 2), tmp_path / "reader"
    reader = RemoteWeights(url, cache=cache)
    for digest in digests:
        reader.path(digest)
        asked_for(cache, digest, ago_s=UNASKED_S - 60)
    assert kept(cache) == {*digests}


def test_a_publisher_s_cache_is_cleared_as_well(url: str, tiny_model: Path, tmp_path: Path) -> None:
    folders, cache = lineage(tiny_model, tmp_path, KEPT + 2), tmp_path / "publisher"
    writer = RemoteWeights(url, cache=cache)
    digests = [writer.publish(folder) for folder in folders[:-1]]
    for days, digest in enumerate(reversed(digests), start=1):
        asked_for(cache, digest, ago_s=days * UNASKED_S)
    digests.append(writer.publish(folders[-1]))
    assert kept(cache) == {*digests[-KEPT:]}
    assert writer.publish(folders[0]) == digests[0]
    assert digests[0] in kept(cache), "it counts as asked for"


def test_who_serves_a_version_that_is_let_go_of_serves_the_same_bits(url: str, tiny_model: Path, tmp_path: Path) -> None:
    digests, cache = published(url, tiny_model, tmp_path, KEPT + 1), tmp_path / "reader"
    reader = RemoteWeights(url, cache=cache)
    served = load_policy(reader.path(digests[0]), dtype=torch.bfloat16)
    for digest in digests[1:-1]:
        reader.path(digest)
    asked_for(cache, digests[0], ago_s=UNASKED_S)
    reader.path(digests[-1])
    assert digests[0] not in kept(cache)
    assert digest_of(LiveWeights(places_of(served.model))) == digests[0]
    assert verify_snapshot(reader.path(digests[0])) == digests[0], "asked for again it is fetched again"


def test_what_a_killed_process_left_goes_a_day_later_and_what_is_under_way_does_not(url: str, tiny_model: Path, tmp_path: Path) -> None:
    digests, cache = published(url, tiny_model, tmp_path, 2), tmp_path / "reader"
    reader = RemoteWeights(url, cache=cache)
    reader.path(digests[0])
    half_made, under_way = (cache / f".{digests[1]}.{name}.incoming" for name in ("dead", "busy"))
    for folder in (half_made, under_way):
        shutil.copytree(tiny_model, folder)
        os.utime(folder)
    then = time.time() - UNASKED_S
    os.utime(half_made, (then, then))
    half_removed = cache / f".{digests[0]}.gone.incoming"
    (cache / digests[0]).rename(half_removed)
    os.utime(half_removed, (then, then))
    assert verify_snapshot(reader.path(digests[2])) == digests[2]
    assert {folder.name for folder in cache.iterdir()} == {digests[2], under_way.name}
    assert verify_snapshot(reader.path(digests[0])) == digests[0]


def test_a_cache_that_nobody_may_clear_is_read_all_the_same(url: str, tiny_model: Path, tmp_path: Path) -> None:
    digests, cache = published(url, tiny_model, tmp_path, KEPT + 2), tmp_path / "reader"
    reader = RemoteWeights(url, cache=cache)
    for digest in digests[:-1]:
        reader.path(digest)
        asked_for(cache, digest, ago_s=2 * UNASKED_S)

    def refuse(digest: str) -> None:
        raise PermissionError(digest)

    reader._cache.remove = refuse
    assert verify_snapshot(reader.path(digests[-1])) == digests[-1]
    assert kept(cache) == {*digests}
