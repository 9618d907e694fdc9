"""The `WeightStore` port on any storage fsspec knows (S3, …): versions as deltas to what they were trained from, and keyframes between.

    <root>/<digest>/  the small files of a snapshot, PARENT, PROBE.json
                      model.delta        to the parent, where the version has one here; else model.safetensors
                      READY              last: the version is visible when, and only when, all of it is there
                      model.safetensors, KEYFRAME    every `KEYFRAME_EVERY` versions, uploaded behind the publisher's back

A version's deltas lead through its parents to a keyframe: each policy's line is a chain of its own. A reader makes what it asks for from
the nearest that it has, and takes another way where one is broken; the digest decides what is right. Names are written once where
the storage can promise that (`RemoteFiles.claim`).

A reader's cache holds what was asked for and nothing that was only passed on the way there; what nobody asks for any more goes when
something new comes. A cache may be shared by processes, each of which may be killed at any moment.
"""

import logging
import os
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType] - its PathLike has no parameter

from app.domain.errors import BadInput, NotFound, RatchetError, Refused, Unavailable
from app.domain.ports import Way
from app.policy.storage.delta import apply_delta, encode_delta, read_base, read_head
from app.policy.storage.prune import base_of
from app.policy.storage.remote_files import RemoteFiles, folder_at, is_url
from app.policy.storage.snapshot import (
    ADAPTER_CONFIG,
    HEAD,
    HEAD_RECORD,
    PARENT,
    PROBE,
    READY,
    WEIGHTS,
    finish_snapshot,
    snapshot_digest,
    verify_snapshot,
)
from app.policy.storage.store import FARTHEST, LocalWeights, scratch

log = logging.getLogger(__name__)

DELTA = "model.delta"
KEYFRAME = "KEYFRAME"
"""Says that model.safetensors is whole, in a folder that has a delta too."""
KEYFRAME_EVERY = 20
"""Deltas of a published update are about 2 % of a snapshot, so a keyframe in twenty already is most of the traffic; a late joiner
applies nineteen of them at worst."""
CURE = "delete it there and publish the version again"
KEPT = 4
"""Versions that stay in a cache however long ago they were asked for: as many as an engine holds, and the one it makes."""
UNASKED_S = 86_400.0
"""From when on all others go: an update works with the files of its parent, its base and its anchor for hours and asks for them once."""


