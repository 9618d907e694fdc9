"""fp32 tensors in a file, mapped read-write: touched once per optimizer step, they need not stay in memory between steps.

The file is an ordinary safetensors file. Its pages lie in the system's page cache, which may drop them when memory is short.
"""

# safetensors leaves parts of its types open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import json
import mmap
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open

Part = Callable[[str, torch.Tensor], torch.Tensor]
"""Cuts the full tensor of that name down to what this worker holds of it."""


class Gather(Protocol):
    """How several workers' parts become full tensors."""

    @property
    def leads(self) -> bool:
        """Whether this worker writes."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the full tensor."""
        ...

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """The full tensor; all workers ask together."""
        ...


class TensorFile:
    """Named fp32 tensors, zeros at first; in `file` where one is named (and replaced), else in memory on the tensors' device."""

    def __init__(self, like: Mapping[str, torch.Tensor], *, file: Path | None) -> None:
        self.file = file
        self._map: mmap.mmap | None = None
        if file is None:
            self.tensors = {name: torch.zeros_like(tensor, dtype=torch.float32) for name, tensor in sorted(like.items())}
        else:
            _create(file, {name: tuple(tensor.shape) for name, tensor in sorted(like.items())})
            self.tensors = self._mapped(file)

    def load(self, file: Path, part: Part) -> None:
        """Take over the full tensors of a file. Raises `KeyError` where it lacks one."""
        with safe_open(file, framework="pt") as opened, torch.no_grad():
            if missing := set(self.tensors) - set(opened.keys()):
                raise KeyError(f"{file} lacks {sorted(missing)[:3]}")
            for name, tensor in self.tensors.items():
                tensor.copy_(part(name, opened.get_tensor(name)))
                self.rest()

    def save(self, file: Path, gather: "Gather | None" = None) -> None:
        """Write the tensors; with `gather` the full ones, one after the other (all workers must call this, and one writes)."""
        if gather is None and self._map is not None and self.file is not None:
            self._map.flush()
            shutil.copyfile(self.file, file)
            return
        shapes = {name: gather.shape(name) if gather else tuple(tensor.shape) for name, tensor in self.tensors.items()}
        written = _written(file, shapes) if gather is None or gather.leads else None
        for name, tensor in self.tensors.items():
            whole = gather.whole(name, tensor) if gather else tensor
            if written is not None:
                written.tensors[name].copy_(whole)
                written.rest()
            self.rest()
        if written is not None:
            written.close()

    def rest(self) -> None:
        """Give the mapped pages back to the system; they stay in its page cache and come back when touched."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Everything is in the file."""
        self.tensors = {}
        if self._map is not None:
            self._map.flush()
            self._map = None

    def _mapped(self, file: Path) -> dict[str, torch.Tensor]:
        with file.open("r+b") as opened:
            self._map = mmap.mmap(opened.fileno(), 0)
        header_length = int.from_bytes(self._map[:8], "little")
        entries = json.loads(self._map[8 : 8 + header_length])
        tensors: dict[str, torch.Tensor] = {}
        for name, entry in entries.items():
            start, end = (8 + header_length + offset for offset in entry["data_offsets"])
            tensors[name] = torch.frombuffer(self._map, dtype=torch.float32, count=(end - start) // 4, offset=start).view(entry["shape"])
        return tensors


def _written(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> TensorFile:
    """A new file of these shapes, mapped: what is copied into its tensors is written without being held."""
    return TensorFile({name: torch.empty(shape, device="meta") for name, shape in shapes.items()}, file=file)


def _create(file: Path, layout: Mapping[str, tuple[int, ...]]) -> None:
    """A safetensors file of zeros, fp32; sparse, so it takes no disk until it is written."""
    entries: dict[str, object] = {}
    offset = 0
    for name, shape in layout.items():
        size = 4 * torch.Size(shape).numel()
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 64)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    with file.open("wb") as opened:
        opened.write(len(header).to_bytes(8, "little") + header)
        opened.flush()
        os.truncate(file, 8 + len(header) + offset)
