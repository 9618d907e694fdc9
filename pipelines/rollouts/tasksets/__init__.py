"""The tasksets that come with us, by name. Fed by packages that set-up fetched and by what stands here; feed whoever tries tasks."""

import importlib
from pathlib import Path

from app.domain.errors import BadInput
from app.domain.learning.boxes import Boxes
from pipelines.rollouts.bridged import PREFIX, Bridge, BridgedTaskset
from pipelines.rollouts.tasks import Taskset
from pipelines.rollouts.tasksets.feature_deletion import FeatureDeletion
from pipelines.rollouts.tasksets.small_functions import SmallFunctions

SHIPPED = ("small-functions", "feature-deletion")


def find_taskset(name: str, *, sources: Path, boxes: Boxes) -> Taskset:
    """A shipped one, one that a bridge offers (`bridge:ADDRESS`), or `module:attribute` of yours: something that makes one without
    arguments. Raises `BadInput`."""
    if name.startswith(PREFIX):
        return BridgedTaskset(bridge=Bridge(name.removeprefix(PREFIX)), boxes=boxes)
    if name == SHIPPED[0]:
        return SmallFunctions()
    if name == SHIPPED[1]:
        return FeatureDeletion(sources=sources)
    module, _, attribute = name.partition(":")
    try:
        made = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        others = "bridge:ADDRESS or package.module:Class of yours"
        raise BadInput(f"no taskset is named {name!r} ({error}): use {', '.join(SHIPPED)}, {others}") from error
    return made
