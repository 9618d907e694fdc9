"""An engine that serves rounded weights: what it logs, what it says of itself, and what the update makes of its turns."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch

from app.domain.learning.batches import TurnPayload
from app.domain.release.versions import HoldReason
from app.domain.telemetry.serving import GenerationChunk
from app.policy.model import load_policy
from app.policy.patching import as_published
from app.policy.precision import Precision
from app.policy.scoring.forward import token_logprobs
from app.policy.storage.store import LocalWeights
from app.policy.storage.weights import digest_of
from app.serving.client import HttpEngines
from app.serving.probe import mismatch
from tests.fakes.learning import fake_ports, make_batch, version_of
from tests.fakes.updating import CONFIG, low_tokens, run
from tests.integration.serving.running import RunningEngine, complete, engine, request
from tests.integration.serving.test_patched_versions import Loads, moved, take_up

TEMPLATE = TurnPayload(
    inference_id="", episode_id="", policy="composer", version="", prompt_tokens=(), completion_tokens=(), logprobs=(),
    temperature=1.0, top_p=1.0, finished_at=datetime(2026, 11, 21, 12, tzinfo=UTC),
)  # fmt: skip


async def asked(running: RunningEngine, digest: str, count: int) -> list[list[GenerationChunk]]:
    async with HttpEngines([running.url]) as engines:
        return list(await asyncio.gather(*[
            complete(engines, request(digest, content=f"def f{n}(x):", max_tokens=24, seed=n)) for n in range(count)
        ]))  # fmt: skip


def turns_of(answers: list[list[GenerationChunk]], digest: str) -> list[TurnPayload]:
    """As the gateway records them."""
    return [
        replace(
            TEMPLATE, inference_id=f"t{n:02d}", episode_id=f"e{n:02d}", version=digest, prompt_tokens=tuple(chunks[-1].prompt_tokens or ()),
            completion_tokens=tuple(token for chunk in chunks for token in chunk.tokens),
            logprobs=tuple(value for chunk in chunks for value in chunk.logprobs), precision=chunks[-1].precision or "",
        )
        for n, chunks in enumerate(answers)
    ]  # fmt: skip


def served(folder: Path, tmp_path: Path, precision: Precision) -> tuple[list[TurnPayload], dict[str, Any], Any]:
    """Turns of an engine in this precision, what it says of itself, and the gateway's sight of it."""
    store = LocalWeights(tmp_path / "w")
    digest = store.publish(folder)

    async def sight(url: str) -> Any:
        async with HttpEngines([url]) as engines:
            (found,) = await engines.sights()
            return found

    with engine(store, digest, precision=precision) as running:
        turns = turns_of(asyncio.run(asked(running, digest, 16)), digest)
        return turns, httpx.get(f"{running.url}/health", trust_env=False).json(), asyncio.run(sight(running.url))


def logged_as(turns: list[TurnPayload], model: Any) -> float:
    """The largest |Δ log π| between what was logged and what this model says."""
    with torch.inference_mode():
        return max(
            float((token_logprobs(model, t.prompt_tokens, t.completion_tokens) - torch.tensor(t.logprobs)).abs().max()) for t in turns
        )


def test_a_turn_is_logged_with_the_rounded_weights_log_probabilities_and_says_so(tiny_model: Path, tmp_path: Path) -> None:
    turns, said, sight = served(tiny_model, tmp_path, Precision.NVFP4)
    digest = turns[0].version
    assert {turn.precision for turn in turns} == {"nvfp4"}
    # in what this processor computes fastest, as the engine does: another dtype differs by more than the rounding of the weights
    own = logged_as(turns, load_policy(tiny_model, precision=Precision.NVFP4).model)
    assert own < logged_as(turns, load_policy(tiny_model).model) / 2
    assert said["precision"] == sight.precision == "nvfp4"
    assert said["mismatch"] == sight.mismatch == {digest: said["last_swap"]["mismatch"]}
    assert sight.mismatch[digest]["kl"] > 0
    assert sight.mismatch[digest]["tokens"] > 100


def test_bf16_is_served_as_published_and_measures_nothing(tiny_model: Path, tmp_path: Path) -> None:
    turns, said, sight = served(tiny_model, tmp_path, Precision.BF16)
    assert {turn.precision for turn in turns} == {""}
    assert (said["precision"], said["mismatch"], sight.mismatch) == ("bf16", {}, None)
    assert "mismatch" not in said["last_swap"]


def updated(folder: Path, tmp_path: Path, precision: Precision, **guards: float) -> tuple[Any, float]:
    """The update on turns of such an engine, and the mismatch that its probe said."""
    turns, said, _ = served(folder, tmp_path, precision)
    ports = fake_ports(tmp_path)
    digest = ports.weights.publish(folder)
    batch = make_batch(ports, turns, [low_tokens(turn) + n % 2 for n, turn in enumerate(turns)], champion=digest)
    config = msgspec.structs.replace(CONFIG, guards=msgspec.structs.replace(CONFIG.guards, **guards))
    return run(ports, batch, version_of(digest), config=config), said["mismatch"][digest]["kl"]


def test_the_guards_mismatch_is_about_what_the_probe_said_and_the_ratios_correct_it(tiny_model: Path, tmp_path: Path) -> None:
    made, probed = updated(tiny_model, tmp_path, Precision.MXFP8)
    assert made.candidate is not None, made.message
    assert CONFIG.correction.name == "tis"
    assert probed / 4 < made.metrics["mismatch"] < probed * 4
    assert made.metrics["steps"][0]["mean_ratio"] != 1.0, "the ratios are those of published over served"


def test_a_precision_beyond_the_limit_is_held_and_named_as_the_likely_cause(tiny_model: Path, tmp_path: Path) -> None:
    made, probed = updated(tiny_model, tmp_path, Precision.NVFP4, max_mismatch=1e-6)
    assert (made.candidate, made.hold_reason) == (None, HoldReason.ENGINE_MISMATCH)
    assert probed > 1e-6
    assert "turns were served in low precision (" in str(made.message)
    assert "in nvfp4), which is the likely cause: serve with --precision bf16" in str(made.message)


def test_a_rounded_version_is_patched_in_and_measured_anew(tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    store, loads = LocalWeights(tmp_path / "w"), Loads()
    new = moved(tiny_model, tmp_path / "new")
    old_digest, new_digest = store.publish(tiny_model), store.publish(new)
    with engine(store, old_digest, load=loads, precision=Precision.MXFP8) as running:
        take_up(running, new_digest)
        assert loads.digests == [old_digest], "the second one was not loaded"
        swap = running.residency.last_swap or {}
        assert (swap["digest"], swap["way"]) == (new_digest, "patch")
        assert swap["mismatch"]["kl"] > 0
        policy = running.worker.policy(new_digest)
        assert (policy.precision, digest_of(as_published(policy))) == (Precision.MXFP8, new_digest)
        found = mismatch(policy)
        assert found is not None
        assert found.kl == pytest.approx(swap["mismatch"]["kl"], rel=1e-3)
    assert "version rounded" in caplog.text
