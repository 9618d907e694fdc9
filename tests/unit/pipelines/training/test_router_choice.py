"""Which experts a replayed token runs, and with what weights: by hand, on three experts of which two run."""

from types import SimpleNamespace

import pytest
import torch

from pipelines.training.numerics.router_replay import gate_scores, gate_weights, plausible

SOFT = SimpleNamespace(norm_topk_prob=True)
SIGMOID = SimpleNamespace(e_score_correction_bias=torch.zeros(3), norm_topk_prob=True, routed_scaling_factor=2.5)


def test_scores_are_a_softmax_or_where_the_architecture_says_so_a_sigmoid() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0]], dtype=torch.bfloat16)
    assert gate_scores(SOFT, logits).tolist() == [pytest.approx([1 / 3] * 3)]
    assert gate_scores(SIGMOID, logits).tolist() == [[0.5, 0.5, 0.5]]
    assert gate_scores(SOFT, logits).dtype == torch.float32


def test_weights_are_the_scores_of_who_runs_normalised_and_scaled_as_the_architecture_does() -> None:
    scores, indices = torch.tensor([[0.5, 0.3, 0.1]]), torch.tensor([[0, 2]])
    assert gate_weights(SOFT, scores, indices, torch.float32).tolist() == [pytest.approx([5 / 6, 1 / 6])]
    plain = SimpleNamespace(norm_topk_prob=False)
    assert gate_weights(plain, scores, indices, torch.float32).tolist() == [pytest.approx([0.5, 0.1])]
    assert gate_weights(plain, scores, indices, torch.bfloat16).dtype == torch.bfloat16
    assert gate_weights(SIGMOID, scores, indices, torch.bfloat16).tolist() == [pytest.approx([2.5 * 5 / 6, 2.5 / 6])]
    nothing = gate_weights(SIGMOID, torch.zeros(1, 3), indices, torch.float32)
    assert nothing.tolist() == [[0.0, 0.0]], "no division by nothing"


@pytest.mark.parametrize(
    ("scores", "recorded", "runs"),
    [
        # the router's own are 0 and 1, the lower of which scores .4: half of it is .2
        ((0.6, 0.4, 0.2), (0, 2), {0, 2}),
        ((0.6, 0.4, 0.199), (0, 2), {0, 1}),
        ((0.6, 0.4, 0.1), (2, 1), {0, 1}),
        ((0.6, 0.4, 0.3), (2, 0), {0, 2}),
        ((0.6, 0.4, 0.0), (1, 0), {0, 1}),
    ],
)
def test_a_recorded_expert_runs_from_a_share_of_the_routers_own_lowest_on(
    scores: tuple[float, ...], recorded: tuple[int, int], runs: set[int]
) -> None:
    found = plausible(torch.tensor([scores]), torch.tensor([[0, 1]]), torch.tensor([recorded]), 0.5)
    assert set(found[0].tolist()) == runs


def test_each_token_is_asked_for_itself_and_the_best_of_the_others_takes_the_place() -> None:
    scores = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.05, 0.15, 0.3, 0.5]])
    own, recorded = torch.tensor([[0, 1], [3, 2]]), torch.tensor([[3, 1], [0, 1]])
    found = plausible(scores, own, recorded, 0.4)
    assert [set(row) for row in found.tolist()] == [{0, 1}, {1, 3}]
