"""A trainer's state in files: each worker writes the rows that it holds, and any number of workers reads them again.

    weights.safetensors                       one worker: all of it
    weights-00001-of-00002.safetensors, …     several: of what is split each its rows, in their order; of the rest each all

Nothing is sent and no worker ever holds a whole tensor that is split, neither when it writes nor when it reads.
"""

# safetensors leaves parts of its types open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import xxhash
from safetensors import safe_open

MANIFEST = "MANIFEST"
"""The file with the digests of the others, written last."""
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class Rows:
    """What one worker holds of a tensor: the rows `first` up to `end` of one that has this shape as a whole."""

    shape: tuple[int, ...]
    first: int
    end: int

    @staticmethod
    def all_of(tensor: torch.Tensor) -> "Rows":
        """Of a tensor that is not split."""
        return Rows(tuple(tensor.shape), 0, tensor.shape[0])

    @staticmethod
    def dealt(shape: tuple[int, ...], *, rank: int, count: int) -> "Rows":
        """Equal runs, as `torch.chunk` and so FSDP2 deal them; the last ones may be short or empty."""
        run = -(-shape[0] // count)
        return Rows(shape, min(shape[0], rank * run), min(shape[0], (rank + 1) * run))


def file_of(stem: str, *, rank: int = 0, count: int = 1) -> str:
    """Name of the file that one of `count` workers writes."""
    return f"{stem}.safetensors" if count == 1 else f"{stem}-{rank + 1:05d}-of-{count:05d}.safetensors"


def digest_of(file: Path) -> str:
    """xxh3_128 of its bytes, hex."""
    hasher = xxhash.xxh3_128()
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK_BYTES):
            hasher.update(chunk)
    return hasher.hexdigest()


def is_there(folder: Path, stem: str) -> bool:
    """Whether a state lies under this name, written by one worker or by several."""
    return any(file.is_file() for file in _files(folder, stem))


class StateFiles:
    """What one or several workers wrote under a stem, read by rows. Close it, or use it as a context.

    Raises `FileNotFoundError` where a file is missing.
    """

    def __init__(self, folder: Path, stem: str, *, own: str | None = None) -> None:
        """`own` names the file that this very worker wrote, where only as many as wrote it read it: then it needs no other."""
        files = _files(folder, stem) if own is None or not (folder / own).is_file() else [folder / own]
        if missing := [file.name for file in files if not file.is_file()]:
            raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}: this state cannot be read")
        self._folder = folder
        self._opened = ExitStack()
        self._parts: list[Any] = [self._opened.enter_context(safe_open(file, framework="pt")) for file in files]
        self.names = frozenset(self._parts[0].keys())

    def read(self, name: str, wanted: Rows) -> torch.Tensor:
        """Rows of one tensor. Raises `KeyError` where it is not there and `ValueError` where it has another shape."""
        if name not in self.names:
            raise KeyError(f"{self._folder} lacks {name}")
        slices = [part.get_slice(name) for part in self._parts]
        held = [tuple(each.get_shape()) for each in slices]
        if len(held) == 1 and held[0] == (wanted.end - wanted.first, *wanted.shape[1:]):  # all of it, or one's own part of it
            return slices[0][:]
        if held[0] == wanted.shape:  # written by one worker, or not split: each wrote all of it
            return slices[0][wanted.first : wanted.end]
        whole = (sum(shape[0] for shape in held), *held[0][1:])
        if whole != wanted.shape:
            raise ValueError(f"{name} has the shape {list(whole)} in {self._folder} and {list(wanted.shape)} here")
        found, start = list[torch.Tensor](), 0
        for part, shape in zip(slices, held, strict=True):
            first, end = max(wanted.first, start) - start, min(wanted.end, start + shape[0]) - start
            if first < end:
                found.append(part[first:end])
            start += shape[0]
        return torch.cat(found) if found else slices[0][0:0]

    def close(self) -> None:
        """Let go of the files."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _files(folder: Path, stem: str) -> list[Path]:
    """Those of one worker or of several, in their order; missing ones too, as far as the names of the others tell."""
    several = sorted(folder.glob(f"{stem}-*-of-*.safetensors"))
    count = int(several[0].stem.rpartition("-")[2]) if several else 1
    return [folder / file_of(stem, rank=rank, count=count) for rank in range(count)]