class RemoteWeights:
    """A URL (`s3://bucket/prefix`, `memory://…`) with a local cache of what was fetched."""

    def __init__(
        self, url: str, *, cache: Path, keyframe_every: int = KEYFRAME_EVERY, wrap: Callable[[Any], Any] = lambda files: files
    ) -> None:
        self._files = RemoteFiles(url, wrap=wrap)
        self._cache = LocalWeights(cache)
        self._keyframe_every = keyframe_every
        self._behind = ThreadPoolExecutor(max_workers=1, thread_name_prefix="keyframes")
        self._uploading: list[Future[None]] = []

    # --- reading --------------------------------------------------------------------------------------------------------------------

    def path(self, digest: str) -> Path:
        """Local folder of a snapshot, downloaded and verified if it is not in the cache. Raises `NotFound`, `BadInput` (damaged),
        `Unavailable` (the storage does not answer)."""
        if (cached := self._cached(digest)) is not None:
            return cached
        with self._made(digest, take=self._cache.publish):
            self._let_go()
        return self._cache.path(digest)

    def exists(self, digest: str) -> bool:
        """Whether the version is there, whole."""
        return self._files.exists(digest, READY)

    def way(self, digest: str, held: Collection[str]) -> Way | None:
        """By the deltas since the nearest ancestor that is held; nothing is fetched but them."""
        if self._cached(digest) is not None:
            return self._cache.way(digest, held)
        at, deltas = digest, list[bytes]()
        while at not in held:
            if len(deltas) >= FARTHEST or not self.exists(at) or not self._files.exists(at, DELTA):
                return None
            deltas.insert(0, self._files.read(at, DELTA))
            at = read_head(deltas[0]).base
        probe = self._files.read(digest, PROBE) if self._files.exists(digest, PROBE) else None
        return Way(base=at, deltas=tuple(deltas), probe=probe)

    def _cached(self, digest: str) -> Path | None:
        """The version's folder in the cache, asked for now; None where it is not there."""
        with suppress(OSError):  # removed just now, or in a cache that is not ours to write to
            os.utime(self._cache.root / digest / READY)
        return self._cache.path(digest) if self._cache.exists(digest) else None

    @contextmanager
    def _made(self, digest: str, *, take: Callable[[Path], str] = verify_snapshot) -> Iterator[Path]:
        """The version in a folder that goes when the block ends; `take` says what is in it. Raises as `path` does."""
        if not self.exists(digest):
            raise NotFound(f"the weights {digest[:12]} are not at {self._files.url}: publish them again, or correct RATCHET_WEIGHTS")
        faults: list[str] = []
        for make in self._ways_to(digest):
            with scratch(self._cache.root, digest) as incoming:
                try:
                    make(digest, incoming)
                    if (found := take(incoming)) != digest:
                        raise BadInput(f"{self._files.url}/{digest} holds the weights {found[:12]}: {CURE}")
                except Unavailable:  # nothing is wrong with what is there
                    raise
                except (RatchetError, OSError) as error:
                    log.warning("weights not fetched digest=%s error=%s", digest, error)
                    faults.append(str(error))
                    continue
                yield incoming
                return
        raise BadInput("; ".join(dict.fromkeys(faults)) or f"{self._files.url}/{digest} has no weights: {CURE}")

    def _ways_to(self, digest: str) -> list[Callable[[str, Path], None]]:
        """The delta first where its base is at hand; the snapshot first where it is not."""
        names = set(self._files.names(digest))
        ways: list[Callable[[str, Path], None]] = []
        if DELTA in names:
            ways.append(self._by_delta)
        if WEIGHTS in names and (DELTA not in names or KEYFRAME in names):
            near = False
            with suppress(BadInput):
                near = DELTA in names and self._cache.exists(self._parent(digest))
            ways.insert(len(ways) if near else 0, self._by_snapshot)
        return ways

    def _by_snapshot(self, digest: str, incoming: Path) -> None:
        self._fetch(digest, incoming, without=(DELTA, KEYFRAME, HEAD, HEAD_RECORD))

    def _by_delta(self, digest: str, incoming: Path) -> None:
        """From its parent, which is made as well if need be, and not kept: nobody asked for it."""
        self._fetch(digest, incoming, without=(WEIGHTS, KEYFRAME, READY, HEAD, HEAD_RECORD))
        delta = (incoming / DELTA).read_bytes()
        cached = self._cached(parent := read_head(delta).base)
        with self._made(parent) if cached is None else nullcontext(cached) as base:
            tensors = apply_delta(load_file(base / WEIGHTS), delta, base_digest=snapshot_digest(base))
            (incoming / DELTA).unlink()
            finish_snapshot(incoming, tensors)

    def _fetch(self, digest: str, incoming: Path, *, without: Collection[str]) -> None:
        for name in self._files.names(digest):
            if name not in without:
                self._files.fetch(digest, name, incoming / name)

    def _let_go(self) -> None:
        """Of what nobody asked for in a day, but for the newest few, and of what killed processes left half made.

        Whoever has a file open or mapped has it until he closes it. What cannot be removed now is later.
        """
        with suppress(OSError):  # another process clears here too, or it is not ours to write to
            ages_s = self._cache.ages_s()
            for digest in sorted(ages_s, key=ages_s.__getitem__)[KEPT:]:
                if self._cache.ages_s().get(digest, 0.0) >= UNASKED_S:  # nobody asked meanwhile
                    self._cache.remove(digest)
                    log.info("weights let go of digest=%s", digest)
            self._cache.sweep(older_s=UNASKED_S)

    # --- writing --------------------------------------------------------------------------------------------------------------------

    def publish(self, folder: Path) -> str:
        """Verify and upload a snapshot, READY last, as a delta where its parent is there; publishing again uploads nothing.

        Where a keyframe is due it follows behind the caller's back (`settle` waits for it): nobody waits for it but late joiners.
        """
        digest = self._cache.publish(folder)
        self._cached(digest)
        self._let_go()
        if not self.exists(digest):
            self._upload(digest, folder)
        if self._files.exists(digest, DELTA) and self._depth(digest) >= self._keyframe_every:
            self._uploading = [task for task in self._uploading if not task.done()]
            self._uploading.append(self._behind.submit(self._add_keyframe, digest))
        return digest

    def settle(self) -> None:
        """Wait for the keyframes under way. Raises what kept one from being uploaded."""
        for task in self._uploading:
            task.result()

    def read_beside(self, digest: str, name: str) -> bytes | None:
        """A small file that lies beside a version's weights, as it is there now; None where there is none."""
        return self._files.read(digest, name) if self._files.exists(digest, name) else None

    def put_beside(self, digest: str, name: str, content: bytes) -> None:
        """Put one there, or another in its place. Raises `NotFound` (no such version)."""
        if not self.exists(digest):
            raise NotFound(f"the weights {digest[:12]} are not at {self._files.url}: nothing is put beside them")
        self._files.write(digest, name, content)

    def take_beside(self, digest: str, name: str) -> None:
        """Take one away; harmless when it is not there."""
        self._files.remove(digest, name)

    def _upload(self, digest: str, folder: Path) -> None:
        for file in sorted(folder.iterdir()):
            if file.is_file() and file.name not in (WEIGHTS, READY, PARENT, HEAD, HEAD_RECORD):
                self._files.put(digest, file)
        with scratch(self._cache.root, digest) as outgoing:
            delta = self._as_delta(digest, folder, outgoing)
            self._files.put(digest, delta or folder / WEIGHTS)
            # the parent may have been cleared away meanwhile, while nobody could know that it is built on; and a delta that a killed
            # publisher left behind would be read before the weights
            if self._files.exists(digest, DELTA) and (delta is None or not self.exists((folder / PARENT).read_text().strip())):
                self._add_keyframe(digest)
        self._files.claim(digest, READY, f"{digest}\n".encode())

    def _as_delta(self, digest: str, folder: Path, outgoing: Path) -> Path | None:
        """The snapshot as a delta file to its parent; None where it has none here, or somebody publishes the same weights from another."""
        said = (folder / PARENT).read_bytes() if (folder / PARENT).is_file() else b""
        parent = said.decode().strip()
        if said and self._files.claim(digest, PARENT, said) != said:
            return None
        if not self.exists(parent):
            return None
        try:
            weights = load_file(self.path(parent) / WEIGHTS), load_file(folder / WEIGHTS)
            delta = encode_delta(*weights, digests=(parent, digest))
        except (NotFound, BadInput, Refused) as error:  # the chain below is broken, or so much is new: a whole snapshot mends it
            log.warning("published whole digest=%s: %s", digest, error)
            return None
        (outgoing / DELTA).write_bytes(delta)
        return outgoing / DELTA

    def _add_keyframe(self, digest: str) -> None:
        self._files.put(digest, self._cache.path(digest) / WEIGHTS)
        self._files.claim(digest, KEYFRAME, f"{digest}\n".encode())
        log.info("keyframe uploaded digest=%s", digest)

    def _depth(self, digest: str) -> int:
        """Number of deltas between a version and the keyframe below it; as many as are too many where one of them cannot be read."""
        depth = 0
        while depth <= self._keyframe_every and self._files.exists(digest, DELTA) and not self._files.exists(digest, KEYFRAME):
            depth += 1
            try:
                digest = self._parent(digest)
            except BadInput:
                return self._keyframe_every
        return depth

    def _parent(self, digest: str) -> str:
        """The base of a version's delta, as the delta itself says."""
        return read_base(lambda start, stop: self._files.part(digest, DELTA, start, stop))

    # --- clearing -------------------------------------------------------------------------------------------------------------------

    def ages_s(self) -> dict[str, float]:
        """Seconds since each version was published, by digest; what the storage does not date is new."""
        fs = self._files.fs
        fs.invalidate_cache()
        found = [str(ready).rsplit("/", 2)[-2] for ready in fs.glob(f"{self._files.root}/*/{READY}")]
        return {digest: self._files.age_s(digest, READY) for digest in found}

    def built_on(self, digest: str) -> set[str]:
        """The parent of a delta that has no keyframe beside it, and the base below an adapter."""
        found: set[str] = set()
        if self._files.exists(digest, DELTA) and not self._files.exists(digest, KEYFRAME):
            found.add(self._parent(digest))
        if self._files.exists(digest, ADAPTER_CONFIG):
            found |= base_of(self._files.read(digest, ADAPTER_CONFIG))
        return found

    def remove(self, digest: str) -> None:
        """Take a version away, READY first, so that nobody begins to read what is going; from the cache as well."""
        for name in (READY, *self._files.names(digest)):
            self._files.remove(digest, name)
        with suppress(OSError):  # object stores have no folders
            self._files.fs.rmdir(f"{self._files.root}/{digest}")
        self._cache.remove(digest)


def open_store(url: str, *, cache: Path) -> LocalWeights | RemoteWeights:
    """The store at a folder or a URL; `cache` is used by the latter only."""
    return RemoteWeights(url, cache=cache) if is_url(url) else LocalWeights(folder_at(url))
