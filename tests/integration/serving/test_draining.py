"""An engine that goes away finishes what it has, while what comes is answered by another."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from app.domain.errors import Unavailable
from app.domain.telemetry.turns import FinishReason
from app.policy.model import load_policy
from app.policy.storage.store import LocalWeights
from app.serving.client import HttpEngines
from tests.integration.serving.running import complete, engine, request, until


def in_float32(folder: Path, **more: Any) -> Any:
    return load_policy(folder, dtype=torch.float32, **more)


def test_what_was_begun_is_finished_and_what_comes_goes_elsewhere(tiny_model: Path, tmp_path: Path) -> None:
    store = LocalWeights(tmp_path)
    digest = store.publish(tiny_model)
    with engine(store, digest, load=in_float32) as leaving, engine(store, digest, load=in_float32) as staying:

        async def scenario() -> None:
            async with HttpEngines([leaving.url]) as one, HttpEngines([leaving.url, staying.url]) as both:
                begun = asyncio.ensure_future(complete(one, request(digest, max_tokens=60)))
                await asyncio.to_thread(until, lambda: leaving.worker.sampled_tokens > 2)
                leaving.worker.draining = True
                for _ in range(3):
                    assert (await complete(both, request(digest)))[-1].finish_reason is not FinishReason.ERROR
                with pytest.raises(Unavailable, match="going away"):
                    await complete(one, request(digest))
                (sight,) = await one.sights()
                assert sight.draining
                assert (await begun)[-1].finish_reason in (FinishReason.LENGTH, FinishReason.STOP)

        asyncio.run(scenario())
        assert staying.worker.sampled_tokens > 0
