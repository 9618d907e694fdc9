"""What one request may cost: caps before the work, and the work beside the event loop."""

import asyncio
import threading
import time
import tracemalloc
from functools import partial
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from app.api.entry.access import WAIT_S
from app.api.telemetry.drafts import LONG_BYTES
from app.api.telemetry.drafts import members as members_of
from app.api.telemetry.intake import Limits, characters
from app.api.workshop import Workshop
from app.domain.access import Scope
from app.domain.errors import BadRequest, Overloaded
from app.main import create_app
from tests.fakes.gateway import FixedReads, MemoryKeys, ScriptedEngines, collaborators, policy_config
from tests.fakes.inbox import MemoryInbox

AT = "2026-11-21T12:00:00Z"


def service(**changes: Any) -> tuple[TestClient, MemoryInbox, ScriptedEngines]:
    inbox, engines = MemoryInbox(), ScriptedEngines()
    app = create_app(collaborators(inbox=inbox, engines=engines, **changes))
    return TestClient(app, raise_server_exceptions=False), inbox, engines


def chat(**changes: Any) -> dict[str, Any]:
    return {"model": "composer", "messages": [{"role": "user", "content": "x"}]} | changes


def refusal(answer: Any) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


def tool(**parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def test_megabytes_of_tools_are_refused_by_their_size_before_they_are_looked_at() -> None:
    client, inbox, engines = service()
    wide = [tool(description="d" * 3_000_000)]
    many = [tool(enum=[[] for _ in range(100_000)])]
    assert refusal(client.post("/v1/chat/completions", json=chat(tools=wide))) == (400, "size", "tools")
    assert refusal(client.post("/v1/chat/completions", json=chat(tools=many))) == (400, "too_many_values", "tools")
    assert (inbox.events, engines.requests) == ({}, [])


def test_a_million_lists_in_a_message_are_counted_before_they_are_made() -> None:
    client, _, engines = service(policies={"composer": policy_config(max_context_tokens=10_000)})
    for content in ([[]] * 1_000_000, [{"type": "text", "text": "x"}, *([{}] * 60_000)]):
        answer = client.post("/v1/chat/completions", json=chat(messages=[{"role": "user", "content": content}]))
        assert refusal(answer) == (400, "too_many_values", "messages")
    code = [{"role": "user", "content": "a[{" * 100_000}]
    assert client.post("/v1/chat/completions", json=chat(messages=code)).status_code == 200, "brackets in a text are text"
    assert len(engines.requests) == 1


def test_a_prompt_that_no_tokenizer_fits_into_the_context_is_refused_before_anything_is_recorded() -> None:
    client, inbox, engines = service(policies={"composer": policy_config(max_context_tokens=100)})
    long = [{"role": "user", "content": "x" * 6401}]
    answer = client.post("/v1/chat/completions", json=chat(messages=long))
    assert refusal(answer) == (400, "context_length_exceeded", "messages")
    assert (inbox.events, engines.requests) == ({}, [])
    assert client.post("/v1/chat/completions", json=chat(messages=[{"role": "user", "content": "x" * 6000}])).status_code == 200


def test_a_value_of_a_hundred_thousand_parts_is_refused() -> None:
    client, inbox, _ = service()
    event = {"id": "e", "inference_id": "i", "name": "tool_call", "occurred_at": AT, "value": [[] for _ in range(60_000)]}
    (result,) = client.post("/v1/events", json=event).json()["results"]
    assert (result["status"], result["code"]) == ("rejected", "too_many_values")
    assert inbox.events == {}


@pytest.mark.parametrize("path", ["/v1/events", "/api/public/scores"])
def test_half_a_million_members_of_a_batch_are_refused_at_the_first_that_is_too_many(path: str) -> None:
    """Reading them all is one piece of 60 ms in which nobody else is answered."""
    client, inbox, _ = service()
    body = b"[" + b"1," * 499_000 + b"1]"
    client.post(path, content=b"[1]", headers={"content-type": "application/json"})
    tracemalloc.start()
    answer = client.post(path, content=body, headers={"content-type": "application/json"})
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_events")
    assert most < 12_000_000, "the body itself is copied some times, but its members are not made: those take 40 MB"
    assert inbox.events == {}


def test_a_batch_is_the_same_events_whether_its_members_are_counted_before_or_after() -> None:
    members = [b'{"n":%d}' % number for number in range(500)]
    short, long = b"[%s]" % b",".join(members), b"[%s]" % (b"," + b" " * 200).join(members)
    assert len(short) < LONG_BYTES < len(long)
    for body in (short, long):
        assert [bytes(member) for member in members_of(body, most=500)] == members
        with pytest.raises(BadRequest, match="more than 499"):
            members_of(body, most=499)
    for broken in (b"[1", b"{}", b"[1,]"):
        for padded in (broken, broken + b" " * LONG_BYTES):
            with pytest.raises(BadRequest):
                members_of(padded, most=500)


@pytest.mark.parametrize("path", ["/api/public/scores", "/v1/span_annotations", "/feedback", "/api/3.0/mlflow/traces/t/assessments"])
def test_a_dialect_s_body_of_lists_is_refused_before_they_are_made(path: str) -> None:
    client, inbox, _ = service()
    answer = client.post(path, json={"metadata": [[]] * 90_000})
    assert (answer.status_code, answer.json()["error"]["code"]) in ((400, "too_many_values"), (413, "body_too_large"))
    assert inbox.events == {}


@pytest.mark.parametrize("record", [b"\x12\x00", b"\x12\x02\x10\x09"], ids=["of nothing", "of a severity"])
def test_a_megabyte_of_telemetry_records_is_refused_at_the_first_that_is_too_many(record: bytes) -> None:
    """Half a million records of nothing kept everybody waiting for half a second."""
    client, inbox, _ = service()
    body = protobuf_field(1, protobuf_field(2, record * (990_000 // len(record))))
    answer = client.post("/v1/logs", content=body, headers={"content-type": "application/x-protobuf"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_values")
    assert inbox.events == {}


def protobuf_field(number: int, content: bytes) -> bytes:
    length, left = b"", len(content)
    while left > 127:
        length, left = length + bytes([left & 127 | 128]), left >> 7
    return bytes([number << 3 | 2]) + length + bytes([left]) + content


def test_events_of_many_values_are_looked_at_beside_the_event_loop_although_nobody_s_data_is_redacted() -> None:
    app = create_app(collaborators())
    small = {"id": "small", "inference_id": "i", "name": "tool_call", "occurred_at": AT, "value": {"name": "f", "ok": True}}
    large = small | {"id": "large", "value": {"name": "f", "ok": True, "arguments": [1] * 15_000}}

    async def story() -> list[int]:
        go = threading.Event()
        held = [asyncio.ensure_future(app.chat.gateway.workshop.do(lambda: go.wait(20), chars=10_000)) for _ in range(16)]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://testserver") as client:
            await asyncio.sleep(0)
            answers = [await client.post("/v1/events", json=event) for event in (small, large)]
            go.set()
            await asyncio.gather(*held)
            return [answer.status_code for answer in answers]

    assert asyncio.run(story()) == [202, 429], "the workshop is full, and the event loop does not do its work"


def test_more_text_than_is_searched_for_personal_data_is_refused_and_never_stored_unread() -> None:
    client, inbox, _ = service(policies={"composer": policy_config(redact=True)}, limits=Limits(redacted_chars=1000))
    event = {"id": "e", "inference_id": "i", "name": "comment", "occurred_at": AT}
    answers = [client.post("/v1/events", json=event | {"value": "a" * count}).json()["results"][0] for count in (1001, 1000)]
    assert [(answer["status"], answer.get("code")) for answer in answers] == [("rejected", "size"), ("accepted", None)]
    assert len(inbox.events) == 1


def test_whoever_asks_for_long_reports_keeps_nobody_from_being_let_in() -> None:
    """All threads that read for pages and reports are taken; keys are older than a service goes on with before it reads them again."""
    go = threading.Event()

    class Slow(FixedReads):
        def labels_report(self, policy: str) -> dict[str, Any]:
            assert go.wait(120)
            return super().labels_report(policy)

    keys = MemoryKeys()
    product, reader = ({"x-api-key": keys.add(scope)} for scope in (Scope.INGEST, Scope.READ))
    app = create_app(collaborators(keys=keys, reads=Slow()))
    event = {"inference_id": "i", "name": "undo", "value": True}

    async def story() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://testserver") as client:
            asked = partial(client.get, "/v1/labels/report", params={"policy": "composer"}, headers=reader)
            reports = [asyncio.ensure_future(asked()) for _ in range(64)]
            codes: list[int] = []
            began = time.monotonic()
            try:
                async with asyncio.timeout(60):
                    while time.monotonic() < began + WAIT_S + 1.5:
                        codes.append((await client.post("/v1/events", json=event, headers=product)).status_code)
                        await asyncio.sleep(0.1)
            finally:
                go.set()
                await asyncio.gather(*reports)
            return codes

    assert set(asyncio.run(story())) == {202}


def test_long_work_is_done_beside_the_event_loop_and_short_work_on_it() -> None:
    async def story() -> tuple[str, str]:
        workshop = Workshop()

        def name() -> str:
            return threading.current_thread().name

        return await workshop.do(name, chars=10), await workshop.do(name, chars=10_000)

    at_once, beside = asyncio.run(story())
    assert at_once == "MainThread"
    assert beside.startswith("workshop")


def test_the_loop_answers_while_the_workshop_works_and_a_full_one_says_so() -> None:
    async def story() -> int:
        workshop, go = Workshop(waiting=2), threading.Event()
        first, second = (asyncio.ensure_future(workshop.do(lambda: go.wait(20), chars=10_000)) for _ in range(2))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await workshop.do(lambda: True, chars=10_000)
        assert await workshop.do(lambda: 7, chars=1) == 7, "the loop is free"
        go.set()
        assert await asyncio.gather(first, second) == [True, True]
        return await workshop.do(lambda: 9, chars=10_000)

    assert asyncio.run(story()) == 9


def test_arguments_of_tools_are_judged_beside_the_event_loop() -> None:
    """A schema may take 30 ms per call: nobody else waits for that. Patiently, too: a full workshop loses no sampled turn."""
    app = create_app(collaborators(engines=ScriptedEngines(words=('<tool_call>{"name": "f", "arguments": {}}</tool_call>',))))

    async def story() -> list[httpx.Response]:
        go = threading.Event()
        held = [asyncio.ensure_future(app.chat.gateway.workshop.do(lambda: go.wait(20), chars=10_000)) for _ in range(16)]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://testserver") as client:
            calling = asyncio.ensure_future(client.post("/v1/chat/completions", json=chat(tools=[tool(type="object")])))
            others = [await client.post("/v1/chat/completions", json=chat()) for _ in range(3)]
            assert not calling.done()
            go.set()
            await asyncio.gather(*held)
            return [*others, await calling]

    *others, called = asyncio.run(story())
    assert [answer.status_code for answer in others] == [200, 200, 200]
    assert called.json()["choices"][0]["message"]["tool_calls"][0]["verdict"] == "valid"
    assert called.json()["choices"][0]["finish_reason"] == "tool_calls"


def test_characters_counts_names_and_texts_and_stops_where_it_is_told() -> None:
    assert characters({"ab": ["cd", {"e": "fgh"}], "n": 3}, at_most=100) == 9
    assert characters(["x" * 50] * 1000, at_most=100) <= 200
