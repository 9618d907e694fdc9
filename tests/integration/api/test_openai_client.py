"""The real `openai` client against the gateway: fake engines, a real inbox on SQLite."""

import asyncio
import time
from collections.abc import Iterator

import msgspec
import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam
from sqlalchemy import select

from app.db.engine import open_engine, reading
from app.db.ingestion.inbox import SqlInbox
from app.db.tables import inbox as inbox_table
from app.domain.ids import hash_actor
from app.domain.telemetry.events import EventType, Exposure
from app.domain.telemetry.turns import FinishReason, TurnServed
from app.main import create_app
from tests.fakes.gateway import CHAMPION, ScriptedEngines, collaborators, policy_config, serving


class Deployment:
    """A running service with its inbox."""

    def __init__(self, sqlite_url: str) -> None:
        self.database = open_engine(sqlite_url)
        self.inbox = SqlInbox(self.database, min_free_bytes=0)
        self.engines = ScriptedEngines()
        self.policies = {"composer": policy_config(engine_timeout_s=1.0)}

    def events(self) -> list[tuple[str, bytes]]:
        """(type, payload) of what is durable, in order."""
        with reading(self.database) as connection:
            return [(row.type, row.payload) for row in connection.execute(select(inbox_table).order_by(inbox_table.c.seq))]

    def turns(self) -> list[TurnServed]:
        """The durable turns."""
        return [msgspec.json.decode(payload, type=TurnServed) for kind, payload in self.events() if kind == EventType.TURN]


@pytest.fixture
def deployment(sqlite_url: str) -> Iterator[Deployment]:
    made = Deployment(sqlite_url)
    yield made
    made.inbox.close()
    made.database.dispose()


@pytest.fixture
def client(deployment: Deployment) -> Iterator[OpenAI]:
    app = create_app(collaborators(inbox=deployment.inbox, engines=deployment.engines, policies=deployment.policies))
    with serving(app) as url, OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
        yield client


ASKED: list[ChatCompletionMessageParam] = [{"role": "user", "content": "say hello"}]


def test_an_answer_carries_ids_version_and_usage_and_its_turn_is_durable(client: OpenAI, deployment: Deployment) -> None:
    answer = client.chat.completions.create(
        model="composer", messages=ASKED, user="ada", metadata={"task": "greeting", "ticket": "7"}, temperature=0.5, seed=7
    )  # fmt: skip
    assert answer.choices[0].message.content == "Hello, world!"
    assert answer.system_fingerprint == CHAMPION
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 5)
    (turn,) = deployment.turns()
    assert turn.inference_id == answer.id
    assert turn.episode_id == (answer.model_extra or {})["episode_id"]
    assert turn.actor == hash_actor("ada", salt="salt")
    assert (turn.segment, turn.tags) == ({"task": "greeting"}, {"ticket": "7"})
    assert turn.completion_tokens == [100, 101, 102, 103, 2]
    assert turn.logprobs == [-0.5, -0.5, -0.5, -0.5, -0.1]
    assert (turn.sampling.temperature, turn.sampling.seed) == (0.5, 7)


def test_the_exposure_is_durable_before_the_engine_is_asked(client: OpenAI, deployment: Deployment) -> None:
    seen: list[list[str]] = []
    deployment.engines.before_token = lambda index: seen.append([kind for kind, _ in deployment.events()])
    answer = client.chat.completions.create(model="composer", messages=ASKED)
    assert seen[0] == [EventType.EXPOSURE]
    exposure = msgspec.json.decode(deployment.events()[0][1], type=Exposure)
    assert (exposure.inference_id, exposure.digest, exposure.probability) == (answer.id, CHAMPION, 1.0)


def test_tokens_stream_as_they_are_sampled(client: OpenAI, deployment: Deployment) -> None:
    deployment.engines.before_token = lambda index: asyncio.sleep(0.1)
    arrived: list[float] = []
    pieces: list[str] = []
    with client.chat.completions.create(
        model="composer", messages=ASKED, stream=True, stream_options={"include_usage": True}, logprobs=True
    ) as stream:
        chunks = list(_noting(stream, arrived))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == "Hello, world!"
    assert arrived[-1] - arrived[0] > 0.25
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5
    items = [item for chunk in chunks if chunk.choices and chunk.choices[0].logprobs for item in chunk.choices[0].logprobs.content or []]
    assert [item.logprob for item in items] == [-0.5, -0.5, -0.5, -0.5, -0.1]
    assert {chunk.id for chunk in chunks} == {deployment.turns()[0].inference_id}


def _noting(stream: openai.Stream[ChatCompletionChunk], arrived: list[float]) -> Iterator[ChatCompletionChunk]:
    for chunk in stream:
        arrived.append(time.monotonic())
        yield chunk


