"""Both reward hacks of production in whole agent episodes, from the request to the advantage: a good end pays for no bad way there."""

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from sqlalchemy import Engine
from starlette.testclient import TestClient

from app.db.ingestion.streams import SqlEffects
from app.db.learning.batches import SqlBatchStore
from app.db.learning.labels import SqlLabels
from app.domain.policies import PolicyConfig
from app.domain.telemetry.events import EventType, Observation
from app.domain.telemetry.serving import GenerateRequest, GenerationChunk
from app.domain.telemetry.streams import EffectBatch, JoinRules
from app.domain.telemetry.turns import FinishReason, TurnServed
from app.main import create_app
from pipelines.batching import BatchingConfig, cut_batch
from pipelines.labelling.labeller import label_due
from pipelines.labelling.rule_set import default_toml, parse_rule_set
from pipelines.training.config import TrackerConfig
from pipelines.training.estimators.segment_tracker import SegmentTracker
from pipelines.training.numerics.advantage import advantages
from pipelines.training.samples import Limits, read_samples
from tests.fakes.gateway import CHAMPION, ScriptedEngines, collaborators, events_of, policy_config
from tests.fakes.inbox import MemoryInbox
from tests.fakes.served import applied
from tests.fakes.streaming import MemorySegments

TOOL = {"type": "function", "function": {"name": "edit", "parameters": {"type": "object", "required": ["file"]}}}
CALL = '<tool_call>{"name": "edit", "arguments": {"file": "a.py"}}</tool_call>'
BROKEN = '<tool_call>{"name": "edit", "argu'
QUESTION = "Which of the two files do you mean?"
DONE = "Done: the function adds its arguments now."
RULES = JoinRules(policies={}, label_wait_s=60, lateness_s=600)
LABELLED = PolicyConfig(model="m", base_name="b", base_model="B", held_out_share=0.0)


class Agent(ScriptedEngines):
    """Answers with the next line of the script."""

    def __init__(self) -> None:
        super().__init__()
        self.script: list[str] = []

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerationChunk]:
        yield GenerationChunk(
            text=self.script.pop(0), tokens=[5, 6, 7, 2], logprobs=[-0.5] * 4, finish_reason=FinishReason.STOP, prompt_tokens=[1, 2, 3]
        )


class Product:
    """An agent's product: a client of the service that runs the tools and reports how long the last edit stayed."""

    def __init__(self) -> None:
        self.inbox, self.agent = MemoryInbox(), Agent()
        policies = {"composer": policy_config(held_out_share=0.0)}
        self.client = TestClient(create_app(collaborators(inbox=self.inbox, engines=self.agent, policies=policies)))
        self.said: dict[str, tuple[str, str]] = {}
        """Episode and text of each answer."""

    def episode(self, name: str, *answers: str, kept: float) -> None:
        """Answer after answer, then the edit's fate on the last of them."""
        messages: list[dict[str, Any]] = []
        last = ""
        for answer in answers:
            self.agent.script.append(answer)
            messages.append({"role": "user", "content": "go on"})
            body = {"model": "composer", "messages": messages, "tools": [TOOL], "tensorzero::episode_id": name}
            response = self.client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            messages.append({"role": "assistant", "content": answer})
            last = response.json()["id"]
            self.said[last] = (name, answer)
        value = {"horizon_s": 30, "four_gram": kept}
        told = {"metric_name": "edit_persistence", "inference_id": last, "value": value}
        assert self.client.post("/feedback", json=told).status_code == 200


