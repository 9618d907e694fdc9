"""Which baseline an update has: the configured one, and for practice the mean of its group."""

from app.domain.learning.batches import BatchManifest
from app.domain.ports import RunStore
from pipelines.training.config import TrainingConfig
from pipelines.training.estimators import Estimator
from pipelines.training.estimators.batch_mean import BatchMean
from pipelines.training.estimators.group_mean import GroupMean
from pipelines.training.estimators.grouped import Grouped
from pipelines.training.estimators.segment_tracker import SegmentTracker


def estimator_of(batch: BatchManifest, config: TrainingConfig, runs: RunStore, *, parent: str) -> Estimator:
    """With the tracker that the run behind the digest `parent` left."""
    configured = _configured(batch, config, runs, parent)
    return Grouped(configured) if any(item.group for item in batch.items) else configured


def _configured(batch: BatchManifest, config: TrainingConfig, runs: RunStore, parent: str) -> Estimator:
    if config.estimator == "group_mean":
        return GroupMean()
    if config.estimator == "batch_mean":
        return BatchMean()
    return SegmentTracker(config.tracker, runs.tracker(parent), rule_set=batch.rule_set)
