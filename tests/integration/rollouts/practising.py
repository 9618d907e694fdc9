"""A gateway with engines that answer by a script, a book in a database, and dispatchers that practise against both."""

import os
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from inspect import isfunction
from pathlib import Path
from typing import Any

import httpx
import msgspec
from sqlalchemy import Engine

from app.db.learning.rollouts import SqlRollouts
from app.domain.ports import Engines
from app.domain.telemetry.events import EventType, Exposure, Observation
from app.domain.telemetry.serving import GenerateRequest, GenerationChunk
from app.domain.telemetry.turns import FinishReason, TurnServed
from app.main import create_app
from app.sandbox.bubblewrap import BubblewrapBoxes
from pipelines.rollouts.config import RolloutsConfig
from pipelines.rollouts.dispatch import Dispatch, Kept
from pipelines.rollouts.episode import Workplace
from pipelines.rollouts.grading import Grader
from pipelines.rollouts.harness import CodingAgent
from pipelines.rollouts.service import Service, client_of
from pipelines.rollouts.tasks import Harness, TaskData
from tests.fakes.gateway import FixedRoutes, collaborators, count_words, events_of, policy_config, serving
from tests.fakes.inbox import MemoryInbox

Answer = Callable[[GenerateRequest], str]
BOXES = BubblewrapBoxes()
LIBRARY = TaskData(
    taskset="toy", key="double", instruction="Write `double` in lib/numbers.py again.",
    files={"lib/__init__.py": "", "lib/numbers.py": 'def double(n):\n    """Twice n."""\n    raise RuntimeError("gone")\n',
           "test_seen.py": "from lib.numbers import double\n\ndef test_one():\n    assert double(1) == 2\n"},
    editable=("lib/",), tests={"hidden/test_it.py": "from lib.numbers import double\n\ndef test_it():\n    assert double(21) == 42\n"},
    expected=("hidden/test_it.py::test_it",), gold={"lib/numbers.py": "def double(n):\n    return 2 * n\n"}, deadline_s=60,
)  # fmt: skip
"""A library whose one function has lost its body."""


@dataclass
class AnsweringEngines:
    """Answers with what a function says of the request."""

    answer: Answer
    requests: list[GenerateRequest] = field(default_factory=list[GenerateRequest])

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerationChunk]:
        self.requests.append(request)
        yield GenerationChunk(text=self.answer(request), tokens=[100], logprobs=[-0.5])
        prompt = list(range(count_words(request.messages)))
        yield GenerationChunk(text="", tokens=[2], logprobs=[-0.1], finish_reason=FinishReason.STOP, prompt_tokens=prompt)

    async def count_tokens(self, request: GenerateRequest) -> int:
        return count_words(request.messages)

    async def score(self, request: Any) -> list[float]:
        return []


class Practice:
    """The service, and whoever practises with it."""

    def __init__(self, engine: Engine, folder: Path, answer: Answer | Engines, *, harness: Harness | None = None) -> None:
        self.inbox = MemoryInbox()
        self.engines: Any = AnsweringEngines(answer) if isfunction(answer) else answer
        held = {"composer": policy_config(held_out_share=0.0, max_context_tokens=100_000)}
        self.routes = FixedRoutes("composer")
        self.app = create_app(collaborators(inbox=self.inbox, routes=self.routes, policies=held, engines=self.engines))
        self.book, self.folder, self.harness = SqlRollouts(engine), folder, harness or CodingAgent()

        self.serving = serving(self.app)
        self.url = self.serving.__enter__()

    @classmethod
    def joining(cls, engine: Engine, folder: Path, url: str) -> "Practice":
        """The same service and book, from another process."""
        joined = cls.__new__(cls)
        joined.book, joined.folder, joined.harness, joined.url = SqlRollouts(engine), folder, CodingAgent(), url
        return joined

    def close(self) -> None:
        self.serving.__exit__(None, None, None)

    def connect(self, headers: Mapping[str, str]) -> httpx.Client:
        return client_of(self.url, headers)

    def dispatch(self, *tasks: TaskData, **more: Any) -> Dispatch:
        kept = Kept(self.folder)
        by_taskset: dict[str, dict[str, TaskData]] = {}
        for task in tasks:
            by_taskset.setdefault(task.taskset, {})[task.key] = task
        workplace = Workplace(
            boxes=BOXES, grader=Grader(boxes=BOXES), service=Service(self.connect, "composer"), harness=self.harness,
            journal_of=kept.journal, session_of=kept.session, keep_session=kept.keep,
        )  # fmt: skip
        config = RolloutsConfig(**({"group_size": 4, "slots": 2} | more.pop("config", {})))
        return Dispatch(policy="composer", book=self.book, tasks=by_taskset, workplace=workplace, config=config, kept=kept, **more)

    def turns(self) -> list[TurnServed]:
        return [msgspec.json.decode(event.data, type=TurnServed) for event in events_of(self.inbox, EventType.TURN)]

    def said(self) -> list[Observation]:
        return [msgspec.json.decode(event.data, type=Observation) for event in events_of(self.inbox, EventType.OBSERVATION)]

    def exposed(self) -> list[Exposure]:
        return [msgspec.json.decode(event.data, type=Exposure) for event in events_of(self.inbox, EventType.EXPOSURE)]


def calls(name: str, **arguments: Any) -> str:
    """An answer that calls one tool."""
    body = msgspec.json.encode({"name": name, "arguments": arguments}).decode()
    return f"<tool_call>\n{body}\n</tool_call>"


def said_by_tools(request: GenerateRequest) -> list[str]:
    return [str(message["content"]) for message in request.messages if message["role"] == "tool"]


def strangers() -> list[str]:
    """Processes of users of boxes."""
    found: list[str] = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and folder.stat().st_uid >= 1 << 30:
                found.append(folder.name)
        except OSError:
            continue
    return found if os.geteuid() == 0 else []


Open = Callable[[Answer], Practice]
"""The fixture `practising`."""
