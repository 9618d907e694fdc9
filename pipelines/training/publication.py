"""From the trainer to the store: the snapshot, and beside it what the trainer itself says of the fixed probe.

Engines of other make are compared with that answer.
"""

import shutil
from pathlib import Path

from app.domain.errors import Held
from app.domain.learning.training import Datum
from app.domain.ports import Trainer, WeightStore
from app.domain.release.versions import HoldReason, Version
from app.policy.scoring.fixed_probe import Expected, probe_tokens, write_expected


def publish(trainer: Trainer, folder: Path, *, parent: Version, like: Path, weights: WeightStore) -> str:
    """Write the bf16 snapshot into `folder`, with the configuration of `like`, and store it; returns its digest. Raises `Held`."""
    shutil.rmtree(folder, ignore_errors=True)
    digest = trainer.save_weights_for_sampler(folder, like)
    if digest == parent.digest:
        raise Held(
            HoldReason.EQUAL_REWARDS,
            "the update is too small to change a single bf16 weight: raise training.learning_rate or wait for more labels",
        )
    _write_probe(trainer, folder)
    stored = weights.publish(folder)
    assert stored == digest, f"the store says {stored}, the snapshot {digest}"
    return digest


def _write_probe(trainer: Trainer, folder: Path) -> None:
    """Score the probe with the weights that the snapshot in `folder` was made of, and keep the answer there."""
    if not (folder / "tokenizer.json").is_file():
        return  # nobody serves such a snapshot
    tokens = probe_tokens(folder)
    answer = trainer.forward([Datum(tokens=tokens, first_scored=1)])
    write_expected(folder, Expected(tokens=tokens, logprobs=answer.logprobs[0]))