def learned(product: Product, engine: Engine) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """What each answer is paid, and its advantage, by episode and text: applied, labelled, cut, read, compared with the baseline."""
    turns = [msgspec.json.decode(event.data, type=TurnServed) for event in events_of(product.inbox, EventType.TURN)]
    said = [msgspec.json.decode(event.data, type=Observation) for event in events_of(product.inbox, EventType.OBSERVATION)]
    segments = MemorySegments()
    store = SqlEffects(engine, rules=lambda: RULES, segments=segments)
    end = max(turn.finished_at for turn in turns) + timedelta(seconds=2)
    effects = [applied(effect, offset=place) for place, effect in enumerate([*turns, *said])]
    store.apply(EffectBatch(events=tuple(effects)), now=end)
    rules, later = parse_rule_set(default_toml()), end + timedelta(minutes=2)
    label_due(SqlLabels(engine), policy="composer", config=LABELLED, rule_set=rules, now=later, limit=1000)
    batch = cut_batch(
        SqlBatchStore(engine), policy="composer", slot=0, champion=CHAMPION, anchor=CHAMPION,
        config=BatchingConfig(min_turns=2, max_turns_per_actor=1000), now=later,
    )  # fmt: skip
    samples, left_out = read_samples(batch, segments, Limits(vocabulary=1000, max_tokens=100))
    assert (len(samples), left_out) == (len(turns), {}), "every turn of a chain with an outcome is trained on"
    baselines = SegmentTracker(TrackerConfig(), None).baselines([sample.rewarded() for sample in samples])
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for sample, baseline in zip(samples, baselines, strict=True):
        reward = sample.item.reward
        (advantage, *_) = advantages(reward=reward, baseline=baseline, count=len(sample.logprobs))
        found.setdefault(product.said[sample.item.inference_id], []).append((round(reward, 3), advantage))
    return found


COSTS = -0.05 * 2 * ((1 + 4 / 256) ** 0.5 - 1)
"""What every answer of four tokens costs: the length penalty, weighted."""


def test_a_good_end_pays_for_no_broken_tool_call_on_the_way(sqlite_engine: Engine) -> None:
    product = Product()
    product.episode("honest", CALL, CALL, DONE, kept=1.0)
    product.episode("hacker", BROKEN, BROKEN, QUESTION, DONE, kept=1.0)
    product.episode("unlucky", CALL, DONE, kept=0.0)
    found = learned(product, sqlite_engine)
    # The outcome, 1 - 0.3, reaches every turn; beside it +0.1 for a call that parses, -1 for a broken one, -0.3 for the question.
    assert [reward for reward, _ in found["honest", CALL]] == pytest.approx([0.8 + COSTS] * 2, abs=1e-3)
    assert [reward for reward, _ in found["hacker", BROKEN]] == pytest.approx([-0.3 + COSTS] * 2, abs=1e-3)
    assert [reward for reward, _ in found["hacker", QUESTION]] == pytest.approx([0.4 + COSTS], abs=1e-3)
    assert [reward for reward, _ in found["hacker", DONE]] == pytest.approx([0.7 + COSTS], abs=1e-3)
    assert [reward for reward, _ in found["unlucky", CALL]] == pytest.approx([-0.2 + COSTS], abs=1e-3)
    assert all(advantage < 0 for _, advantage in found["hacker", BROKEN]), "a broken call is unlearned although the episode ended well"
    assert (
        min(a for _, a in found["honest", CALL]) > max(a for _, a in found["hacker", QUESTION]) > max(a for _, a in found["hacker", BROKEN])
    )


def test_dodging_a_hard_task_loses_to_trying_it(sqlite_engine: Engine) -> None:
    product = Product()
    for number in range(3):
        product.episode(f"easy-{number}", CALL, DONE, kept=1.0)
        product.episode(f"tries-{number}", CALL, DONE, kept=0.3)
        product.episode(f"breaks-{number}", CALL, BROKEN, kept=0.3)
        product.episode(f"asks-{number}", CALL, QUESTION, DONE, kept=0.3)
    found = learned(product, sqlite_engine)
    tries, breaks, asks = (found[episode, text][0][1] for episode, text in (("tries-0", DONE), ("breaks-0", BROKEN), ("asks-0", QUESTION)))
    assert tries > asks > breaks
    assert breaks < 0
    assert asks < 0
