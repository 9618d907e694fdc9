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

import torch

from pipelines.training.numerics.state_files import Rows, StateFiles


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

    @torch.no_grad()
    def load(self, files: StateFiles, rows_of: Callable[[str], Rows]) -> None:
        """Take over what was saved; `rows_of` names which rows of each tensor are held here. Raises `KeyError` where one is not there."""
        for name, tensor in self.tensors.items():
            tensor.copy_(files.read(name, rows_of(name)))
            self.rest()

    def save(self, file: Path) -> None:
        """Write the tensors, as they are held here."""
        if self.file is not None:
            shutil.copyfile(self.file, file)  # what was written to the map is in the page cache that this reads; the disk need not have it
            return
        written = TensorFile(self.tensors, file=file)
        for name, tensor in self.tensors.items():
            written.tensors[name].copy_(tensor)
            written.rest()
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
            count = (end - start) // 4  # none, where more workers share a tensor than it has rows
            flat = torch.frombuffer(self._map, dtype=torch.float32, count=count, offset=start) if count else torch.empty(0)
            tensors[name] = flat.view(entry["shape"])
        return tensors


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
