"""Temporary folders of practice: below one folder for each process, which the next process removes where its owner was killed."""

import os
import shutil
import tempfile
import threading
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

PREFIX = "ratchet-practice-"
_making = threading.Lock()


@contextmanager
def scratched(name: str) -> Generator[Path]:
    """A fresh folder for as long as this lasts."""
    made = scratch(name)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def scratch(name: str) -> Path:
    """A fresh folder, which the users of boxes may enter; whoever asked removes it."""
    with _making:  # tries are threads, and a cache makes what several ask for at once several times
        root = _root(os.getpid())
    made = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=root))
    made.chmod(0o711)
    return made


@cache
def _root(process: int) -> Path:
    """This process's; those of processes that are gone go first. One whose number was given again is kept until that one is gone too."""
    parent = Path(tempfile.gettempdir())
    for folder in parent.glob(f"{PREFIX}*"):
        owner = folder.name.removeprefix(PREFIX)
        if owner.isdigit() and not Path(f"/proc/{owner}").exists() and folder.stat().st_uid == os.geteuid():
            shutil.rmtree(folder, ignore_errors=True)
    root = parent / f"{PREFIX}{process}"
    shutil.rmtree(root, ignore_errors=True)  # of an earlier process of our number
    root.mkdir(mode=0o711)
    return root
