"""A long bench in pieces: what it has found lies in a file of JSON lines, and the next run goes on after it.

    make bench-learning ARGS="--resume build/learning.jsonl --minutes 5"      again and again, until it ends with its figures

Each line is one piece (`name`, `found`, and the digest of the code that found it). Pieces of other code are not mixed in: such a file is
refused.
"""

import argparse
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.architecture.sources import ROOT, python_files

COME_AGAIN = 75
"""Exit code of a run whose time was up before its last piece (EX_TEMPFAIL of sysexits.h)."""
ROOMS = (
    "app/policy", "app/domain/learning", "pipelines/training", "pipelines/labelling", "pipelines/batching", "tests/learning", "tests/fakes",
)  # fmt: skip
"""What the figures of learning depend on, next to the bench itself."""


class TimeIsUp(Exception):
    """There are pieces left; what was found is in the file."""


class Pieces:
    """What was found before, and what is found now; without a file nothing is kept, and time is never up."""

    def __init__(self, file: Path | None, *, minutes: float, code: str = "") -> None:
        self._file, self._code = file, code
        self._until = time.monotonic() + 60 * minutes
        self._held: dict[str, Any] = {}
        for line in file.read_text().splitlines() if file and file.exists() else []:
            row = json.loads(line)
            if row["code"] != code:
                raise SystemExit(f"{file} holds what other code found ({row['code']}, not {code}): name another file")
            self._held[row["name"]] = row["found"]

    def get(self, name: str, find: Callable[[], Any]) -> Any:
        """The piece of that name as JSON gives it back, from the file or found now. Raises `TimeIsUp` before beginning one too late."""
        if name not in self._held:
            if self._file is not None and time.monotonic() > self._until:
                raise TimeIsUp
            found = self._held[name] = json.loads(json.dumps(find()))
            if self._file is not None:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                with self._file.open("a") as opened:
                    opened.write(json.dumps({"name": name, "code": self._code, "found": found}) + "\n")
        return self._held[name]

    def in_turn(self, bench: Callable[["Pieces"], int]) -> int:
        """The bench's exit code, or `COME_AGAIN` where time was up."""
        try:
            return bench(self)
        except TimeIsUp:
            print(f"# {len(self._held)} pieces are in {self._file}: run it again for the rest", flush=True)
            return COME_AGAIN


def add_pieces(parser: argparse.ArgumentParser) -> None:
    """`--resume` and `--minutes`."""
    parser.add_argument("--resume", type=Path, metavar="FILE", help="keep each piece there, and pass over what it holds")
    parser.add_argument("--minutes", type=float, default=5.0, help="with --resume: begin no piece after so many")


def pieces_of(options: argparse.Namespace, bench: str, rooms: tuple[str, ...] = ROOMS) -> Pieces:
    """As asked for on the command line; `bench` is the file of the bench, `rooms` what its figures depend on."""
    return Pieces(options.resume, minutes=options.minutes, code=code_digest(Path(bench), rooms) if options.resume else "")


def code_digest(bench: Path, rooms: tuple[str, ...] = ROOMS) -> str:
    """Of the bench and the rooms that its figures depend on."""
    hasher = hashlib.sha256()
    for path in (bench.resolve(), *python_files(*rooms)):
        hasher.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return hasher.hexdigest()[:12]
