"""An engine takes up a head while its version serves, says how it does, and drops it with the version; what is no head is said and left."""

import asyncio
import hashlib
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save

from app.domain.telemetry.serving import GenerationChunk
from app.policy.decoding.draft_head import DraftHead
from app.policy.storage.heads import HeadRecord, read_record, write_head
from app.policy.storage.snapshot import HEAD, HEAD_RECORD, write_snapshot
from app.policy.storage.store import LocalWeights
from app.serving.client import HttpEngines
from tests.fakes.toys import write_toy
from tests.integration.serving.running import RunningEngine, ask, engine, request, until

NOON = datetime(2026, 11, 25, 12, tzinfo=UTC)


@pytest.fixture
def weights(tiny_model: Path, tmp_path: Path) -> LocalWeights:
    """The toy, and a version made of it."""
    write_toy(tmp_path / "toy", tiny_model)
    store = LocalWeights(tmp_path / "weights")
    store.publish(tmp_path / "toy")
    return store


@pytest.fixture
def digest(weights: LocalWeights) -> str:
    return next(iter(weights.ages_s()))


def put(weights: LocalWeights, digest: str, *, hidden: int = 128, kept: bool = True, spoil: float | None = None) -> HeadRecord:
    head = DraftHead(hidden=hidden, inner=16, vocabulary=range(128))
    head.begin(torch.ones(hidden), seed=3)
    if spoil is not None:
        torch.nn.init.constant_(head.down.weight, spoil)
    record = HeadRecord(trained_for=digest, kept=kept, reason="because", made_at=NOON, figures={})
    return write_head(weights, record, head if kept else None)


def said(running: RunningEngine, digest: str) -> dict[str, Any]:
    return running.residency.drafters().get(digest, {}).get("head", {})


def text(chunks: list[GenerationChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def test_a_head_that_comes_while_a_version_serves_is_taken_up_told_and_dropped_with_it(
    weights: LocalWeights, digest: str, tmp_path: Path
) -> None:
    with engine(weights, digest, heads_every_s=0.0) as running:
        before = asyncio.run(ask(request(digest, max_tokens=40), running.url))
        assert said(running, digest) == {}
        put(weights, digest)
        until(lambda: said(running, digest).get("trained_for") == digest)
        assert said(running, digest)["state"] == "measuring"
        after = asyncio.run(ask(request(digest, max_tokens=40), running.url))
        assert text(after) == text(before), "a head changes no answer"

        async def sight() -> Any:
            async with HttpEngines([running.url]) as engines:
                return (await engines.sights())[0]

        drafters = asyncio.run(sight()).drafters
        assert set(drafters[digest]) == {"lookup", "head"}
        assert {"drafted", "accepted", "acceptance", "state", "gain", "trained_for"} == set(drafters[digest]["head"])

        tensors = {name: tensor * 1.5 for name, tensor in loaded(weights.path(digest)).items()}
        write_snapshot(tmp_path / "next", tensors, like=weights.path(digest))
        newer = weights.publish(tmp_path / "next")
        running.ledger.wants = {("composer", newer)}
        until(lambda: said(running, newer).get("trained_for") == digest)  # its nearest ancestor's, until it has its own
        put(weights, newer)
        until(lambda: said(running, newer).get("trained_for") == newer)
        put(weights, newer, kept=False)
        until(lambda: said(running, newer) == {})  # refreshed, and refused


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType] - its PathLike has no parameter

    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("broken", ["foreign shape", "no numbers", "cut off", "no record", "other tensors"])
def test_what_is_no_head_is_told_with_the_cure_and_the_version_serves_on(weights: LocalWeights, digest: str, broken: str) -> None:
    record = put(weights, digest, hidden=64 if broken == "foreign shape" else 128, spoil=math.nan if broken == "no numbers" else None)
    if broken == "cut off":
        weights.put_beside(digest, HEAD, (weights.read_beside(digest, HEAD) or b"")[:-9])
    elif broken == "no record":
        weights.put_beside(digest, HEAD_RECORD, b"{}")
    elif broken == "other tensors":
        content = save({"weight": torch.ones(3)})
        weights.put_beside(digest, HEAD, content)
        other = msgspec.structs.replace(record, sha256=hashlib.sha256(content).hexdigest())
        weights.put_beside(digest, HEAD_RECORD, msgspec.json.encode(other))
    with engine(weights, digest, heads_every_s=0.0) as running:
        until(lambda: "fault" in said(running, digest))
        assert "ratchet model draft" in said(running, digest)["fault"]
        before = asyncio.run(ask(request(digest), running.url))
        put(weights, digest)
        until(lambda: said(running, digest).get("trained_for") == digest and "fault" not in said(running, digest))
        assert text(asyncio.run(ask(request(digest), running.url))) == text(before)


def test_a_record_reads_back_as_it_was_written(weights: LocalWeights, digest: str) -> None:
    assert read_record(weights, digest) is None
    written = put(weights, digest)
    assert read_record(weights, digest) == written
    assert written.sha256 == hashlib.sha256(weights.read_beside(digest, HEAD) or b"").hexdigest()
