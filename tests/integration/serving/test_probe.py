"""The probe of an engine's log-probabilities, and what becomes of an engine that fails it."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from app.domain.errors import BadInput
from app.domain.ports import EngineState
from app.domain.telemetry.turns import SamplingParams
from app.policy.decoding.sampling import Generation, sample
from app.policy.model import Policy, load_policy
from app.policy.scoring.forward import token_logprobs
from app.policy.storage.store import LocalWeights
from app.policy.tiny import write_tiny
from app.serving.probe import probe
from tests.integration.serving.running import ask, engine, request


@pytest.fixture(scope="module")
def policy(tiny_model: Path) -> Policy:
    return load_policy(tiny_model, dtype=torch.float32)


def raw(policy: Policy, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Generation]:
    """An engine that logs the model's distribution while it samples at another temperature."""
    drawn = sample(policy, prompts, sampling)
    for generation in drawn:
        with torch.inference_mode():
            generation.logprobs = token_logprobs(policy.model, generation.prompt, generation.tokens).tolist()
    return drawn


def test_a_healthy_engine_passes_in_either_precision(policy: Policy, tiny_model: Path) -> None:
    assert probe(policy) is None
    assert probe(load_policy(tiny_model, dtype=torch.bfloat16)) is None


def test_log_probabilities_of_another_distribution_are_found(policy: Policy) -> None:
    assert "not those of what it samples" in (probe(policy, draw=raw) or "")


def test_a_version_that_fails_the_probe_serves_and_is_not_logged_for_training(tmp_path: Path, tiny_model: Path) -> None:
    weights = LocalWeights(tmp_path)
    digest = weights.publish(tiny_model)

    async def scenario(url: str) -> None:
        chunks = await ask(request(digest), url)
        assert sum(len(chunk.tokens) for chunk in chunks) > 0
        assert sum(len(chunk.logprobs) for chunk in chunks) == 0

    with engine(weights, digest, check=lambda policy: probe(policy, draw=raw)) as running:
        asyncio.run(scenario(running.url))
        state, detail = running.ledger.states["composer", digest]
        assert state is EngineState.READY
        assert "not trained on" in str(detail)


def test_other_weights_under_the_wanted_digest_are_refused(tmp_path: Path, tiny_model: Path) -> None:
    weights = LocalWeights(tmp_path / "store")
    digest = weights.publish(tiny_model)
    write_tiny(tmp_path / "other", seed=5)
    (tmp_path / "other").rename(tmp_path / "store" / ("e" * 64))  # whole and sound, and not what its name says
    assert load_policy(weights.path(digest), digest=digest).digest == digest
    with pytest.raises(BadInput, match="holds the weights"):
        load_policy(weights.path("e" * 64), digest="e" * 64)
    with engine(weights, digest) as running:
        running.ledger.wants.add(("composer", "e" * 64))
        running.residency.turn()
        state, detail = running.ledger.states["composer", "e" * 64]
        assert state is EngineState.FAILED
        assert "holds the weights" in str(detail)
