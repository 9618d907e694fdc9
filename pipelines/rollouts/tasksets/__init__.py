"""The tasksets that come with us, by name. Fed by packages that set-up fetched and by what stands here; feed whoever tries tasks."""

import importlib
from pathlib import Path

from app.domain.errors import BadInput
from pipelines.rollouts.tasks import Taskset
from pipelines.rollouts.tasksets.feature_deletion import FeatureDeletion
from pipelines.rollouts.tasksets.small_functions import SmallFunctions

SHIPPED = ("small-functions", "feature-deletion")


def find_taskset(name: str, *, sources: Path) -> Taskset:
    """A shipped one, or `module:attribute` of yours: something that makes one without arguments. Raises `BadInput`."""
    if name == SHIPPED[0]:
        return SmallFunctions()
    if name == SHIPPED[1]:
        return FeatureDeletion(sources=sources)
    module, _, attribute = name.partition(":")
    try:
        made = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise BadInput(f"no taskset is named {name!r} ({error}): use {', '.join(SHIPPED)} or package.module:Class of yours") from error
    return made
