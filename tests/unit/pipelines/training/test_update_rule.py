"""Advantages, corrections and loss, by hand; and the whole against the exact gradient of a policy small enough to enumerate."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from app.domain.learning.training import Datum, LossName, LossSpec
from app.domain.telemetry.turns import SamplingParams
from app.policy.decoding.sampling import sample
from app.policy.model import load_policy
from pipelines.training.config import TrackerConfig
from pipelines.training.estimators import Estimator, RewardedTurn
from pipelines.training.estimators.batch_mean import BatchMean
from pipelines.training.estimators.group_mean import GroupMean
from pipelines.training.estimators.segment_tracker import SegmentTracker
from pipelines.training.guards import ratio_report
from pipelines.training.numerics.advantage import above_expectation, advantages, penalty, to_go
from pipelines.training.numerics.corrections import token_weights
from pipelines.training.numerics.loss import token_loss
from pipelines.training.trainer import LocalTrainer, TrainerSetup

LOG = math.log


def test_without_an_anchor_every_token_gets_the_reward_above_the_baseline() -> None:
    assert advantages(reward=1.0, baseline=0.25, count=2, drift=None, beta=0.1) == (0.75, 0.75)


def test_divergence_is_charged_to_every_token_that_leads_to_it() -> None:
    # log π_old − log π_ref per token: 0.5, −1, 2. To go: 1.5, 1, 2. A = 1 − 0.1 · to go
    drift = to_go([-1.0, -2.0, -1.0], [-1.5, -1.0, -3.0])
    assert advantages(reward=1.0, baseline=0.0, count=3, drift=drift, beta=0.1) == pytest.approx((0.85, 0.9, 0.8))


def test_a_drift_is_charged_above_what_it_is_at_the_same_place_of_other_episodes() -> None:
    # units a, a, b, c; at place 0 the others of a have 3 and 6 (mean 4.5), at place 1 only c has one: (0 + 2)/2 = 1
    found = above_expectation([[1.0, 2.0], None, [2.0], [3.0], [6.0, 2.0]], ["a", "a", "a", "b", "c"])
    assert found == [[1.0 - 4.5, 2.0 - 1.0], None, [2.0 - 4.5], [3.0 - 3.0], [6.0 - 2.0, 2.0 - 2.0 / 3]]
    assert above_expectation([[1.0], [2.0]], ["a", "a"]) == [[0.0], [0.0]]  # nobody else: nothing can be expected


@pytest.mark.parametrize(
    ("correction", "low", "high", "expected"),
    [
        ("none", 0.0, 2.0, [1, 1, 1, 1]),
        ("tis", 0.5, 2.0, [0.25, 1, 2, 2]),
        ("icepop", 0.5, 2.0, [0, 1, 2, 0]),
        ("cispo", 0.5, 1.2, [0.5, 1, 1.2, 1.2]),
    ],
)
def test_corrections_by_hand(correction: str, low: float, high: float, expected: list[float]) -> None:
    # ratios 1/4, 1, 2, 3
    logprobs = torch.tensor([LOG(0.25), 0.0, LOG(2.0), LOG(3.0)], requires_grad=True)
    spec = LossSpec(normaliser=1.0, correction=correction, clip_low=low, clip_high=high + 1e-6 if correction == "icepop" else high)
    weights = token_weights(spec, logprobs, torch.zeros(4))
    assert weights.tolist() == pytest.approx(expected, abs=1e-5)
    assert not weights.requires_grad


def test_whole_turns_are_masked_by_hand() -> None:
    # three turns: ratios (1/2, 3), (2, 2) and (1e-5, 1); products 1.5, 4 and 1e-5, the last one vetoed although it is small
    logprobs = torch.tensor([LOG(0.5), LOG(3.0), LOG(2.0), LOG(2.0), LOG(1e-5), 0.0])
    turns = torch.tensor([0, 0, 1, 1, 2, 2])
    weights = token_weights(LossSpec(normaliser=1.0, correction="seq_mis", clip_high=2.0), logprobs, torch.zeros(6), turns=turns)
    assert weights.tolist() == pytest.approx([1.5, 1.5, 0, 0, 0, 0])
    # mean log(behaviour/policy): −0.203, −0.693, 5.76; only the last has moved away by more than 0.1, and it is blamed
    spec, blame = LossSpec(normaliser=1.0, correction="opsm", clip_high=2.0, delta=0.1), torch.tensor([-1.0, -1, -1, -1, 0.5, -1])
    weights = token_weights(spec, logprobs, torch.zeros(6), advantages=blame, turns=turns)
    assert weights.tolist() == pytest.approx([0.5, 2, 2, 2, 0, 0])
    weights = token_weights(spec, logprobs, torch.zeros(6), advantages=-blame, turns=turns)
    assert weights.tolist() == pytest.approx([0.5, 2, 2, 2, 1e-5, 1])


def test_the_turns_of_a_micro_batch_are_told_apart(tiny_model: Path, tmp_path: Path) -> None:
    # the first turn is what the policy says now, the second was drawn by one that said it e times as often, three times: product e^-3
    trainer = LocalTrainer(TrainerSetup(snapshot=tiny_model, scratch=tmp_path, dtype="float32", threads=1))
    data = [Datum(tokens=(5, 6, 7, 8, 9), first_scored=2), Datum(tokens=(5, 6, 17, 18, 19), first_scored=2)]
    first, second = trainer.forward(data).logprobs
    spec = LossSpec(normaliser=1.0, correction="seq_mis", clip_high=2.0)
    logged = [tuple(first), tuple(logprob + 1.0 for logprob in second)]
    taught = [replace(datum, logprobs=row, advantages=(1.0,) * 3) for datum, row in zip(data, logged, strict=True)]
    assert trainer.forward_backward(taught, spec).loss == pytest.approx(-sum(first) - math.exp(-3.0) * sum(second), rel=1e-4)


def test_an_unknown_correction_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="tis, icepop, cispo, seq_mis, opsm or none"):
        token_weights(LossSpec(normaliser=1.0, correction="ppo"), torch.zeros(1), torch.zeros(1))


def test_the_loss_by_hand() -> None:
    # ρ = e^(−1−(−2)) = e → clipped to 2; −(2 · 0.5 · −1 + 1 · −1 · −3)/4 = −(−1 + 3)/4 = −0.5
    spec = LossSpec(normaliser=4.0, correction="tis", clip_high=2.0)
    logprobs = torch.tensor([-1.0, -3.0], requires_grad=True)
    loss = token_loss(spec, logprobs, torch.tensor([-2.0, -3.0]), torch.tensor([0.5, -1.0]))
    assert loss.item() == pytest.approx(-0.5)
    loss.backward()  # −w A / normaliser
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-0.25, 0.25])


def test_cross_entropy_is_the_weighted_negative_log_likelihood() -> None:
    loss = token_loss(LossSpec(name=LossName.CROSS_ENTROPY, normaliser=2.0), torch.tensor([-1.0, -3.0]), torch.zeros(2), torch.ones(2))
    assert loss.item() == 2.0


@pytest.mark.parametrize("logged", [-0.01, -5.7, -30.0])
def test_the_gradient_reacts_to_what_was_logged(logged: float) -> None:
    # TRL's does not: its gradient norm is the same for all three (facts, section 6)
    logprobs = torch.tensor([-3.0], requires_grad=True)
    token_loss(LossSpec(normaliser=1.0), logprobs, torch.tensor([logged]), torch.ones(1)).backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(-min(math.exp(-3.0 - logged), 2.0))


# --- against the exact gradient -------------------------------------------------------------------------------------------------
#
# A policy over two tokens drawn one after the other from three (nine completions): logits of the first, and of the second given the first.
# J(θ) = Σ_y π_θ(y) r(y) is summed exactly; the estimate is our own loss over sampled batches.

REWARDS = torch.tensor([[1.0, 0.0, -1.0], [0.5, 2.0, 0.0], [-2.0, 1.0, 0.3]])
BATCHES, SIZE = 1500, 6


def policy(seed: int) -> torch.Tensor:
    """[12] parameters: 3 logits of the first token, then 3 × 3 of the second."""
    return torch.randn(12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 0.7


def log_table(theta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """log π(a) [3] and log π(b | a) [3, 3]."""
    return theta[:3].log_softmax(0), theta[3:].view(3, 3).log_softmax(1)


def exact_gradient(theta: torch.Tensor, *, reference: torch.Tensor | None = None, beta: float = 0.0) -> torch.Tensor:
    """∇ of Σ π(y) (r(y) − β log π(y)/π_ref(y)), the last factor's own gradient included (it sums to zero)."""
    theta = theta.clone().requires_grad_()
    first, second = log_table(theta)
    joint = (first[:, None] + second).exp()
    objective = (joint * REWARDS).sum()
    if reference is not None:
        ref_first, ref_second = log_table(reference)
        objective = objective - beta * (joint * (first[:, None] + second - ref_first[:, None] - ref_second)).sum()
    return torch.autograd.grad(objective, theta)[0]


