"""AdamW whose state may live in a file: touched once per step, parameter by parameter, it need not stay in memory between steps.

The file is an ordinary safetensors file (`first.NAME`, `second.NAME`, `step`), mapped read-write. On a laptop this takes 8 of the 16
bytes per parameter of a training step out of the process; with a GPU or several workers the state is kept in memory instead.
"""

# safetensors leaves parts of its types open.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import json
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch.optim.adamw import adamw

from app.domain.training import AdamParams

STEP = "step"
REST_AFTER_BYTES = 64 << 20
"""How much of a mapped state is resident at once during a step."""


class AdamState:
    """First and second moments per parameter name, and the number of steps taken."""

    def __init__(self, shapes: Mapping[str, torch.Tensor], *, file: Path | None) -> None:
        """Zeros like the given (local) tensors; in `file` where one is named, which is replaced."""
        names = sorted(shapes)
        self.file = file
        self._map: mmap.mmap | None = None
        if file is None:
            self.tensors = {f"{moment}.{name}": torch.zeros_like(shapes[name]) for moment in ("first", "second") for name in names}
            self.tensors[STEP] = torch.zeros(1)
            return
        layout = {f"{moment}.{name}": tuple(shapes[name].shape) for name in names for moment in ("first", "second")} | {STEP: (1,)}
        _create(file, layout)
        self.tensors = self._mapped(file)

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

    def load(self, file: Path, part: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
        """Take over the full state of a file; `part` cuts a parameter's full tensor down to this worker's."""
        with safe_open(file, framework="pt") as opened, torch.no_grad():
            for name, tensor in self.tensors.items():
                tensor.copy_(part(name.partition(".")[2], opened.get_tensor(name)))
                self.rest()

    def rest(self) -> None:
        """Give the mapped pages back to the system; they stay in its page cache and come back when touched."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)

    def flush(self) -> None:
        """Make a mapped file complete on disk."""
        if self._map is not None:
            self._map.flush()


def adam_step(
    parameters: Mapping[str, torch.Tensor], gradients: Iterator[tuple[str, torch.Tensor]], state: AdamState, params: AdamParams
) -> None:
    """One AdamW step, parameter by parameter, so that little of a mapped state is resident at once."""
    taken = state.tensors[STEP].clone()
    state.tensors[STEP] += 1
    touched = 0
    for name, gradient in gradients:
        parameter = parameters[name]
        adamw(
            [parameter], [gradient], [state.tensors[f"first.{name}"]], [state.tensors[f"second.{name}"]], [],
            [taken[0].to(parameter.device, copy=True)],
            fused=True, amsgrad=False, maximize=False, beta1=params.beta1, beta2=params.beta2, lr=params.learning_rate,
            weight_decay=params.weight_decay, eps=params.eps,
        )  # fmt: skip
        touched += 8 * parameter.numel()
        if touched > REST_AFTER_BYTES:
            state.rest()
            touched = 0
    state.rest()


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
