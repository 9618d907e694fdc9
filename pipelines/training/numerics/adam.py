"""AdamW on fp32 masters, parameter by parameter, with its state in a file where that saves memory
(`pipelines.training.numerics.tensor_file`).

On processors masters and moments, 12 of the 20 bytes per parameter of a training step, are outside the process; with a GPU they are kept
in memory.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch.optim.adamw import adamw

from app.domain.learning.training import AdamParams
from pipelines.training.numerics.tensor_file import TensorFile

STEP = "step"
REST_AFTER_BYTES = 64 << 20
"""How much of mapped tensors is resident at once during a step."""


class AdamState(TensorFile):
    """First and second moments per parameter name (`first.NAME`, `second.NAME`), and the number of steps taken (`step`)."""

    def __init__(self, shapes: Mapping[str, torch.Tensor], *, file: Path | None) -> None:
        moments = {f"{moment}.{name}": tensor for name, tensor in shapes.items() for moment in ("first", "second")}
        super().__init__({**moments, STEP: torch.zeros(1)}, file=file)


def adam_step(
    masters: TensorFile,
    gradients: Iterator[tuple[str, torch.Tensor]],
    state: AdamState,
    params: AdamParams,
    *,
    changed: Callable[[str], None] = lambda name: None,
) -> None:
    """One AdamW step, parameter by parameter, so that little of what is mapped is resident at once; tells which master has `changed`."""
    taken = state.tensors[STEP].clone()
    state.tensors[STEP] += 1
    touched = 0
    for name, gradient in gradients:
        master = masters.tensors[name]
        adamw(
            [master], [gradient], [state.tensors[f"first.{name}"]], [state.tensors[f"second.{name}"]], [],
            [taken[0].to(master.device, copy=True)],
            fused=True, amsgrad=False, maximize=False, beta1=params.beta1, beta2=params.beta2, lr=params.learning_rate,
            weight_decay=params.weight_decay, eps=params.eps,
        )  # fmt: skip
        changed(name)
        touched += 12 * master.numel()
        if touched > REST_AFTER_BYTES:
            state.rest()
            masters.rest()
            touched = 0
    state.rest()
    masters.rest()