def estimates(
    theta: torch.Tensor, estimator: Callable[[], Estimator], *, behaviour: torch.Tensor | None = None, correction: str = "none",
    reference: torch.Tensor | None = None, beta: float = 0.0, one_prompt: bool = False,
    centred: bool = True,
) -> torch.Tensor:  # fmt: skip
    """[BATCHES, 12] gradient estimates of J from sampled batches of SIZE, each through baselines, advantages and loss."""
    source = theta if behaviour is None else behaviour
    first, second = log_table(source)
    generator = torch.Generator().manual_seed(11)
    drawn = torch.multinomial((first[:, None] + second).exp().flatten(), BATCHES * SIZE, replacement=True, generator=generator)
    a, b = drawn.view(BATCHES, SIZE) // 3, drawn.view(BATCHES, SIZE) % 3
    theta = theta.clone().requires_grad_()
    new_first, new_second = log_table(theta)
    ref = log_table(reference) if reference is not None else None
    table = per_completion_gradients(new_first, new_second, theta)
    spec = LossSpec(normaliser=float(SIZE), correction=correction, clip_high=1e9)
    found: list[torch.Tensor] = []
    for xs, ys in zip(a.tolist(), b.tolist(), strict=True):
        turns = [
            RewardedTurn(unit=str(i), reward=float(REWARDS[x, y]), segment="s", prompt="p" if one_prompt else str(i))
            for i, (x, y) in enumerate(zip(xs, ys, strict=True))
        ]
        total = torch.zeros(12, dtype=torch.float64)
        logged = [[float(first[x]), float(second[x, y])] for x, y in zip(xs, ys, strict=True)]
        far = [[float(ref[0][x]), float(ref[1][x, y])] if ref is not None else None for x, y in zip(xs, ys, strict=True)]
        drifts = [to_go(old, anchor) if anchor is not None else None for old, anchor in zip(logged, far, strict=True)]
        drifts = above_expectation(drifts, [turn.unit for turn in turns]) if centred else drifts
        for turn, baseline, old, drift, x, y in zip(turns, estimator().baselines(turns), logged, drifts, xs, ys, strict=True):
            values = advantages(reward=turn.reward, baseline=baseline, count=2, drift=drift, beta=beta)
            logprobs = torch.stack([new_first[x], new_second[x, y]]).detach().requires_grad_()
            token_loss(spec, logprobs, torch.tensor(old, dtype=torch.float64), torch.tensor(values, dtype=torch.float64)).backward()
            assert logprobs.grad is not None
            total -= logprobs.grad[0] * table[0][x] + logprobs.grad[1] * table[1][x, y]
        found.append(total)
    return torch.stack(found)


