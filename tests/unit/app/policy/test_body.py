"""The bodies of models: which one, what it refuses, and that both read the same caches' contents alike."""

from pathlib import Path

import pytest
import torch

from app.policy.decoding.body import TransformersBody, body_of
from app.policy.decoding.keyvalues import Fed
from app.policy.decoding.packed.body import PADDED
from app.policy.model import load_model, load_policy


def test_positions_behind_the_end_of_the_context_are_refused(tiny_model: Path) -> None:
    """Compiled loops would read what lies behind their tables."""
    policy = load_policy(tiny_model, dtype=torch.float32)
    last = policy.model.config.get_text_config().max_position_embeddings + PADDED
    body = body_of(policy.model)
    cache = body.cache(max_rows=1)
    tokens = torch.tensor([[5]])
    with torch.inference_mode():
        (states,) = body([Fed(tokens_nQ=tokens, positions_nQ=torch.tensor([[last - 1]]), width=last)], cache)
        assert states.shape[:2] == (1, 1)
        with pytest.raises(IndexError, match=f"position {last} is behind the end"):
            body([Fed(tokens_nQ=tokens, positions_nQ=torch.tensor([[last]]), width=last + 1)], cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_body_computes_what_transformers_modules_do(tiny_model: Path, dtype: torch.dtype) -> None:
    """Rows of different lengths that decode, two prompts beside each other, the later half of one; and the cache as it is left."""
    packed, plain = body_of(load_policy(tiny_model, dtype=dtype).model), TransformersBody(load_model(tiny_model, dtype=dtype).eval())
    caches = packed.cache(max_rows=4), plain.cache(max_rows=4)
    random = torch.Generator().manual_seed(3)

    def fed(first: int, *starts: int, new: int) -> Fed:
        positions = torch.tensor(starts)[:, None] + torch.arange(new)
        tokens = torch.randint(5, 500, positions.shape, generator=random)
        return Fed(first=first, tokens_nQ=tokens, positions_nQ=positions, width=int(positions.max()) + 1)

    with torch.inference_mode():
        for parts in (
            [fed(0, 0, 0, new=37)],
            [fed(0, 37, 20, new=1), fed(2, 0, new=150)],
            [fed(2, 150, new=9)],
            [fed(0, 38, 21, 159, new=3)],
        ):
            found, expected = (body(parts, cache) for body, cache in zip((packed, plain), caches, strict=True))
            for one, other in zip(found, expected, strict=True):
                assert torch.allclose(one.float(), other.float(), atol=2e-5 if dtype is torch.float32 else 0.1)
        for row, length in ((0, 41), (2, 162)):
            for ours, theirs in zip(*(cache.take(row, length) for cache in caches), strict=True):
                for one, other in zip(ours, theirs, strict=True):
                    assert torch.allclose(one.float(), other.float(), atol=2e-5 if dtype is torch.float32 else 0.1)
