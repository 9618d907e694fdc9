"""Where versions lie: `WeightStore` as a folder of snapshots named by digest. `app.policy.storage.remote` is the same on any storage."""

import os
import shutil
import time
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from app.domain.errors import NotFound
from app.domain.ports import Way
from app.durable import sync, sync_folder
from app.policy.storage.prune import adapter_base
from app.policy.storage.snapshot import ADAPTER_CONFIG, PARENT, PROBE, READY, verify_snapshot

FARTHEST = 20
"""Versions that an engine is patched over at most; loading a snapshot is quicker then."""


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
        first, synchronised before READY is, and nothing carries the digest as its name before it is whole. READY is always a copy:
        its time says when the version came here.
        Raises `BadInput` for a damaged snapshot, `NotFound` for an unfinished one.
        """
        digest = verify_snapshot(folder)
        if self.exists(digest):
            return digest
        with scratch(self.root, digest) as incoming:
            for file in sorted(folder.iterdir(), key=lambda file: file.name == READY):
                if file.name == READY:
                    shutil.copyfile(file, incoming / READY)
                elif file.is_file():
                    _link(file, incoming / file.name)
            sync_folder(incoming)
            self._place(incoming, digest)
        return digest

    def way(self, digest: str, held: Collection[str]) -> Way | None:
        """By comparison with the nearest ancestor that is held."""
        at = digest
        for _ in range(FARTHEST):
            if not self.exists(at) or not (self.root / at / PARENT).is_file():
                return None
            at = (self.root / at / PARENT).read_text().strip()
            if at in held:
                probe = self.root / digest / PROBE
                return Way(base=at, snapshot=self.root / digest, probe=probe.read_bytes() if probe.is_file() else None)
        return None

    def read_beside(self, digest: str, name: str) -> bytes | None:
        """A small file that lies beside a version's weights; None where there is none."""
        try:
            return (self.root / digest / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def put_beside(self, digest: str, name: str, content: bytes) -> None:
        """Put one there, or another in its place: whole or not at all, durable when this returns. Raises `NotFound` (no such version)."""
        folder = self.path(digest)
        incoming = folder / f".{name}.{uuid.uuid4().hex[:8]}"
        try:
            incoming.write_bytes(content)
            sync(incoming)
            incoming.rename(folder / name)
            sync(folder)
        except FileNotFoundError as error:
            raise NotFound(f"the weights {digest[:12]} were removed from {self.root} meanwhile: nothing is put beside them") from error
        finally:
            incoming.unlink(missing_ok=True)

    def take_beside(self, digest: str, name: str) -> None:
        """Take one away; harmless when it is not there."""
        (self.root / digest / name).unlink(missing_ok=True)

    def _place(self, incoming: Path, digest: str) -> None:
        try:
            incoming.rename(self.root / digest)
        except OSError:
            if not self.exists(digest):
                raise
        sync(self.root)

    def ages_s(self) -> dict[str, float]:
        """Seconds since each version came, by digest."""
        return {ready.parent.name: time.time() - ready.stat().st_mtime for ready in self.root.glob(f"[!.]*/{READY}")}

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

    def sweep(self, *, older_s: float = 0.0) -> int:
        """Remove what a killed publisher left so long ago; returns how many. Without an age only for one that knows no other publisher is
        running."""
        leftovers = [left for left in self.root.glob(".*.incoming") if max(0.0, time.time() - left.stat().st_mtime) >= older_s]
        for leftover in leftovers:
            shutil.rmtree(leftover, ignore_errors=True)
        return len(leftovers)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without links
        shutil.copyfile(source, target)


@contextmanager
def scratch(root: Path, digest: str) -> Iterator[Path]:
    """A folder for files on their way, removed afterwards; inside the cache, so that links work."""
    folder = root / f".{digest}.{uuid.uuid4().hex[:8]}.incoming"
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