def per_completion_gradients(first: torch.Tensor, second: torch.Tensor, theta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """∇ log π(a) [3, 12] and ∇ log π(b | a) [3, 3, 12]."""
    of_first = torch.stack([torch.autograd.grad(value, theta, retain_graph=True)[0] for value in first])
    of_second = torch.stack(
        [torch.autograd.grad(second[x, y], theta, retain_graph=True)[0] for x, y in itertools.product(range(3), range(3))]
    )
    return of_first, of_second.view(3, 3, 12)


def assert_unbiased(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Every component of the mean within 4.5 standard errors (12 components: a false alarm in about 1 of 10,000 seeds)."""
    error = found.std(0) / math.sqrt(len(found))
    assert bool(((found.mean(0) - expected).abs() <= 4.5 * error + 1e-9).all()), (found.mean(0), expected, error)


def tracker() -> SegmentTracker:
    return SegmentTracker(TrackerConfig(), {"segments": {"s": [3.0, 0.4], "other": [5.0, -0.2]}})


@pytest.mark.parametrize("estimator", [tracker, lambda: SegmentTracker(TrackerConfig(), None), BatchMean])
def test_estimators_that_claim_to_be_unbiased_are(estimator: Callable[[], Estimator]) -> None:
    theta = policy(1)
    assert_unbiased(estimates(theta, estimator), exact_gradient(theta))


def test_group_mean_is_the_exact_gradient_times_n_minus_one_over_n() -> None:
    theta = policy(1)
    assert_unbiased(estimates(theta, GroupMean, one_prompt=True), exact_gradient(theta) * (SIZE - 1) / SIZE)


def test_ratios_correct_data_of_another_policy_where_one_decision_is_made() -> None:
    # Only the second token's policies differ, so its ratio is all there is to correct: the second token's gradient is exact.
    theta, behaviour = policy(1), policy(1)
    behaviour[3:] = policy(2)[3:]
    found = estimates(theta, BatchMean, behaviour=behaviour, correction="tis")[:, 3:]
    assert_unbiased(found, exact_gradient(theta)[3:])


def test_without_the_correction_the_same_data_are_wrong() -> None:
    theta, behaviour = policy(1), policy(1)
    behaviour[3:] = policy(2)[3:]
    with pytest.raises(AssertionError):
        assert_unbiased(estimates(theta, BatchMean, behaviour=behaviour, correction="none")[:, 3:], exact_gradient(theta)[3:])


def test_the_divergence_to_the_anchor_is_differentiated_exactly() -> None:
    theta, reference = policy(1), policy(3)
    assert_unbiased(estimates(theta, BatchMean, reference=reference, beta=0.5), exact_gradient(theta, reference=reference, beta=0.5))


def test_what_drift_is_expected_takes_noise_off_and_changes_nothing_else() -> None:
    theta, reference = policy(1), 10 * policy(3)  # far from each other: all completions drift, and by much
    plain, centred = (estimates(theta, BatchMean, reference=reference, beta=0.5, centred=centred) for centred in (False, True))
    assert_unbiased(plain, exact_gradient(theta, reference=reference, beta=0.5))
    assert_unbiased(centred, exact_gradient(theta, reference=reference, beta=0.5))
    assert centred.var(0).sum() < 0.9 * plain.var(0).sum()


def test_k1_as_a_loss_term_pulls_nowhere() -> None:
    # E_y[∇ (log π(y) − log π_ref(y))] = Σ π ∇log π = 0, exactly, whatever π_ref is
    theta = policy(1).requires_grad_()
    first, second = log_table(theta)
    of_first, of_second = per_completion_gradients(first, second, theta)
    joint = (first[:, None] + second).exp().detach()
    expected = (joint[..., None] * (of_first[:, None] + of_second)).sum((0, 1))
    assert expected.abs().max() < 1e-12


def test_turns_drawn_with_top_p_have_ratio_one_under_their_own_weights(tiny_model: Path, tmp_path: Path) -> None:
    policy = load_policy(tiny_model, dtype=torch.float32)
    prompts = [policy.chat.prompt([{"role": "user", "content": f"def f{number}(x):"}]) for number in range(6)]
    drawn = sample(policy, prompts, SamplingParams(max_tokens=10, temperature=1.3, top_p=0.6, seed=2))
    data = [
        Datum(
            tokens=(*g.prompt, *g.tokens), first_scored=len(g.prompt), logprobs=tuple(g.logprobs), temperature=1.3,
            kept_log_mass=tuple(g.kept_log_mass),
        )
        for g in drawn
    ]  # fmt: skip
    logged = [logprob for datum in data for logprob in datum.logprobs]
    trainer = LocalTrainer(TrainerSetup(snapshot=tiny_model, scratch=tmp_path, dtype="float32", threads=1))
    corrected = ratio_report([p for row in trainer.forward(data).logprobs for p in row], logged)
    blind = ratio_report([p for row in trainer.forward([replace(d, kept_log_mass=()) for d in data]).logprobs for p in row], logged)
    assert corrected.mean_gap < 1e-5
    assert blind.mean_ratio < 0.9  # what the same turns look like where the mass that top-p kept was not logged


def test_the_penalty_grows_as_the_anchors_budget_is_used() -> None:
    # target 0.5: at the least up to 0.25, the geometric mean of least and most at 0.5, the most from 0.75 on
    betas = [penalty(kl, target=0.5, least=0.01, most=1.0) for kl in (-0.1, 0.25, 0.5, 0.75, 3.0)]
    assert betas == pytest.approx([0.01, 0.01, 0.1, 1.0, 1.0])
    assert penalty(3.0, target=0.5, least=0.0, most=1.0) == 0.0
