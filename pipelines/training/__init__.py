"""The RL update: honest single-stream learning from logged production tokens, as Ray actors.

Fed by batches and payload segments / feeds evaluation with a candidate version.

`train` and `forget_run` (in `pipelines.training.run`) are imported when asked for: Ray workers import this package too, and know neither
ports nor wiring.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.training.config import TrainingConfig as TrainingConfig
    from pipelines.training.ports import TrainingPorts as TrainingPorts
    from pipelines.training.run import forget_run as forget_run
    from pipelines.training.run import train as train

_HOMES = {"train": "run", "forget_run": "run", "TrainingPorts": "ports", "TrainingConfig": "config"}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever is asked for
    if name not in _HOMES:
        raise AttributeError(name)
    import importlib

    return getattr(importlib.import_module(f"pipelines.training.{_HOMES[name]}"), name)
