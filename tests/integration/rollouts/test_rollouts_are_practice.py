"""Rollouts from the request on: agents at practice are answered and labelled, and no gate, experiment, export or batch hears of them."""

from datetime import timedelta
from typing import Any

import msgspec
import pytest
from sqlalchemy import Engine, select
from starlette.testclient import TestClient

from app.db.engine import reading
from app.db.ingestion.streams import SqlEffects
from app.db.learning.batches import SqlBatchStore
from app.db.learning.decisions import read_decisions
from app.db.learning.labels import SqlLabels
from app.db.release.evidence import SqlEvidenceBook
from app.db.tables import exposures, labels, turns
from app.domain.errors import Held
from app.domain.learning.rewards import Exclusion
from app.domain.policies import PolicyConfig
from app.domain.telemetry.events import EventType, Exposure, Observation
from app.domain.telemetry.streams import EffectBatch, JoinRules
from app.domain.telemetry.turns import TurnServed
from app.main import create_app
from pipelines.batching import BatchingConfig, cut_batch
from pipelines.labelling.labeller import label_due
from pipelines.labelling.rule_set import default_toml, parse_rule_set
from tests.fakes.gateway import CHAMPION, FixedRoutes, collaborators, events_of, policy_config
from tests.fakes.inbox import MemoryInbox
from tests.fakes.served import applied
from tests.fakes.streaming import MemorySegments

RULES = JoinRules(policies={}, label_wait_s=60, lateness_s=600)
LABELLED = PolicyConfig(model="m", base_name="b", base_model="B", held_out_share=0.0)
LONG_AGO = timedelta(days=1)


class Service:
    """A gateway in the middle of a canary that takes everybody: whoever is part of it meets the candidate."""

    def __init__(self) -> None:
        self.inbox, self.routes = MemoryInbox(), FixedRoutes("composer")
        self.routes.canary("composer", share=1.0)
        held = {"composer": policy_config(held_out_share=0.0)}
        self.client = TestClient(create_app(collaborators(inbox=self.inbox, routes=self.routes, policies=held)))

    def session(self, **more: str) -> tuple[str, str]:
        """(episode, key)."""
        started = self.client.post("/rl/start_session", json={"task_id": "t", **more}).json()
        return started["session_id"], started["api_key"]

    def ask(self, key: str, **more: Any) -> str:
        """The id of an answer."""
        body = {"model": "composer", "messages": [{"role": "user", "content": "go on"}], **more}
        response = self.client.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
        assert response.status_code == 200, response.text
        return response.json()["id"]

    def turns(self) -> list[TurnServed]:
        return [msgspec.json.decode(event.data, type=TurnServed) for event in events_of(self.inbox, EventType.TURN)]

    def exposed(self) -> list[Exposure]:
        return [msgspec.json.decode(event.data, type=Exposure) for event in events_of(self.inbox, EventType.EXPOSURE)]


def test_a_rollout_is_answered_by_the_champion_and_exposes_nobody() -> None:
    service = Service()
    episode, key = service.session(rollout="small-functions")
    first, second = service.ask(key), service.ask(key, stream=False)
    assert [(t.inference_id, t.episode_id, t.source, t.version) for t in service.turns()] == [
        (first, episode, "rollout:small-functions", CHAMPION),
        (second, episode, "rollout:small-functions", CHAMPION),
    ]
    assert {t.assignment.arm for t in service.turns()} == {"rollout"}
    assert service.exposed() == []


def test_the_same_session_without_the_word_is_a_person_s_and_part_of_the_canary() -> None:
    service = Service()
    _, key = service.session()
    service.ask(key)
    assert [(t.source, t.assignment.arm) for t in service.turns()] == [("gateway", "candidate")]
    assert len(service.exposed()) == 1


@pytest.mark.parametrize("kind", [{}, {"rollout": "small-functions"}])
def test_an_agent_at_work_is_not_handed_the_token_that_rates_its_answers(kind: dict[str, str]) -> None:
    service = Service()
    _, key = service.session(**kind)
    body = {"model": "composer", "messages": [{"role": "user", "content": "go on"}]}
    asked = service.client.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
    anybody = service.client.post("/v1/chat/completions", json=body)
    assert "feedback_token" in anybody.text
    assert "feedback_token" not in asked.text + str(asked.headers)


