"""A draft head for a version, distilled from its own logged answers and judged on those of people it did not see.

    answers ──▶ read: states of one forward pass each ──▶ distil ──▶ gate: drawn as often as it costs? ──▶ kept beside the version
                                                                        └─ no: the record says why, and no head is kept

Fed by the trajectory store and the version's own weights / feeds the engines, which find the head by the version's digest. Changes no
answer: engines replay the sampler over whatever is drafted.

`draft` is imported when it is asked for, as in `pipelines.training`: whoever reads the configuration needs no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.training.drafting.answers import LoggedAnswer as LoggedAnswer
    from pipelines.training.drafting.config import DraftingConfig as DraftingConfig
    from pipelines.training.drafting.run import draft as draft

_HOMES = {"draft": "run", "LoggedAnswer": "answers", "DraftingConfig": "config"}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever is asked for
    if name not in _HOMES:
        raise AttributeError(name)
    import importlib

    return getattr(importlib.import_module(f"pipelines.training.drafting.{_HOMES[name]}"), name)
