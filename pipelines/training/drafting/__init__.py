"""A draft head for a version, distilled from its own logged answers and judged on those of people it did not see.

    answers ──▶ read: states of one forward pass each ──▶ distil ──▶ gate: drawn as often as it costs? ──▶ kept beside the version
                                                                        └─ no: the record says why, and no head is kept

Fed by the trajectory store and the version's own weights / feeds the engines, which find the head by the version's digest. Changes no
answer: engines replay the sampler over whatever is drafted.

`draft` is in `pipelines.training.drafting.run`, with torch: whoever reads the configuration needs none.
"""

from pipelines.training.drafting.config import DraftingConfig

__all__ = ["DraftingConfig"]
