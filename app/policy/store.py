"""Where versions lie: `WeightStore` as a folder of snapshots named by digest, and the same on any storage fsspec knows (S3, …).

On remote storage a version that says what it was trained from travels as a delta (`app.policy.delta`) to that parent, with a whole
snapshot (keyframe) every `KEYFRAME_EVERY` versions; readers rebuild it from the parent they have or fetch.
"""

import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from fsspec.core import url_to_fs
from safetensors.torch import load_file

from app.domain.errors import BadConfig, BadInput, NotFound
from app.durable import sync, sync_folder
from app.policy.delta import apply_delta, encode_delta, read_head
from app.policy.prune import adapter_base, base_of
from app.policy.snapshot import ADAPTER_CONFIG, PARENT, READY, WEIGHTS, finish_snapshot, snapshot_digest, verify_snapshot

DELTA = "model.delta"
KEYFRAME_EVERY = 20
"""Deltas of a published update are about 2 % of a snapshot, so a keyframe in twenty already is most of the traffic; a late joiner
applies nineteen of them at worst."""


class LocalWeights:
    """The `WeightStore` port on a local folder: `<root>/<digest>/`. Safe for several processes: whoever renames first wins."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, digest: str) -> Path:
        """Folder of a snapshot. Raises `NotFound`."""
        if not self.exists(digest):
            raise NotFound(f"the weights {digest[:12]} are not in {self.root}: publish them again, or correct RATCHET_WEIGHTS")
        return self.root / digest

    def exists(self, digest: str) -> bool:
        """Whether the snapshot is here, whole."""
        return bool(digest) and (self.root / digest / READY).is_file()

    def publish(self, folder: Path) -> str:
        """Take a finished snapshot in; the folder stays as it was. Durable when this returns; publishing again changes nothing.

        Files are linked where the disk is the same (a snapshot is never changed in place), else copied; every byte is verified
        first, synchronised before READY is, and nothing carries the digest as its name before it is whole.
        Raises `BadInput` for a damaged snapshot, `NotFound` for an unfinished one.
        """
        digest = verify_snapshot(folder)
        if self.exists(digest):
            return digest
        with _scratch(self.root, digest) as incoming:
            for file in sorted(folder.iterdir(), key=lambda file: file.name == READY):
                if file.is_file():
                    _link(file, incoming / file.name)
            sync_folder(incoming)
            self._place(incoming, digest)
        return digest

    def _place(self, incoming: Path, digest: str) -> None:
        try:
            incoming.rename(self.root / digest)
        except OSError:
            if not self.exists(digest):
                raise
        sync(self.root)

    def ages_s(self) -> dict[str, float]:
        """Seconds since each version came, by digest."""
        return {ready.parent.name: time.time() - ready.stat().st_mtime for ready in self.root.glob(f"*/{READY}")}

    def built_on(self, digest: str) -> set[str]:
        """The base below its adapter; whole snapshots need nothing else to be read."""
        return adapter_base(self.root / digest / ADAPTER_CONFIG)

    def remove(self, digest: str) -> None:
        """Take a version away: out of sight at once, then its files."""
        outgoing = self.root / f".{digest}.{uuid.uuid4().hex[:8]}.incoming"  # what is left of it if we are killed, `sweep` takes
        try:
            (self.root / digest).rename(outgoing)
        except FileNotFoundError:
            return
        shutil.rmtree(outgoing, ignore_errors=True)

    def sweep(self) -> int:
        """Remove what a killed publisher left; returns how many. Only for one that knows no other publisher is running."""
        leftovers = list(self.root.glob(".*.incoming"))
        for leftover in leftovers:
            shutil.rmtree(leftover, ignore_errors=True)
        return len(leftovers)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without links
        shutil.copyfile(source, target)


class RemoteWeights:
    """The `WeightStore` port on a URL fsspec understands (`s3://bucket/prefix`, `memory://…`), with a local cache of what was fetched."""

    def __init__(self, url: str, *, cache: Path, keyframe_every: int = KEYFRAME_EVERY) -> None:
        try:
            self._fs, self._root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            protocol = url.split("://")[0]
            package = "s3fs" if protocol == "s3" else f"fsspec's package for {protocol}"
            raise BadConfig(f"RATCHET_WEIGHTS is {url!r} and this installation cannot speak {protocol}: pip install {package}") from error
        self._url = url
        self._cache = LocalWeights(cache)
        self._keyframe_every = keyframe_every

    def path(self, digest: str) -> Path:
        """Local folder of a snapshot, downloaded and verified if it is not in the cache. Raises `NotFound`, `BadInput` (damaged)."""
        if self._cache.exists(digest):
            return self._cache.path(digest)
        if not self.exists(digest):
            raise NotFound(f"the weights {digest[:12]} are not at {self._url}: publish them again, or correct RATCHET_WEIGHTS")
        with _scratch(self._cache.root, digest) as incoming:
            for remote in self._fs.ls(f"{self._root}/{digest}", detail=False):
                self._fs.get_file(remote, str(incoming / remote.rsplit("/", 1)[-1]))
            if (incoming / DELTA).is_file():
                self._rebuild(incoming)
            if (found := self._cache.publish(incoming)) != digest:
                raise BadInput(f"{self._url}/{digest} holds the weights {found[:12]}: delete it and publish the version again")
        return self._cache.path(digest)

    def publish(self, folder: Path) -> str:
        """Verify and upload a snapshot, READY last, as a delta where its parent is there; publishing again uploads nothing."""
        digest = self._cache.publish(folder)
        if self.exists(digest):
            return digest
        with _scratch(self._cache.root, digest) as outgoing:
            weights = self._as_delta(folder, outgoing) or folder / WEIGHTS
            others = [file for file in folder.iterdir() if file.is_file() and file.name not in (WEIGHTS, READY)]
            for file in [*others, weights, folder / READY]:
                self._fs.put_file(str(file), f"{self._root}/{digest}/{file.name}")
        return digest

    def exists(self, digest: str) -> bool:
        """Whether the version is there, whole."""
        # what another process added must be seen: fsspec caches listings
        self._fs.invalidate_cache()
        return bool(digest) and bool(self._fs.exists(f"{self._root}/{digest}/{READY}"))

    def ages_s(self) -> dict[str, float]:
        """Seconds since each version was published, by digest; what the storage does not date is new."""
        self._fs.invalidate_cache()
        now, ages = time.time(), dict[str, float]()
        for ready in self._fs.glob(f"{self._root}/*/{READY}"):
            dated = self._fs.info(ready)
            made = dated.get("LastModified") or dated.get("created") or dated.get("mtime")
            seconds = made.timestamp() if isinstance(made, datetime) else made
            ages[ready.rsplit("/", 2)[-2]] = max(0.0, now - float(seconds)) if seconds is not None else 0.0
        return ages

    def built_on(self, digest: str) -> set[str]:
        """The parent of a delta, and the base below an adapter."""
        folder, found = f"{self._root}/{digest}", set[str]()
        if self._fs.exists(f"{folder}/{DELTA}"):
            found.add(self._fs.cat_file(f"{folder}/{PARENT}").decode().strip())
        if self._fs.exists(f"{folder}/{ADAPTER_CONFIG}"):
            found |= base_of(self._fs.cat_file(f"{folder}/{ADAPTER_CONFIG}"))
        return found

    def remove(self, digest: str) -> None:
        """Take a version away, READY first, so that nobody begins to read what is going; from the cache as well."""
        for file in (READY, *(name.rsplit("/", 1)[-1] for name in self._fs.ls(f"{self._root}/{digest}", detail=False))):
            with suppress(FileNotFoundError):
                self._fs.rm_file(f"{self._root}/{digest}/{file}")
        with suppress(OSError):  # object stores have no folders
            self._fs.rmdir(f"{self._root}/{digest}")
        self._cache.remove(digest)

    def _as_delta(self, folder: Path, outgoing: Path) -> Path | None:
        """The snapshot as a delta file to its parent; None where it has none here, or a keyframe is due."""
        parent = (folder / PARENT).read_text().strip() if (folder / PARENT).is_file() else ""
        if not self.exists(parent) or self._depth(parent) + 1 >= self._keyframe_every:
            return None
        delta = encode_delta(load_file(self.path(parent) / WEIGHTS), load_file(folder / WEIGHTS))
        (outgoing / DELTA).write_bytes(delta)
        return outgoing / DELTA

    def _depth(self, digest: str) -> int:
        """Number of deltas between a version and the keyframe below it."""
        depth = 0
        while self._fs.exists(f"{self._root}/{digest}/{DELTA}"):
            digest = self._fs.cat_file(f"{self._root}/{digest}/{PARENT}").decode().strip()
            depth += 1
        return depth

    def _rebuild(self, incoming: Path) -> None:
        """Turn a downloaded delta into a snapshot, from its parent (fetched as well if need be)."""
        delta = (incoming / DELTA).read_bytes()
        base = self.path(read_head(delta).base)
        tensors = apply_delta(load_file(base / WEIGHTS), delta, base_digest=snapshot_digest(base))
        (incoming / DELTA).unlink()
        (incoming / READY).unlink()
        finish_snapshot(incoming, tensors)


@contextmanager
def _scratch(root: Path, digest: str) -> Iterator[Path]:
    """A folder for files on their way, removed afterwards; inside the cache, so that links work."""
    folder = root / f".{digest}.{uuid.uuid4().hex[:8]}.incoming"
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def open_store(url: str, *, cache: Path) -> LocalWeights | RemoteWeights:
    """The store at a folder or a URL; `cache` is used by the latter only."""
    if "://" not in url or url.startswith("file://"):
        return LocalWeights(Path(url.removeprefix("file://")))
    return RemoteWeights(url, cache=cache)
