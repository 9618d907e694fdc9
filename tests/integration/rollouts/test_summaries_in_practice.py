"""Self-written summaries of agents at practice: two gateways that share an episode, drawn triggers, and one update over the chains."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import msgspec
import torch
from sqlalchemy import Engine, select

from app.api.chat.summary import trigger_of
from app.db.engine import reading
from app.db.ingestion.episodes import SqlEpisodes
from app.db.ingestion.inbox import SqlInbox
from app.db.ingestion.streams import SqlEffects
from app.db.learning.batches import SqlBatchStore
from app.db.learning.labels import SqlLabels
from app.db.learning.rollouts import SqlRollouts
from app.db.tables import inbox
from app.domain.policies import PolicyConfig, SummaryConfig
from app.domain.telemetry.events import EventType, Observation
from app.domain.telemetry.streams import EffectBatch
from app.domain.telemetry.turns import TurnServed
from app.main import create_app
from app.policy.model import load_policy
from pipelines.batching import BatchingConfig, cut_batch
from pipelines.labelling.labeller import label_due
from pipelines.labelling.rule_set import parse_rule_set
from pipelines.rollouts.config import RolloutsConfig
from pipelines.rollouts.dispatch import Dispatch, Kept
from pipelines.rollouts.episode import Workplace
from pipelines.rollouts.grading import Grader
from pipelines.rollouts.service import Service
from pipelines.rollouts.tasks import Launch, TaskData
from tests.fakes.gateway import CHAMPION, collaborators, policy_config, serving
from tests.fakes.served import applied
from tests.fakes.streaming import MemorySegments
from tests.integration.rollouts.practising import BOXES
from tests.integration.rollouts.test_practised_to_trained import EVEN, GRADED
from tests.integration.training.test_served_to_trained import ASKED, RULES, WINDOW, TinyEngine, trained

EXCHANGES = 10
POLICY = policy_config(
    max_context_tokens=WINDOW, max_tokens=16, held_out_share=0.0,
    summary=SummaryConfig(trigger_tokens=130, max_tokens=16, instruction="Summarise.", spread=0.5),
)  # fmt: skip
TASK = TaskData(
    taskset="talk", key="cats", instruction="unused", files={"README": ""}, answer_file="answer.txt", editable=("answer.txt",),
    tests={"hidden/test_it.py": EVEN}, expected=("hidden/test_it.py::test_it",), gold={"answer.txt": "ab"}, most_turns=EXCHANGES,
    deadline_s=120,
)  # fmt: skip
TALK = f"""
import json, sys, urllib.request
endpoint, key = sys.argv[1:]
history = []
for number in range({EXCHANGES}):
    history.append({{"role": "user", "content": {ASKED!r}}})
    body = json.dumps({{"messages": history, "max_tokens": 16}}).encode()
    asked = urllib.request.Request(endpoint + "/v1/chat/completions", body, {{"authorization": "Bearer " + key}})
    said = json.loads(urllib.request.urlopen(asked).read())["choices"][0]["message"]["content"]
    history.append({{"role": "assistant", "content": said}})
