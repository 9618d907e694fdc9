"""A turn of an agent, 32 thousand tokens of it: read in one packed row, computed layer by layer, and kept as the inputs of the layers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from app.domain.learning.training import AdamParams, Datum, LossSpec
from app.policy.storage.snapshot import finish_snapshot, replacing
from pipelines.training.trainer import LocalTrainer, TrainerSetup

CONTEXT = 32_768
SHORT = 512
LAYERS, HIDDEN = 1, 16


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A small random model with a long context."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=24, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=CONTEXT, initializer_range=0.3,
    )  # fmt: skip
    with replacing(tmp_path / "snapshot") as incoming:
        config.save_pretrained(incoming)
        finish_snapshot(incoming, LlamaForCausalLM(config).state_dict())
    return tmp_path / "snapshot"


def turn(tokens: int, *, answer: int = 200) -> Datum:
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(24, (CONTEXT,), generator=generator).tolist()
    return Datum(tokens=tuple(row[:tokens]), first_scored=tokens - answer, logprobs=(-3.0,) * answer, advantages=(1.0,) * answer)


def kept_bytes(act: Callable[[], object]) -> int:
    """What the forward pass hands to autograd for the backward pass, each memory once."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        act()
    return sum(kept.values())


def test_a_turn_of_32_thousand_tokens_trains_and_keeps_a_small_part_of_what_a_short_one_does(snapshot: Path, tmp_path: Path) -> None:
    setup = TrainerSetup(snapshot=snapshot, scratch=tmp_path / "scratch", dtype="float32", most_tokens_kept=4 * SHORT)
    trainer = LocalTrainer(setup)
    short = kept_bytes(lambda: trainer.forward_backward([turn(SHORT)], LossSpec(normaliser=100.0))) / SHORT
    long = kept_bytes(lambda: trainer.forward_backward([turn(CONTEXT)], LossSpec(normaliser=100.0))) / CONTEXT
    inputs = 4 * LAYERS * HIDDEN  # of the layers; checkpointing keeps them itself
    assert long + inputs < short / 4
    assert trainer.optim_step(AdamParams(learning_rate=1e-3)).grad_norm > 0.0


def test_computing_again_changes_nothing(snapshot: Path, tmp_path: Path) -> None:
    gradients: list[dict[str, torch.Tensor]] = []
    for most in (0, SHORT):
        trainer = LocalTrainer(
            TrainerSetup(snapshot=snapshot, scratch=tmp_path / f"scratch-{most}", dtype="float32", most_tokens_kept=most)
        )
        for tokens in (SHORT, 2 * SHORT, SHORT):  # there and back
            trainer.forward_backward([turn(tokens)], LossSpec(normaliser=100.0))
        gradients.append({name: parameter.grad for name, parameter in trainer.parameters.items() if parameter.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.allclose(gradient, gradients[1][name], atol=1e-6) for name, gradient in gradients[0].items())
