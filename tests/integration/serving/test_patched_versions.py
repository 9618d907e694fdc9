"""An engine that takes up a version by patching: under load, with the wrong bytes, with answers still on the old one."""

import asyncio
import shutil
import time
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import pytest
import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType] - its PathLike has no parameter

from app.domain.ports import EngineState
from app.domain.telemetry.serving import GenerationChunk
from app.policy.model import Policy, load_policy
from app.policy.scoring.fixed_probe import Expected, expected, probe_tokens, write_expected
from app.policy.scoring.forward import token_logprobs
from app.policy.storage.remote import RemoteWeights
from app.policy.storage.snapshot import WEIGHTS, snapshot_digest, write_snapshot
from app.policy.storage.store import LocalWeights
from app.serving.client import HttpEngines
from app.serving.probe import probe
from app.serving.residency import ROUTED_S
from app.serving.worker import Limits
from tests.integration.serving.running import RunningEngine, ask, complete, engine, request, until
from tests.integration.serving.test_probe import raw


def moved(folder: Path, out: Path, factor: float = 1.5, *, strange: bool = False) -> Path:
    """A version of clearly other answers, with its probe; a `strange` one's probe is another version's."""
    tensors = {name: tensor * factor if name.endswith("norm.weight") else tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    write_snapshot(out, tensors, like=folder)
    probe = expected(folder if strange else out)
    write_expected(out, Expected(tokens=probe_tokens(out), logprobs=probe.logprobs))
    return out


class Loads:
    """Loads versions, and counts."""

    def __init__(self) -> None:
        self.digests: list[str] = []

    def __call__(self, folder: Path, **more: Any) -> Policy:
        self.digests.append(more["digest"])
        return load_policy(folder, dtype=torch.float32, **more)


def take_up(running: RunningEngine, digest: str) -> None:
    running.ledger.wants = {("composer", digest)}
    until(lambda: running.ledger.states.get(("composer", digest), (None,))[0] is EngineState.READY)


def is_of(policy: Policy, chunks: list[GenerationChunk]) -> bool:
    """Whether every token's log-probability is this version's."""
    tokens = [token for chunk in chunks for token in chunk.tokens]
    logged = torch.tensor([value for chunk in chunks for value in chunk.logprobs])
    with torch.no_grad():
        scored = token_logprobs(policy.model, chunks[-1].prompt_tokens or [], tokens)
    return bool((scored - logged).abs().max() < 1e-3)


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_a_descendant_is_patched_in_and_answers_under_way_finish_on_their_version(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    new = moved(tiny_model, tmp_path / "new")
    url = f"memory://bucket-{uuid4().hex}/weights"
    store = LocalWeights(tmp_path / "w") if kind == "local" else RemoteWeights(url, cache=tmp_path / "publisher")
    old_digest, new_digest = store.publish(tiny_model), store.publish(new)
    seen = store if kind == "local" else RemoteWeights(url, cache=tmp_path / "engine")
    loads = Loads()
    policies = {digest: load_policy(folder, dtype=torch.float32) for digest, folder in ((old_digest, tiny_model), (new_digest, new))}
    with engine(seen, old_digest, load=loads, linger_s=0.05) as running:

        async def scenario() -> None:
            async with HttpEngines([running.url]) as engines:
                before = asyncio.ensure_future(complete(engines, request(old_digest, max_tokens=120)))
                await asyncio.to_thread(until, lambda: running.worker.sampled_tokens > 3)
                await asyncio.to_thread(take_up, running, new_digest)
                after = await complete(engines, request(new_digest))
                assert is_of(policies[old_digest], await before)
                assert is_of(policies[new_digest], after)
                assert not is_of(policies[old_digest], after)

        asyncio.run(scenario())
        assert loads.digests == [old_digest], "the second one was not loaded"
        assert running.residency.last_swap is not None
        assert (running.residency.last_swap["digest"], running.residency.last_swap["way"]) == (new_digest, "patch")
        until(lambda: running.worker.copies == 1)


def test_the_prompt_cache_of_the_old_version_is_not_the_new_ones(tiny_model: Path, tmp_path: Path) -> None:
    store = LocalWeights(tmp_path / "w")
    new = moved(tiny_model, tmp_path / "new")
    old_digest, new_digest = store.publish(tiny_model), store.publish(new)
    with engine(store, old_digest, load=Loads()) as running:
        asyncio.run(ask(request(old_digest), running.url))
        asyncio.run(ask(request(old_digest), running.url))
        take_up(running, new_digest)
        assert is_of(load_policy(new, dtype=torch.float32), asyncio.run(ask(request(new_digest), running.url)))


def test_a_damaged_delta_is_never_served_and_what_is_held_serves_on(tiny_model: Path, tmp_path: Path) -> None:
    import fsspec

    url = f"memory://bucket-{uuid4().hex}/weights"
    writer = RemoteWeights(url, cache=tmp_path / "publisher")
    old_digest, new_digest = writer.publish(tiny_model), writer.publish(moved(tiny_model, tmp_path / "new"))
    memory, place = fsspec.filesystem("memory"), f"{url.removeprefix('memory:/')}/{new_digest}/model.delta"
    whole = memory.cat_file(place)
    memory.pipe_file(place, whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:])
    with engine(RemoteWeights(url, cache=tmp_path / "engine"), old_digest, load=Loads()) as running:
        running.ledger.wants.add(("composer", new_digest))
        until(lambda: running.ledger.states.get(("composer", new_digest), (None,))[0] is EngineState.FAILED)
        assert "keyframe" in (running.ledger.states["composer", new_digest][1] or "")
        assert is_of(load_policy(tiny_model, dtype=torch.float32), asyncio.run(ask(request(old_digest), running.url)))


def test_a_version_that_does_not_say_what_its_trainer_wrote_is_loaded_whole_and_checked(tiny_model: Path, tmp_path: Path) -> None:
    store, loads = LocalWeights(tmp_path / "w"), Loads()
    old_digest, new_digest = store.publish(tiny_model), store.publish(moved(tiny_model, tmp_path / "new", 3.0, strange=True))
    with engine(store, old_digest, load=loads) as running:
        take_up(running, new_digest)
        assert loads.digests == [old_digest, new_digest]


def test_a_version_patched_onto_one_in_doubt_is_in_doubt_itself_and_not_logged_for_training(tiny_model: Path, tmp_path: Path) -> None:
    store, loads = LocalWeights(tmp_path / "w"), Loads()
    old_digest, new_digest = store.publish(tiny_model), store.publish(moved(tiny_model, tmp_path / "new"))
    with engine(store, old_digest, load=loads, check=lambda policy: probe(policy, draw=raw)) as running:
        take_up(running, new_digest)
        assert loads.digests == [old_digest], "the second one was not loaded, and it says of the fixed text what its trainer wrote"
        chunks = asyncio.run(ask(request(new_digest), running.url))
        assert sum(len(chunk.tokens) for chunk in chunks) > 0
        assert sum(len(chunk.logprobs) for chunk in chunks) == 0
        assert "not trained on" in str(running.ledger.states["composer", new_digest][1])


def test_a_fourth_copy_waits_for_one_that_is_leaving(tied_model: Path, tmp_path: Path) -> None:
    """The first one leaves, and has an answer to finish that takes longer than many looks of residency."""
    store = LocalWeights(tmp_path / "w")
    folders = [tied_model]  # taken greedily, it repeats itself until it may not
    for index in range(3):
        folders.append(moved(folders[-1], tmp_path / f"v{index}", 1.1))
    digests = [store.publish(folder) for folder in folders]

    def load(folder: Path, **more: Any) -> Policy:
        policy = load_policy(folder, dtype=torch.float32, **more)
        if more["digest"] == digests[0]:
            cast("torch.nn.Module", policy.model.get_output_embeddings()).register_forward_pre_hook(lambda *_: time.sleep(0.05))
        return policy

    with engine(store, digests[0], load=load, linger_s=0.05, limits=Limits(rows=2)) as running:

        async def scenario() -> None:
            async with HttpEngines([running.url]) as engines:
                held = asyncio.ensure_future(complete(engines, request(digests[0], max_tokens=400, temperature=0.0)))
                await asyncio.to_thread(until, lambda: running.worker.sampled_tokens > 2)
                running.ledger.wants = {("composer", digest) for digest in digests[1:3]}
                await asyncio.to_thread(until, lambda: running.worker.copies == 3 and running.worker.is_dropping)
                running.ledger.wants = {("composer", digest) for digest in digests[1:]}
                looked = time.monotonic()
                while time.monotonic() - looked < 3.0:
                    assert running.worker.copies == 3
                    await asyncio.sleep(0.01)
                assert not held.done(), "it was still to be finished"
                held.cancel()

        asyncio.run(scenario())
        until(lambda: running.ledger.states.get(("composer", digests[3]), (None,))[0] is EngineState.READY)


def test_what_nobody_wants_leaves_sooner_where_another_one_needs_its_room(tiny_model: Path, tmp_path: Path) -> None:
    store, folders = LocalWeights(tmp_path / "w"), [tiny_model]
    for index in range(2):
        folders.append(moved(folders[-1], tmp_path / f"v{index}"))
    first, second, third = (store.publish(folder) for folder in folders)
    with engine(store, first, linger_s=600) as running:
        running.ledger.wants = {("composer", second)}
        until(lambda: running.worker.holds(second))
        time.sleep(ROUTED_S + 0.2)
        assert running.worker.holds(first), "somebody may want it once more"
        running.ledger.wants = {("composer", second), ("composer", third)}
        until(lambda: running.worker.digests == {second, third})


def test_a_store_knows_the_way_from_what_is_held_only(tiny_model: Path, tmp_path: Path) -> None:
    one = moved(tiny_model, tmp_path / "one")
    two = moved(one, tmp_path / "two")
    url = f"memory://bucket-{uuid4().hex}/weights"
    local, remote = LocalWeights(tmp_path / "w"), RemoteWeights(url, cache=tmp_path / "publisher")
    for store in (local, remote):
        base, first, second = (store.publish(folder) for folder in (tiny_model, one, two))
    fresh = RemoteWeights(url, cache=tmp_path / "fresh")
    found = fresh.way(second, [base])
    assert found is not None
    assert (found.base, len(found.deltas)) == (base, 2)
    near = fresh.way(second, [base, first])
    assert near is not None
    assert len(near.deltas) == 1
    assert near.probe == (two / "PROBE.json").read_bytes()
    compared = local.way(second, {base})
    assert compared is not None
    assert compared.snapshot == local.path(second)
    for store in (local, fresh):
        assert store.way(second, []) is None
        assert store.way("0" * 64, [base]) is None
    shutil.rmtree(local.root / first)
    assert local.way(second, {base}) is None
    assert snapshot_digest(two) == second
