"""What one answer's logits go through before temperature and top-p: grammars, masks, biases.

Shapes: N rows of a step, V vocabulary.
"""

import logging
import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

log = logging.getLogger(__name__)


class LogitsProcessor(Protocol):
    """Changes one answer's logits, token by token; asked on the sampling thread, so it has to be quick (a step waits for it)."""

    def __call__(self, logits_V: Tensor) -> Tensor:
        """The logits [V] float32 to draw the next token from: -inf where a token may not come. One token at least has to be left, else the
        answer ends with `error`. May change its argument in place."""
        ...

    def accept(self, token: int) -> None:
        """This token was drawn."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether nothing may follow; then the answer ends with `stop`."""
        ...


def processed(logits_NV: Tensor, processors: Sequence[LogitsProcessor | None]) -> tuple[Tensor, list[int]]:
    """The logits after every row's processor, and the rows that have nothing left to draw (or whose processor broke).

    `logits_NV` stays as it is: a processor that broke in the middle must not leave half of its changes.
    """
    asked = [(row, processor) for row, processor in enumerate(processors) if processor is not None]
    if not asked:
        return logits_NV, []
    changed_NV, stuck = logits_NV.clone(), list[int]()
    for row, processor in asked:
        try:
            changed_NV[row] = processor(changed_NV[row])
        except Exception:  # one answer's grammar must not cost the others of its batch
            log.exception("a logits processor broke")
            changed_NV[row] = -torch.inf
        if not math.isfinite(float(changed_NV[row].max())):
            changed_NV[row] = logits_NV[row]
            stuck.append(row)
    return changed_NV, stuck
