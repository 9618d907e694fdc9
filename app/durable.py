"""Files that survive a power cut: contents and names have to reach the disk before anything refers to them."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Flush one file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Flush every file of a folder, and its list of names, to the disk."""
    for path in [*(path for path in folder.iterdir() if path.is_file()), folder]:
        sync(path)