def test_an_agent_cannot_choose_whether_it_practises() -> None:
    service = Service()
    _, key = service.session()
    service.ask(key, metadata={"source": "rollout:mine", "rollout": "mine"})
    assert [t.source for t in service.turns()] == ["gateway"]
    answer = service.client.post("/rl/start_session", json={"task_id": "t", "rollout": "x"}, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 403


def test_an_agent_at_practice_speaks_for_nobody() -> None:
    service = Service()
    _, practising = service.session(rollout="small-functions")
    _, person = service.session()
    service.ask(practising, user="alice")
    service.ask(person, user="alice")
    practised, served = service.turns()
    assert practised.actor is None
    assert served.actor is not None


def test_a_taskset_s_name_is_a_plain_word() -> None:
    answer = Service().client.post("/rl/start_session", json={"task_id": "t", "rollout": "../Tasks\n"})
    assert answer.status_code == 400


def waited(service: Service) -> list[float]:
    """How many waits were counted, for whole answers and for first tokens."""
    lines = service.client.get("/metrics").text.splitlines()
    counts = ("gen_ai_server_request_duration_seconds_count", "gen_ai_server_time_to_first_token_seconds_count")
    return [sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name)) for name in counts]


def test_how_long_people_wait_does_not_count_rollouts() -> None:
    service = Service()
    _, practising = service.session(rollout="small-functions")
    _, person = service.session()
    service.ask(practising)
    assert waited(service) == [0, 0]
    assert 'arm="rollout"' in service.client.get("/metrics").text
    service.ask(person)
    assert waited(service) == [1, 1]


def test_no_gate_export_or_batch_hears_of_rollouts_and_their_rewards(sqlite_engine: Engine) -> None:
    service = Service()
    episode, practising = service.session(rollout="small-functions")
    _, person = service.session()
    practised, served = service.ask(practising), service.ask(person)
    for told in ({"episode_id": episode}, {"inference_id": served}):
        assert service.client.post("/feedback", json={"metric_name": "rating", "value": 1.0, **told}).status_code == 200
    end = apply(service, sqlite_engine)
    later = end + timedelta(minutes=2)
    label_due(SqlLabels(sqlite_engine), policy="composer", config=LABELLED, rule_set=parse_rule_set(default_toml()), now=later, limit=100)
    with reading(sqlite_engine) as connection:
        assert {row.source for row in connection.execute(select(turns.c.source))} == {"gateway", "rollout:small-functions"}
        made = {row.inference_id: row for row in connection.execute(select(labels))}
        assert connection.execute(select(exposures.c.inference_id)).scalars().all() == [served]
    assert made[practised].reward == made[served].reward > 0, "labelled by the same rules"
    assert (made[practised].exclusion, made[served].exclusion) == (Exclusion.ROLLOUT, None)
    book = SqlEvidenceBook(sqlite_engine)
    assert [s.inference_id for s in book.canary_sessions("release-1")] == [served]
    assert book.history("composer", CHAMPION, since=end - LONG_AGO) == []
    assert book.sessions_of([practised]) == []
    assert [d.inference_id for d in read_decisions(sqlite_engine, policy="composer", since=None, until=None)] == [served]
    with pytest.raises(Held, match="1 rollout"):  # of the champion's, with a reward and probabilities: nothing else is against it
        cut_batch(
            SqlBatchStore(sqlite_engine), policy="composer", slot=0, champion=CHAMPION, anchor=CHAMPION,
            config=BatchingConfig(min_turns=1, max_turns_per_actor=1000), now=later,
        )  # fmt: skip


def apply(service: Service, engine: Engine) -> Any:
    """What the gateway wrote, as ingestion applies it; returns a moment after all of it."""
    kinds = {EventType.TURN: TurnServed, EventType.OBSERVATION: Observation, EventType.EXPOSURE: Exposure}
    effects = [msgspec.json.decode(event.data, type=kind) for of, kind in kinds.items() for event in events_of(service.inbox, of)]
    segments = MemorySegments()
    store = SqlEffects(engine, rules=lambda: RULES, segments=segments)
    end = max(turn.finished_at for turn in service.turns()) + timedelta(seconds=2)
    store.apply(EffectBatch(events=tuple(applied(effect, offset=place) for place, effect in enumerate(effects))), now=end)
    return end