def test_a_client_that_goes_away_leaves_an_aborted_turn(client: OpenAI, deployment: Deployment) -> None:
    deployment.engines.before_token = lambda index: asyncio.sleep(0.0 if index < 2 else 0.5)
    stream = client.chat.completions.create(model="composer", messages=ASKED, stream=True)
    next(iter(stream))
    stream.close()
    turn = _wait_for_turn(deployment)
    assert turn.finish_reason == FinishReason.ABORTED
    assert turn.logprobs is None, "the prompt's tokens are not known, so it cannot be trained on"
    assert deployment.engines.closed == 1


def test_a_client_that_goes_away_without_streaming_leaves_an_aborted_turn(client: OpenAI, deployment: Deployment) -> None:
    deployment.engines.before_token = lambda index: asyncio.sleep(0.4)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.1).chat.completions.create(model="composer", messages=ASKED)
    assert _wait_for_turn(deployment).finish_reason == FinishReason.ABORTED


def test_a_slow_engine_is_a_504_and_a_turn(client: OpenAI, deployment: Deployment) -> None:
    deployment.engines.before_token = lambda index: asyncio.sleep(5)
    with pytest.raises(openai.InternalServerError) as raised:
        client.chat.completions.create(model="composer", messages=ASKED)
    assert raised.value.status_code == 504
    assert deployment.turns()[0].finish_reason == FinishReason.TIMEOUT


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_error_is_a_502_and_a_turn(client: OpenAI, deployment: Deployment, stream: bool) -> None:
    deployment.engines.words = ()
    deployment.engines.finish_reason, deployment.engines.message = FinishReason.ERROR, "out of memory"
    with pytest.raises(openai.InternalServerError) as raised:
        client.chat.completions.create(model="composer", messages=ASKED, stream=stream)
    assert raised.value.status_code == 502
    assert "out of memory" in raised.value.message
    assert deployment.turns()[0].finish_reason == FinishReason.ERROR


def test_an_engine_error_in_mid_stream_reaches_the_client_and_the_record(client: OpenAI, deployment: Deployment) -> None:
    deployment.engines.finish_reason, deployment.engines.message = FinishReason.ERROR, "lost the device"
    with pytest.raises(openai.APIError, match="lost the device"):
        list(client.chat.completions.create(model="composer", messages=ASKED, stream=True))
    (turn,) = deployment.turns()
    assert (turn.finish_reason, turn.completion) == (FinishReason.ERROR, "Hello, world!")


def test_an_unknown_policy_is_a_404_that_names_the_known_ones(client: OpenAI, deployment: Deployment) -> None:
    with pytest.raises(openai.NotFoundError, match="composer") as raised:
        client.chat.completions.create(model="gpt-4", messages=ASKED)
    assert raised.value.code == "model_not_found"
    assert deployment.events() == []


def test_an_unknown_field_is_refused_by_name(client: OpenAI, deployment: Deployment) -> None:
    with pytest.raises(openai.BadRequestError, match="temprature") as raised:
        client.chat.completions.create(model="composer", messages=ASKED, extra_body={"temprature": 1})
    assert raised.value.param == "temprature"
    assert deployment.events() == []


def _wait_for_turn(deployment: Deployment) -> TurnServed:
    deadline = time.monotonic() + 60
    while not deployment.turns() and time.monotonic() < deadline:
        time.sleep(0.02)
    return deployment.turns()[0]


def test_a_model_is_retrieved_and_every_answer_has_a_request_id(client: OpenAI) -> None:
    found = client.models.retrieve("composer")
    assert (found.id, found.object, found.owned_by) == ("composer", "model", "ratchet")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")
    one, other = (client.chat.completions.create(model="composer", messages=ASKED) for _ in range(2))
    assert one._request_id
    assert one._request_id != other._request_id
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="composer", messages=ASKED, temperature=3)
    assert refused.value.request_id


def test_a_prompt_beyond_the_context_is_named_as_clients_expect_it(client: OpenAI) -> None:
    """The code and the words by which LiteLLM and LangChain recognise it."""
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="composer", messages=[{"role": "user", "content": "x" * 200_000}])
    assert refused.value.code == "context_length_exceeded"
    assert "this model's maximum context length is 2048 tokens" in str(refused.value)


def test_an_answer_brings_the_token_with_which_it_is_rated_streamed_or_not(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="composer", messages=ASKED)
    with client.chat.completions.create(model="composer", messages=ASKED, stream=True) as stream:
        first, *rest = list(stream)
    assert (whole.model_extra or {})["feedback_token"].startswith("ft_")
    assert (first.model_extra or {})["feedback_token"].startswith("ft_")
    assert [chunk for chunk in rest if "feedback_token" in (chunk.model_extra or {})] == []
