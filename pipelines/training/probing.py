"""What the trainer itself says of the fixed probe, written beside the weights it publishes: engines of other make are compared with it."""

from pathlib import Path

from app.domain.learning.training import Datum
from app.domain.ports import Trainer
from app.policy.scoring.fixed_probe import Expected, probe_tokens, write_expected


def write_probe(trainer: Trainer, folder: Path) -> None:
    """Score the probe with the weights that the snapshot in `folder` was made of, and keep the answer there."""
    if not (folder / "tokenizer.json").is_file():
        return  # nobody serves such a snapshot
    tokens = probe_tokens(folder)
    answer = trainer.forward([Datum(tokens=tokens, first_scored=1)])
    write_expected(folder, Expected(tokens=tokens, logprobs=answer.logprobs[0]))
