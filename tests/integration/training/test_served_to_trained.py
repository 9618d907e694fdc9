"""From the request to the update with a real sampler: an episode longer than the context window, and a mixture of experts."""

import json
import shutil
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from sqlalchemy import Engine
from starlette.testclient import TestClient

from app.db.ingestion.streams import SqlEffects
from app.db.learning.batches import SqlBatchStore
from app.db.learning.labels import SqlLabels
from app.domain.learning.batches import BatchManifest, TurnPayload
from app.domain.policies import PolicyConfig, SummaryConfig
from app.domain.ports import TrajectoryStore
from app.domain.release.versions import HoldReason, RunStatus, TrainingRun
from app.domain.telemetry.events import EventType, Observation
from app.domain.telemetry.schemas import satisfies
from app.domain.telemetry.serving import GenerateRequest, GenerationChunk
from app.domain.telemetry.streams import EffectBatch, JoinRules
from app.domain.telemetry.turns import TurnServed
from app.main import create_app
from app.policy.decoding.sampling import sample
from app.policy.model import Policy, load_policy
from app.policy.tiny_moe import Architecture, write_tiny_moe
from app.trajectories.segments import ParquetSegments
from pipelines.batching import BatchingConfig, cut_batch
from pipelines.labelling.labeller import label_due
from pipelines.labelling.rule_set import parse_rule_set
from pipelines.training import TrainingConfig, train
from pipelines.training.config import GuardLimits, RouterReplayConfig
from tests.fakes.gateway import CHAMPION, ScriptedEngines, collaborators, events_of, policy_config
from tests.fakes.inbox import MemoryInbox
from tests.fakes.learning import FakeWeights, fake_ports, version_of
from tests.fakes.served import applied
from tests.fakes.streaming import MemorySegments
from tests.integration.labelling.test_label_book import ONLY_RATING

WINDOW = 160
CONFIG = policy_config(
    max_context_tokens=WINDOW, max_tokens=16, held_out_share=0.0,
    summary=SummaryConfig(trigger_tokens=110, max_tokens=16, instruction="Summarise."),
)  # fmt: skip
RULES = JoinRules(policies={}, label_wait_s=60, lateness_s=600)
# of the hundred-odd tokens here the 99th percentile is the worst but one, which a bfloat16 sampler of random weights may have
LIMITS = GuardLimits(max_mismatch_p99=2.0)
TRAINING = TrainingConfig(learning_rate=2e-4, turns_per_step=16, threads=1, dtype="float32", kl_beta=0.0, guards=LIMITS)
ASKED = "def f(x):\n    return x\n"


