"""Drawing many positions at once is drawing each alone; and attention by hand."""

import math

import pytest
import torch

from app.domain.telemetry.turns import SamplingParams
from app.policy.decoding.attention import attend
from app.policy.decoding.drawing import Drawn, draw_all

LOGITS = torch.tensor([[3.0, 1.0, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0], [1.0, 4.0, 2.0, 0.0], [2.0, 2.0, 2.0, 5.0]])
ASKED = [SamplingParams(), SamplingParams(top_k=1), SamplingParams(temperature=0.5), SamplingParams(top_p=0.5)]
UNIFORMS = [0.99, 0.3, 0.2, 0.7]


def alike(one: Drawn, other: Drawn) -> bool:
    same = (one.token, one.logprob, one.kept_log_mass) == (other.token, pytest.approx(other.logprob), pytest.approx(other.kept_log_mass))
    return same and torch.allclose(one.spread_V, other.spread_V)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2], [0, 0, 3, 3, 1], [2]], ids=str)
def test_positions_that_are_drawn_together_get_what_each_gets_alone_in_their_order(order: list[int]) -> None:
    together = draw_all(LOGITS[order], [UNIFORMS[n] for n in order], [ASKED[n] for n in order])
    alone = [draw_all(LOGITS[n : n + 1], [UNIFORMS[n]], [ASKED[n]])[0] for n in order]
    assert len(together) == len(order)
    assert all(alike(one, other) for one, other in zip(together, alone, strict=True))


def test_a_cut_draw_says_what_was_kept_and_a_whole_one_that_nothing_was_cut() -> None:
    whole, one = draw_all(LOGITS[[0, 2]], [0.0, 0.0], [SamplingParams(), SamplingParams(top_k=1)])
    weights = [math.exp(x) for x in (3.0, 1.0, 0.0, 2.0)]
    assert (whole.token, whole.kept_log_mass) == (0, None)
    assert whole.logprob == pytest.approx(3.0 - math.log(sum(weights)))
    assert whole.spread_V.exp().sum().item() == pytest.approx(1.0)
    kept = 4.0 - math.log(sum(math.exp(x) for x in (1.0, 4.0, 2.0, 0.0)))
    assert (one.token, one.logprob, one.kept_log_mass) == (1, pytest.approx(0.0), pytest.approx(kept))
    (two,) = draw_all(LOGITS[:1], [0.0], [SamplingParams(top_k=2)])
    assert two.logprob == pytest.approx(3.0 - math.log(weights[0] + weights[3]))
    assert two.kept_log_mass == pytest.approx(math.log((weights[0] + weights[3]) / sum(weights)))
    (likely,) = draw_all(LOGITS[3:], [0.5], [SamplingParams(top_p=0.5)])
    mass = math.exp(5.0) / (math.exp(5.0) + 3 * math.exp(2.0))
    assert (likely.token, likely.logprob, likely.kept_log_mass) == (3, pytest.approx(0.0), pytest.approx(math.log(mass)))


def by_hand(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, allowed: torch.Tensor, scaling: float) -> torch.Tensor:
    """[B, Q, H, D], head by head."""
    groups = query.shape[1] // key.shape[1]
    heads: list[torch.Tensor] = []
    for head in range(query.shape[1]):
        scores = query[:, head] @ key[:, head // groups].transpose(-1, -2) * scaling
        heads.append(scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ value[:, head // groups])
    return torch.stack(heads, dim=2)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("scaling", [None, 0.7])
def test_attention_is_what_it_is_head_by_head(kv_heads: int, queries: int, scaling: float | None) -> None:
    random = torch.Generator().manual_seed(kv_heads * 10 + queries)
    query = torch.randn(2, 4, queries, 8, generator=random)
    key, value = (torch.randn(2, kv_heads, 5, 8, generator=random) for _ in range(2))
    mask = torch.rand(2, 1, queries, 5, generator=random) < 0.6
    mask[..., 0] = True
    wanted = by_hand(query, key, value, mask[:, 0], 8**-0.5 if scaling is None else scaling)
    found, weights = attend(torch.nn.Module(), query, key, value, mask, scaling=scaling)
    assert weights is None
    assert found.shape == (2, queries, 4, 8)
    assert torch.allclose(found, wanted, atol=1e-5)


def test_without_a_mask_a_place_sees_itself_and_what_is_before_it() -> None:
    random = torch.Generator().manual_seed(1)
    query = torch.randn(1, 4, 5, 8, generator=random)
    key, value = (torch.randn(1, 2, 5, 8, generator=random) for _ in range(2))
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    assert torch.allclose(attend(torch.nn.Module(), query, key, value, None)[0], by_hand(query, key, value, causal, 8**-0.5), atol=1e-5)
    last = attend(torch.nn.Module(), query[:, :, -1:], key, value, None)[0]
    assert torch.allclose(last, by_hand(query[:, :, -1:], key, value, causal[-1:], 8**-0.5), atol=1e-5), "one query sees all of its keys"
    alone = attend(torch.nn.Module(), query[:, :2, -1:], key, value, None)[0]
    assert torch.allclose(alone, by_hand(query[:, :2, -1:], key, value, causal[-1:], 8**-0.5), atol=1e-5), "with keys of its own too"
    two = attend(torch.nn.Module(), query[:, :, :2], key[:, :, :2], value[:, :, :2], None)[0]
    assert torch.allclose(two, by_hand(query[:, :, :2], key[:, :, :2], value[:, :, :2], causal[:2, :2], 8**-0.5), atol=1e-5)
