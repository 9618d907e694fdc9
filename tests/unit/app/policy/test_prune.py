"""What may be removed from a weight store, on a folder and on remote storage with deltas."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from app.policy.storage.prune import prune, with_bases
from app.policy.storage.remote import RemoteWeights
from app.policy.storage.snapshot import ADAPTER_CONFIG, READY, WEIGHTS, verify_snapshot, write_snapshot
from app.policy.storage.store import LocalWeights

Shelf = LocalWeights | RemoteWeights
Chain = Callable[[Shelf, int], list[str]]


@pytest.fixture
def chain(tiny_model: Path, tmp_path: Path) -> Chain:
    """Publish a base and so many versions, each made from the one before."""

    def make(shelf: Shelf, count: int) -> list[str]:
        digests, like = [shelf.publish(tiny_model)], tiny_model
        for number in range(count):
            tensors = load_file(like / WEIGHTS)
            name = sorted(tensors)[0]
            tensors[name] = tensors[name] + torch.full_like(tensors[name], 0.5)
            draft = tmp_path / f"draft-{number}-{shelf.__class__.__name__}"
            write_snapshot(draft, tensors, like=like)
            digests.append(shelf.publish(draft))
            like = draft
        return digests

    return make


def test_only_known_versions_that_nothing_needs_are_removed(tmp_path: Path, chain: Chain) -> None:
    shelf = LocalWeights(tmp_path / "store")
    base, one, two, three = chain(shelf, 3)
    gone = prune(shelf, known={base, one, two}, needed=lambda: {base}, min_age_s=0)
    assert sorted(gone) == sorted([one, two])
    assert [shelf.exists(digest) for digest in (base, one, two, three)] == [True, False, False, True]


def test_a_young_version_is_never_removed(tmp_path: Path, chain: Chain) -> None:
    shelf = LocalWeights(tmp_path / "store")
    base, one = chain(shelf, 1)
    os.utime(shelf.root / one / READY, (0, 0))
    assert prune(shelf, known={base, one}, needed=set, min_age_s=3600) == [one]
    assert shelf.exists(base)


def test_a_version_is_as_old_as_its_coming_and_not_as_the_folder_it_came_from(tmp_path: Path, tiny_model: Path) -> None:
    shelf, source = LocalWeights(tmp_path / "store"), tmp_path / "source"
    shutil.copytree(tiny_model, source)
    os.utime(source / READY, (0, 0))
    digest = shelf.publish(source)
    assert shelf.ages_s()[digest] < 3600
    os.utime(shelf.root / digest / READY, (1, 1))
    assert (source / READY).stat().st_mtime == 0, "what becomes of one is not what becomes of the other"


def test_a_version_that_is_wanted_while_others_go_stays(tmp_path: Path, chain: Chain) -> None:
    shelf = LocalWeights(tmp_path / "store")
    first, wanted, last = sorted(chain(shelf, 2))  # the order in which they go
    asked: list[int] = []

    def needed() -> set[str]:
        asked.append(1)
        return {wanted} if len(asked) > 2 else set()

    assert prune(shelf, known={first, wanted, last}, needed=needed, min_age_s=0) == [first, last]
    assert [shelf.exists(digest) for digest in (first, wanted, last)] == [False, True, False]


def test_nothing_goes_on_a_dry_run(tmp_path: Path, chain: Chain) -> None:
    shelf = LocalWeights(tmp_path / "store")
    digests = chain(shelf, 1)
    assert sorted(prune(shelf, known=digests, needed=set, min_age_s=0, dry=True)) == sorted(digests)
    assert all(shelf.exists(digest) for digest in digests)


def test_what_a_delta_and_an_adapter_are_built_on_is_kept(tmp_path: Path, chain: Chain) -> None:
    shelf = RemoteWeights(f"memory://prune-{tmp_path.name}", cache=tmp_path / "cache", keyframe_every=20)
    base, one, two, three = chain(shelf, 3)
    assert with_bases(shelf, [two]) == {base, one, two}
    assert prune(shelf, known={base, one, two, three}, needed=lambda: {two}, min_age_s=0) == [three]
    reader = RemoteWeights(f"memory://prune-{tmp_path.name}", cache=tmp_path / "other-cache")
    assert verify_snapshot(reader.path(two)) == two
    assert not reader.exists(three)
    local = LocalWeights(tmp_path / "cache")
    (local.root / two / ADAPTER_CONFIG).write_text(json.dumps({"ratchet": {"base": base}}))
    assert local.built_on(two) == {base}
