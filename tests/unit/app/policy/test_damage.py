"""The damaged copy answers with words drawn evenly from the vocabulary."""

from pathlib import Path

import torch

from app.policy.damage import write_damaged
from app.policy.model import load_model
from app.policy.storage.snapshot import snapshot_digest


def test_a_damaged_copy_is_another_version_whose_next_word_can_be_any(tiny_model: Path, tmp_path: Path) -> None:
    digest = write_damaged(tmp_path / "damaged", like=tiny_model)
    assert digest != snapshot_digest(tiny_model)
    model = load_model(tmp_path / "damaged", dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3]])).logits
    assert float(logits.abs().max()) == 0.0