class TinyEngine(ScriptedEngines):
    """The tiny model with a window that really ends: a longer prompt is refused by the sampler."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = replace(policy, context=WINDOW)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerationChunk]:
        prompt = self.policy.chat.prompt(request.messages, tools=request.tools)
        (made,) = sample(self.policy, [prompt], request.sampling, shape=request.shape, record_experts=request.record_experts)
        yield GenerationChunk(
            text=made.text, tokens=made.tokens, logprobs=made.logprobs, finish_reason=made.finish_reason, prompt_tokens=prompt,
            routed_experts=made.experts or None, kept_log_mass=made.kept_log_mass or None,
        )  # fmt: skip

    async def count_tokens(self, request: GenerateRequest) -> int:
        return len(self.policy.chat.prompt(request.messages))


def talk(client: TestClient, episode: str, exchanges: int) -> list[dict[str, Any]]:
    """A client that sends everything it knows every time; returns the conversation."""
    history: list[dict[str, Any]] = []
    for _ in range(exchanges):
        history.append({"role": "user", "content": ASKED})
        body = {"model": "composer", "messages": history, "tensorzero::episode_id": episode, "seed": sum(episode.encode())}
        response = client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        history.append({"role": "assistant", "content": response.json()["choices"][0]["message"]["content"]})
    return history


def labelled(engine: Engine, turns: list[TurnServed], segments: MemorySegments | ParquetSegments, ratings: dict[str, float]) -> None:
    """Ingest the turns and one rating of the last answer of each episode, and label everything when it is due."""
    last = {turn.episode_id: turn for turn in turns if turn.kind == "answer"}
    said = [
        Observation(
            id=f"rating-of-{episode}", inference_id=last[episode].inference_id, name="rating", value=value, source="api",
            occurred_at=last[episode].finished_at + timedelta(seconds=1),
        )
        for episode, value in ratings.items()
    ]  # fmt: skip
    store = SqlEffects(engine, rules=lambda: RULES, segments=segments)
    effects = [applied(effect, offset=place) for place, effect in enumerate([*turns, *said])]
    end = max(turn.finished_at for turn in turns) + timedelta(seconds=2)
    store.apply(EffectBatch(events=tuple(effects)), now=end)
    config = PolicyConfig(model="m", base_name="b", base_model="B", held_out_share=0.0)
    rules = parse_rule_set(ONLY_RATING)
    due = label_due(SqlLabels(engine), policy="composer", config=config, rule_set=rules, now=end + timedelta(seconds=90), limit=1000)
    assert due == len(turns)


def cut(engine: Engine, turns: list[TurnServed]) -> BatchManifest:
    now = max(turn.finished_at for turn in turns) + timedelta(minutes=5)
    config = BatchingConfig(min_turns=8, max_turns_per_actor=1000)
    return cut_batch(SqlBatchStore(engine), policy="composer", slot=0, champion=CHAMPION, anchor=CHAMPION, config=config, now=now)


def test_a_long_episode_is_served_labelled_and_trained_on(sqlite_engine: Engine, tiny_model: Path, tmp_path: Path) -> None:
    inbox, segments = MemoryInbox(), MemorySegments()
    served_by = TinyEngine(load_policy(tiny_model, dtype=torch.float32))
    client = TestClient(create_app(collaborators(inbox=inbox, engines=served_by, policies={"composer": CONFIG})))
    histories = [talk(client, episode, 14) for episode in ("pleased", "annoyed")]
    turns = [msgspec.json.decode(event.data, type=TurnServed) for event in events_of(inbox, EventType.TURN)]
    summaries = [turn for turn in turns if turn.kind == "summary"]
    assert {turn.episode_id for turn in summaries} == {"pleased", "annoyed"}
    assert min(len(served_by.policy.chat.prompt(history)) for history in histories) > 1.5 * WINDOW, "no model could see all of it at once"
    assert all(len(turn.prompt_tokens) + len(turn.completion_tokens) <= WINDOW for turn in turns)

    labelled(sqlite_engine, turns, segments, {"pleased": 1.0, "annoyed": -1.0})
    batch = cut(sqlite_engine, turns)
    paid = {item.inference_id: item.reward for item in batch.items}
    assert paid == {turn.inference_id: 1.0 if turn.episode_id == "pleased" else -1.0 for turn in turns}, "the chain's end pays all of it"

    run = trained(batch, tiny_model, segments, tmp_path)
    assert run.metrics["turns"] == len(turns)
    assert run.metrics["left_out"] == {}
    assert run.metrics["mismatch"] < 1e-6, "summaries and answers alike are scored exactly as they were sampled"


@pytest.mark.parametrize("architecture", list(Architecture))
def test_the_experts_that_served_a_turn_are_logged_and_replayed(sqlite_engine: Engine, tmp_path: Path, architecture: Architecture) -> None:
    model = tmp_path / "moe"
    write_tiny_moe(model, architecture)
    inbox, segments = MemoryInbox(), MemorySegments()
    served_by = TinyEngine(load_policy(model, dtype=torch.bfloat16))
    client = TestClient(create_app(collaborators(inbox=inbox, engines=served_by, policies={"composer": CONFIG})))
    for number in range(8):
        talk(client, f"episode-{number}", 1)
    turns = [msgspec.json.decode(event.data, type=TurnServed) for event in events_of(inbox, EventType.TURN)]
    assert all(turn.routed_experts is not None and len(turn.routed_experts) == len(turn.completion_tokens) for turn in turns)
    labelled(sqlite_engine, turns, segments, {f"episode-{number}": number / 8 for number in range(8)})
    batch = cut(sqlite_engine, turns)
    replayed = trained(batch, model, segments, tmp_path / "with")
    alone = msgspec.structs.replace(TRAINING, router_replay=RouterReplayConfig(enabled=False))
    without = trained(batch, model, segments, tmp_path / "without", config=alone)
    assert replayed.metrics["mismatch"] <= without.metrics["mismatch"]


GREETING = {
    "type": "object", "required": ["word", "times"], "additionalProperties": False,
    "properties": {"word": {"enum": ["hi", "hello"]}, "times": {"type": "integer", "minimum": 1, "maximum": 3}},
}  # fmt: skip
GREET = {"type": "function", "function": {"name": "greet", "parameters": {"$defs": {"g": GREETING}, "$ref": "#/$defs/g"}}}
SHAPED: dict[str, dict[str, Any]] = {
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "greeting", "schema": GREETING}}, "top_p": 0.9},
    "required": {"tools": [GREET], "tool_choice": "required", "parallel_tool_calls": False},
    "named": {"tools": [GREET], "tool_choice": {"type": "function", "function": {"name": "greet"}}, "temperature": 1.2},
    "penalised": {"frequency_penalty": 1.5, "presence_penalty": -0.5, "logit_bias": {"300": 8}, "top_k": 20},
}
WIDE = policy_config(max_context_tokens=2048, max_tokens=120, held_out_share=0.0)


def test_shaped_answers_keep_to_their_form_and_are_trained_on_under_it(sqlite_engine: Engine, tiny_model: Path, tmp_path: Path) -> None:
    inbox, segments = MemoryInbox(), ParquetSegments(str(tmp_path / "segments"))
    served_by = TinyEngine(load_policy(tiny_model, dtype=torch.float32))
    served_by.policy = replace(served_by.policy, context=2048)
    client = TestClient(create_app(collaborators(inbox=inbox, engines=served_by, policies={"composer": WIDE})))
    for number, (kind, asked) in enumerate([*SHAPED.items()] * 3):
        body = {"model": "composer", "messages": [{"role": "user", "content": ASKED}], "seed": number, **asked}
        body |= {"tensorzero::episode_id": f"{kind}-{number}"}
        response = client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        if kind == "schema":
            assert satisfies(json.loads(choice["message"]["content"]), GREETING)
        if kind in ("required", "named"):
            (call,) = choice["message"]["tool_calls"]
            assert (call["function"]["name"], call["verdict"], choice["finish_reason"]) == ("greet", "valid", "tool_calls")
    turns = [msgspec.json.decode(event.data, type=TurnServed) for event in events_of(inbox, EventType.TURN)]
    assert all(turn.shape for turn in turns)
    labelled(sqlite_engine, turns, segments, {turn.episode_id: number % 3 / 2 for number, turn in enumerate(turns)})
    batch = cut(sqlite_engine, turns)
    run = trained(batch, tiny_model, segments, tmp_path / "under-it")
    assert (run.metrics["turns"], run.metrics["left_out"]) == (len(turns), {})
    assert run.metrics["mismatch"] < 1e-6
    assert run.candidate not in (None, CHAMPION)

    plain = Shapeless(segments)
    wrong = trained(batch, tiny_model, plain, tmp_path / "without", status=RunStatus.HELD)
    assert wrong.hold_reason is HoldReason.ENGINE_MISMATCH, "what the shape was decides what the logged probabilities mean"


class Shapeless(MemorySegments):
    """Segments that have lost what shaped their turns."""

    def __init__(self, real: ParquetSegments) -> None:
        super().__init__()
        self.real = real

    def read(self, locations: Iterable[tuple[str, str]]) -> dict[str, TurnPayload]:
        return {name: replace(payload, shape=None) for name, payload in self.real.read(locations).items()}


def trained(
    batch: BatchManifest, model: Path, segments: TrajectoryStore, folder: Path, *, config: TrainingConfig = TRAINING,
    status: RunStatus = RunStatus.SUCCEEDED,
) -> TrainingRun:  # fmt: skip
    """The update on this batch, with the model as champion."""
    ports = replace(fake_ports(folder), trajectories=segments)
    assert isinstance(ports.weights, FakeWeights)
    shutil.copytree(model, ports.weights.folder / CHAMPION)
    parent = version_of(CHAMPION)
    run = train(batch, run_id="run", parent=parent, anchor=parent, config=config, ports=ports)
    assert run.status is status, run.message
    return run
