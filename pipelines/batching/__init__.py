"""Cuts the batch of a slot: stratified, capped per actor, content-addressed, each turn in at most one batch ever.

Fed by labels / feeds training.
"""

from pipelines.batching.config import BatchingConfig as BatchingConfig
from pipelines.batching.cut import cut_batch as cut_batch