open("answer.txt", "w").write(said)
"""


class Talker:
    """A harness that asks the same again and again, and sends everything that was said every time."""

    name, hash = "talker", "1"

    def launch(self, endpoint: str, secret: str, data: TaskData, *, model: str, python: str) -> Launch:
        return Launch(argv=(python, "-I", "-S", "-c", TALK, endpoint, secret), files={})


@dataclass
class Alternating(httpx.BaseTransport):
    """A balancer: each request goes to the next gateway."""

    urls: Iterator[str]
    inner: httpx.HTTPTransport = field(default_factory=httpx.HTTPTransport)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.url = httpx.URL(next(self.urls)).join(request.url.raw_path.decode())
        return self.inner.handle_request(request)

    def close(self) -> None:
        self.inner.close()


@contextmanager
def replicas(engine: Engine, model: Path, count: int) -> Iterator[list[str]]:
    """Addresses of gateways that share nothing but the database."""
    policy, urls = load_policy(model, dtype=torch.float32), list[str]()
    with ExitStack() as held:
        for _ in range(count):
            door = SqlInbox(engine)
            held.callback(door.close)
            given = collaborators(inbox=door, engines=TinyEngine(policy), policies={"composer": POLICY}, episodes=SqlEpisodes(engine))
            urls.append(held.enter_context(serving(create_app(given))))
        yield urls


def written(engine: Engine, kind: EventType, of: type[Any]) -> list[Any]:
    with reading(engine) as connection:
        payloads = connection.execute(select(inbox.c.payload).where(inbox.c.type == kind.value).order_by(inbox.c.seq)).scalars().all()
    return [msgspec.json.decode(raw, type=of) for raw in payloads]


def practise(engine: Engine, folder: Path, urls: list[str]) -> dict[str, int]:
    """A group of four tries, each turn of which may meet another gateway."""

    def connect(headers: Mapping[str, str]) -> httpx.Client:
        return httpx.Client(transport=Alternating(cycle(urls)), base_url="http://127.0.0.1", headers=dict(headers))

    kept = Kept(folder)
    workplace = Workplace(
        boxes=BOXES, grader=Grader(boxes=BOXES), service=Service(connect, "composer"), harness=Talker(), journal_of=kept.journal,
        session_of=kept.session, keep_session=kept.keep,
    )  # fmt: skip
    dispatch = Dispatch(
        policy="composer", book=SqlRollouts(engine), tasks={"talk": {"cats": TASK}}, workplace=workplace, kept=kept,
        config=RolloutsConfig(group_size=4, slots=2),
    )  # fmt: skip
    return dispatch.run(groups=1)


def test_a_chain_with_its_summaries_is_served_by_several_gateways_and_trained_on_as_one(
    sqlite_engine: Engine, tiny_model: Path, tmp_path: Path
) -> None:
    with replicas(sqlite_engine, tiny_model, 2) as urls:
        counted = practise(sqlite_engine, tmp_path, urls)
    assert sum(counted.values()) == 4
    assert set(counted) <= {"solved", "failed"}
    turns: list[TurnServed] = written(sqlite_engine, EventType.TURN, TurnServed)
    said: list[Observation] = written(sqlite_engine, EventType.OBSERVATION, Observation)
    summaries = [turn for turn in turns if turn.kind == "summary"]
    stand_for = [(turn.episode_id, turn.tags["summary_messages"]) for turn in summaries]
    assert {episode for episode, _ in stand_for} == {turn.episode_id for turn in turns}, "every try outgrew its context"
    assert len(stand_for) == len(set(stand_for)), "no gateway wrote again what another had written"
    assert {turn.source for turn in summaries} == {"rollout:talk"}
    assert {turn.tags["group"] for turn in summaries} == {turn.tags["group"] for turn in turns}
    for turn, covered in with_cover(turns):
        trigger = trigger_of(POLICY.summary, turn.episode_id, practised=True)(covered)
        is_shortest = len(turn.messages) <= 2  # a summary and what was asked last
        assert is_shortest or len(turn.prompt_tokens) < trigger, "each was fed a context below the trigger that was drawn for it"

    batch = cut(sqlite_engine, turns, said, segments := MemorySegments())
    paid = {one.episode_id: one.value for one in said}
    assert {item.inference_id: item.reward for item in batch.items} == {turn.inference_id: paid[turn.episode_id] for turn in turns}
    assert {item.group for item in batch.items} == {turns[0].tags["group"]}
    run = trained(batch, tiny_model, segments, tmp_path / "trained")
    assert (run.metrics["turns"], run.metrics["left_out"]) == (len(turns), {})
    assert run.metrics["mismatch"] < 1e-6, "what was sampled is scored as it was sampled, behind summaries too"


def with_cover(turns: list[TurnServed]) -> Iterator[tuple[TurnServed, int]]:
    """Each answer, and how many messages a summary stood for when it was given."""
    covered: dict[str, int] = {}
    for turn in turns:
        if turn.kind == "summary":
            covered[turn.episode_id] = max(covered.get(turn.episode_id, 0), int(turn.tags["summary_messages"]))
        else:
            yield turn, covered.get(turn.episode_id, 0)


def cut(engine: Engine, turns: list[TurnServed], said: list[Observation], segments: MemorySegments) -> Any:
    """The batch of what was practised; where all tries were paid alike one is paid otherwise, so that there is something to learn."""
    if len({one.value for one in said}) == 1:
        said[0] = msgspec.structs.replace(said[0], value=1.0 - said[0].value)
    store = SqlEffects(engine, rules=lambda: RULES, segments=segments)
    end = max(turn.finished_at for turn in turns) + timedelta(minutes=1)
    store.apply(EffectBatch(events=tuple(applied(effect, offset=place) for place, effect in enumerate([*turns, *said]))), now=end)
    config, now = PolicyConfig(model="m", base_name="b", base_model="B"), end + timedelta(minutes=5)
    label_due(
        SqlLabels(engine), policy="composer", config=config, rule_set=parse_rule_set(GRADED), now=now, limit=1000, learn_from_rollouts=True
    )
    return cut_batch(
        SqlBatchStore(engine), policy="composer", slot=0, champion=CHAMPION, anchor=CHAMPION, now=now,
        config=BatchingConfig(min_turns=8, rollout_share=1.0),
    )  # fmt: skip
