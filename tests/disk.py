"""What a process asks of the disk, in order: a power cut would tell whether it asked, and no test can have one."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

DEEDS = {os.fsync: "flush", os.replace: "rename"}


@contextmanager
def asked_of_the_disk(folder: Path) -> Iterator[list[tuple[str, list[str]]]]:
    """Every flush and rename of this thread in the block, each with the names that were in the folder when it began.

    Seen, not replaced: the interpreter tells of the calls (`sys.setprofile`).
    """
    seen: list[tuple[str, list[str]]] = []

    def tell(_: FrameType, event: str, called: object) -> None:
        if event == "c_call" and (deed := next((name for call, name in DEEDS.items() if call is called), None)):
            seen.append((deed, sorted(path.name for path in folder.iterdir())))

    usual = sys.getprofile()
    sys.setprofile(tell)
    try:
        yield seen
    finally:
        sys.setprofile(usual)
