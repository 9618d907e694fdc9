"""Replayed experts, by hand and on the two architectures."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from app.domain.learning.training import Datum, LossSpec
from app.domain.telemetry.turns import SamplingParams
from app.policy.decoding.sampling import sample
from app.policy.experts import routers
from app.policy.model import load_policy
from app.policy.tiny_moe import Architecture, write_tiny_moe
from pipelines.training.config import Activations, RouterReplayConfig
from pipelines.training.numerics.router_replay import plausible
from pipelines.training.trainer import LocalTrainer, TrainerSetup

PROMPTS = [[5, 6, 7, 8 + number] for number in range(8)]
SPEC = LossSpec(normaliser=1.0)


@pytest.fixture(scope="module", params=list(Architecture))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe") / request.param
    write_tiny_moe(folder, request.param)
    return folder


def turns(folder: Path, dtype: torch.dtype) -> list[Datum]:
    """Turns sampled with their experts recorded."""
    policy = load_policy(folder, dtype=dtype)
    sampled = sample(policy, PROMPTS, SamplingParams(max_tokens=24, seed=3), record_experts=True)
    return [
        Datum(
            tokens=(*g.prompt, *g.tokens), first_scored=len(g.prompt), logprobs=tuple(g.logprobs), advantages=(1.0,) * len(g.tokens),
            routes=tuple(tuple(tuple(layer) for layer in step) for step in g.experts),
        )
        for g in sampled
    ]  # fmt: skip


def trainer(folder: Path, tmp_path: Path, *, activations: Activations = "none", plausibility: float = 0.1) -> LocalTrainer:
    replay = RouterReplayConfig(plausibility=plausibility)
    setup = TrainerSetup(snapshot=folder, scratch=tmp_path, dtype="float32", activations=activations, router_replay=replay)
    return LocalTrainer(setup)


def gap(data: list[Datum], logprobs: tuple[tuple[float, ...], ...], quantile: float) -> float:
    """A quantile of |Δ log π| between what was logged and what the trainer computes."""
    gaps = [abs(new - old) for datum, row in zip(data, logprobs, strict=True) for new, old in zip(row, datum.logprobs, strict=True)]
    return sorted(gaps)[int(quantile * (len(gaps) - 1))]


def test_implausible_experts_give_way_to_the_routers_best_others() -> None:
    # own choice: experts 0 (0.5) and 1 (0.3); the record says 2 (0.19) and 3 (0.01). With threshold 0.1 the bar is 0.03: 2 stays, 3 gives
    # way to 0, the best of the own choice that is not chosen yet
    scores = torch.tensor([[0.5, 0.3, 0.19, 0.01]])
    own, record = torch.tensor([[0, 1]]), torch.tensor([[2, 3]])
    assert set(plausible(scores, own, record, 0.1)[0].tolist()) == {2, 0}
    assert set(plausible(scores, own, record, 0.0)[0].tolist()) == {2, 3}
    assert set(plausible(scores, own, record, 1.0)[0].tolist()) == {0, 1}
    assert set(plausible(scores, own, torch.tensor([[0, 3]]), 0.1)[0].tolist()) == {0, 1}


def test_replay_on_the_same_weights_changes_nothing(folder: Path, tmp_path: Path) -> None:
    data = turns(folder, torch.float32)
    replaying = trainer(folder, tmp_path)
    with_replay = replaying.forward(data)
    without = replaying.forward([replace(datum, routes=None) for datum in data])
    assert gap(data, with_replay.logprobs, 1.0) < 5e-5
    assert gap(data, without.logprobs, 1.0) < 5e-5
    assert replaying.replay.replayed > 0
    assert replaying.replay.changed == 0


def test_replay_brings_the_log_probabilities_of_bf16_serving_closer(folder: Path, tmp_path: Path) -> None:
    data = turns(folder, torch.bfloat16)
    replaying = trainer(folder, tmp_path)
    with_replay = gap(data, replaying.forward(data).logprobs, 0.99)
    without = gap(data, replaying.forward([replace(datum, routes=None) for datum in data]).logprobs, 0.99)
    assert replaying.replay.changed > 0
    assert with_replay <= without


@pytest.mark.parametrize("activations", ["none", "selective", "full"])
def test_the_router_learns_through_replayed_routes(folder: Path, tmp_path: Path, activations: Activations) -> None:
    data = turns(folder, torch.bfloat16)
    replaying = trainer(folder, tmp_path, activations=activations)
    replaying.forward_backward(data, SPEC)
    for name, router in routers(replaying.model):
        gradient = router.weight.grad
        assert isinstance(gradient, torch.Tensor), name
        assert float(gradient.abs().max()) > 0, name


def test_foreign_records_really_decide_the_experts(folder: Path, tmp_path: Path) -> None:
    data = turns(folder, torch.float32)
    replaying = trainer(folder, tmp_path, plausibility=0.0)
    turned = [replace(d, routes=tuple(tuple(tuple((e + 1) % 8 for e in layer) for layer in step) for step in d.routes or ())) for d in data]
    assert gap(data, replaying.forward(turned).logprobs, 0.5) > 1e-4
    records = sum(len(layer) for datum in turned for step in datum.routes or () for layer in step)
    counts = replaying.replay
    assert (counts.replayed, counts.replaced) == (records, 0), "without a threshold every record counts"
    assert records / 4 < counts.changed <= records
    strict = trainer(folder, tmp_path, plausibility=1.0)
    strict.forward(turned)
    assert 0.9 * strict.replay.changed <= strict.replay.replaced <= strict.replay.changed, "what the router would not have chosen gives way"


def test_records_of_the_wrong_shape_are_refused(folder: Path, tmp_path: Path) -> None:
    data = turns(folder, torch.float32)
    half = [replace(data[0], routes=(data[0].routes or ())[:-1])]
    with pytest.raises(ValueError, match="routes are recorded for"):
        trainer(folder, tmp_path).forward(half)


def test_a_record_that_is_used_twice_is_an_error(folder: Path, tmp_path: Path) -> None:
    replaying = trainer(folder, tmp_path)
    data = turns(folder, torch.float32)
    (_, first), *_others = routers(replaying.model)
    first.register_forward_hook(replaying.replay._hook(0))
    with pytest.raises(RuntimeError, match="expert records the forward pass used"):
        replaying.forward(data)


def test_a_record_that_no_layer_used_is_an_error(folder: Path, tmp_path: Path) -> None:
    replaying = trainer(folder, tmp_path)
    data = turns(folder, torch.float32)
    replaying.replay._hooks[0].remove()
    with pytest.raises(RuntimeError, match="a layer did not route"):
        replaying.forward(data)
