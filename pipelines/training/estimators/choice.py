"""Which baseline an update has: the configured one, and for practice the mean of its group."""

from typing import Any

from app.domain.learning.batches import BatchManifest
from pipelines.training.config import TrainingConfig
from pipelines.training.estimators import Estimator
from pipelines.training.estimators.batch_mean import BatchMean
from pipelines.training.estimators.group_mean import GroupMean
from pipelines.training.estimators.grouped import Grouped
from pipelines.training.estimators.segment_tracker import SegmentTracker


def estimator_of(batch: BatchManifest, config: TrainingConfig, memory: dict[str, Any] | None) -> Estimator:
    """With what the run behind the parent remembered."""
    configured = _configured(batch, config, memory)
    return Grouped(configured) if any(item.group for item in batch.items) else configured


def _configured(batch: BatchManifest, config: TrainingConfig, memory: dict[str, Any] | None) -> Estimator:
    if config.estimator == "group_mean":
        return GroupMean()
    if config.estimator == "batch_mean":
        return BatchMean()
    return SegmentTracker(config.tracker, memory, rule_set=batch.rule_set)
