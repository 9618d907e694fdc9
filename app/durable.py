"""Files that survive a power cut: contents and names have to reach the disk before anything refers to them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def sync(path: Path) -> None:
    """Flush one file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing_file(path: Path) -> Iterator[Path]:
    """A file beside `path` to write, which takes its place when the block ends well; what was there stays as it is when it does not."""
    if path.exists() and not path.is_file():  # a pipe or a device has no place to be taken
        yield path
        return
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        sync(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush every file of a folder, and its list of names, to the disk."""
    for path in [*(path for path in folder.iterdir() if path.is_file()), folder]:
        sync(path)
