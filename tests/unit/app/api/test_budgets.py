"""What one request may cost: caps before the work, and the work beside the event loop."""

import asyncio
import gc
import gzip
import json
import random
import threading
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from app.api.chat.conversations import Conversations
from app.api.chat.sizes import BODY_BYTES, largest_body
from app.api.entry.access import EVERYBODY, WAIT_S
from app.api.telemetry.drafts import LONG_BYTES
from app.api.telemetry.drafts import members as members_of
from app.api.telemetry.intake import COUNTED_BYTES, Limits, characters, more_than
from app.domain.access import Scope
from app.domain.errors import BadRequest
from app.domain.policies import SummaryConfig
from app.domain.release.assignment import Arm
from app.main import create_app
from tests.fakes.gateway import FixedReads, MemoryEpisodes, MemoryKeys, ScriptedEngines, collaborators, policy_config
from tests.fakes.inbox import MemoryInbox

AT = "2026-11-21T12:00:00Z"
JSON = {"content-type": "application/json"}
LONG = {"composer": policy_config(max_context_tokens=300_000)}
"""A policy whose context takes bodies of megabytes."""


def service(**changes: Any) -> tuple[TestClient, MemoryInbox, ScriptedEngines]:
    inbox, engines = MemoryInbox(), ScriptedEngines()
    app = create_app(collaborators(inbox=inbox, engines=engines, **changes))
    return TestClient(app, raise_server_exceptions=False), inbox, engines


def chat(**changes: Any) -> dict[str, Any]:
    return {"model": "composer", "messages": [{"role": "user", "content": "x"}]} | changes


def measured(ask: Callable[[], Any]) -> tuple[Any, int]:
    """The answer, and the bytes that were taken at most meanwhile."""
    tracemalloc.start()
    try:
        return ask(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def refusal(answer: Any) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


def tool(**parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def test_megabytes_of_tools_are_refused_by_their_size_before_they_are_looked_at() -> None:
    client, inbox, engines = service(policies=LONG)
    wide = [tool(description="d" * 3_000_000)]
    many = [tool(enum=[[] for _ in range(100_000)])]
    assert refusal(client.post("/v1/chat/completions", json=chat(tools=wide))) == (400, "size", "tools")
    assert refusal(client.post("/v1/chat/completions", json=chat(tools=many))) == (400, "too_many_values", "tools")
    assert (inbox.events, engines.requests) == ({}, [])


def test_a_million_lists_in_a_message_are_counted_before_they_are_made() -> None:
    client, _, engines = service(policies=LONG)
    for content in ([[]] * 1_000_000, [{"type": "text", "text": "x"}, *([{}] * 60_000)]):
        answer = client.post("/v1/chat/completions", json=chat(messages=[{"role": "user", "content": content}]))
        assert refusal(answer) == (400, "too_many_values", "messages")
    code = [{"role": "user", "content": "a[{" * 100_000}]
    assert client.post("/v1/chat/completions", json=chat(messages=code)).status_code == 200, "brackets in a text are text"
    assert len(engines.requests) == 1


def test_more_messages_than_may_be_are_counted_by_their_roles_and_the_first_without_one_ends_the_reading() -> None:
    client, _, engines = service(policies=LONG)
    small = {"role": "user", "content": "word"}
    said = chat(messages=[small] * 6_667)
    answer, most = measured(lambda: client.post("/v1/chat/completions", json=said))
    assert refusal(answer) == (400, "too_many_values", "messages")
    assert most < 3_000_000, "the body, and not 6,667 objects"
    answer = client.post("/v1/chat/completions", json=chat(messages=[small, *([{"a": 1}] * 30_000)]))
    assert refusal(answer) == (400, "invalid_request", "messages[1].role")
    quoting = [small | {"content": '"role" ' * 10_000}]
    assert client.post("/v1/chat/completions", json=chat(messages=quoting)).status_code == 200, "a text may speak of roles"
    assert len(engines.requests) == 1


def test_lists_in_a_body_that_is_not_even_large_are_counted_before_they_are_made() -> None:
    client, inbox, _ = service()
    raw = json.dumps(chat(messages=[{"role": "user", "content": [[]] * 64_000}])).encode()
    client.post("/v1/chat/completions", json=chat())
    answer, most = measured(lambda: client.post("/v1/chat/completions", content=raw, headers=JSON))
    assert refusal(answer) == (400, "too_many_values", "messages")
    assert most < 2_500_000, "the body is copied some times, but 64,000 lists take 4 MB more"
    assert len(inbox.events) == 2, "of the small one"


def test_a_body_that_no_model_here_takes_is_refused_by_what_it_announces_and_not_read() -> None:
    """Clients know this refusal: they shorten the conversation."""

    reads: list[int] = []

    async def asked(app: Any, length: int) -> tuple[int, bytes]:
        said: list[Any] = []
        headers = [(b"host", b"testserver"), (b"content-type", b"application/json"), (b"content-length", str(length).encode())]
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers, "query_string": b""}

        async def unread() -> Any:
            reads.append(length)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            said.append(message)

        await app(scope, unread, send)
        return said[0]["status"], b"".join(message.get("body", b"") for message in said)

    small, long = (create_app(collaborators(policies=policies)) for policies in ({"composer": policy_config()}, LONG))
    status, body = asyncio.run(asked(small, 400_000))
    assert (status, json.loads(body)["error"]["code"]) == (400, "context_length_exceeded")
    assert asyncio.run(asked(long, 5_000_000))[0] == 400
    assert reads == []
    asyncio.run(asked(long, 4_000_000))
    assert reads == [4_000_000]


def test_the_largest_body_goes_with_the_longest_context_and_is_as_large_as_a_conversation_may_be_that_is_summarised() -> None:
    limits = Limits(chat_bytes=3_000_000, tool_chars=1000, summarised_chars=500_000)
    rest = 1000 + BODY_BYTES
    assert largest_body([policy_config(max_context_tokens=n) for n in (100, 10_000)], limits) == 160_000 + rest
    assert largest_body([policy_config(summary=SummaryConfig(trigger_tokens=50))], limits) == 500_000 + rest
    assert largest_body([policy_config(max_context_tokens=1_000_000)], limits) == 3_000_000
    assert largest_body([], limits) == rest


def test_what_a_long_request_asks_is_understood_beside_the_event_loop() -> None:
    @dataclass
    class Noting(dict[str, Any]):
        """Policies that note who looks."""

        threads: list[str] = field(default_factory=list[str])

        def get(self, key: str, default: Any = None) -> Any:
            self.threads.append(threading.current_thread().name)
            return super().get(key, default)

    policies = Noting()
    policies["composer"] = policy_config()
    client, _, _ = service(policies=policies)
    long = chat(messages=[{"role": "user", "content": "w " * 30_000}])
    assert client.post("/v1/chat/completions", json=long).status_code == 200
    assert [name.split("_")[0] for name in policies.threads] == ["workshop"]


def test_episodes_that_are_remembered_are_none_of_the_collector_s_business() -> None:
    """It would walk through a hundred thousand of them, twenty times a second, while somebody's lists are decoded."""
    conversations = Conversations(MemoryEpisodes())
    for number in range(1000):
        arm = Arm(digest="c" * 64, release_id=None, stage="champion", arm="champion", probability=1.0, share=0.0, holdback=0.0)
        conversations.remember(f"e{number}", policy="composer", arm=arm, inference_id=f"i{number}")
    known = [asyncio.run(conversations.find(f"e{number}", "composer")) for number in range(0, 1000, 100)]
    assert all(one is not None and one.last_inference_id.startswith("i") for one in known)
    assert not any(gc.is_tracked(one) or gc.is_tracked(one.arm) for one in known if one is not None)


def test_records_that_are_refused_leave_no_circles_for_the_collector() -> None:
    """Each exception held the frame that held all exceptions: thousands of objects a request, found 20 ms at a time."""
    client, inbox, _ = service()
    record = {"eventName": "gen_ai.evaluation.result", "attributes": [{"key": "a", "value": {"stringValue": "b"}}]}
    logs = {"resourceLogs": [{"scopeLogs": [{"logRecords": [record] * 400}]}]}
    scores = [{"id": f"s{n}", "traceId": "t", "name": "rating", "value": {"a": 1}} for n in range(400)]
    for path, body in (("/v1/logs", logs), ("/api/public/scores", scores)):
        client.post(path, json=body)
        gc.collect()
        gc.disable()
        try:
            answer = client.post(path, json=body)
            circles = gc.collect()
        finally:
            gc.enable()
        assert answer.status_code in (200, 400)
        assert circles < 400, (path, circles)
    assert inbox.events == {}


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
    client.post(path, content=b"[1]", headers=JSON)
    answer, most = measured(lambda: client.post(path, content=body, headers=JSON))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_events")
    assert most < 12_000_000, "the body itself is copied some times, but its members are not made: those take 40 MB"
    assert inbox.events == {}


def test_a_bomb_is_given_up_when_the_first_of_it_is_unpacked() -> None:
    client, inbox, _ = service()
    bomb = gzip.compress(b"[" + b" " * 50_000_000 + b"]")
    client.post("/v1/events", content=gzip.compress(b"[]"), headers=JSON | {"content-encoding": "gzip"})
    answer, most = measured(lambda: client.post("/v1/events", content=bomb, headers=JSON | {"content-encoding": "gzip"}))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "gzip")
    assert most < 1_500_000, "4.9 MB would be a hundred times its size"
    assert inbox.events == {}


def test_what_comes_packed_may_not_be_much_larger_than_what_does_not() -> None:
    client, inbox, _ = service()
    drawn = random.Random(0)
    event = {"inference_id": "i", "name": "comment", "occurred_at": AT}
    events = [event | {"id": f"e{n}", "value": drawn.randbytes(50_000).hex()} for n in range(30)]
    codes = []
    for count in (15, 30):
        packed = gzip.compress(json.dumps(events[:count]).encode())
        codes.append(client.post("/v1/events", content=packed, headers=JSON | {"content-encoding": "gzip"}).status_code)
    assert codes == [202, 413]
    assert len(inbox.events) == 15
    small = gzip.compress(b"[]")
    for broken in (small[:-1], small[:-9], small + b"x"):
        answer = client.post("/v1/events", content=broken, headers=JSON | {"content-encoding": "gzip"})
        assert answer.json()["error"]["code"] == "encoding"


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
    answer = client.post(path, json={"metadata": [[]] * 21_000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_values")
    assert inbox.events == {}


@pytest.mark.parametrize(("path", "said"), [("/v1/completions", "prompt"), ("/v1/responses", "input")])
def test_another_style_s_body_may_have_eighty_thousand_brackets_and_not_one_more(path: str, said: str) -> None:
    client, _, _ = service()
    bodies = [{"model": "nobody", said: "[" * count} for count in (79_999, 80_000)]  # and one that is around it
    codes = [client.post(path, json=body).json()["error"]["code"] for body in bodies]
    assert codes == ["model_not_found", "too_many_values"]


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
        held = [asyncio.ensure_future(app.chat.gateway.workshop.do(lambda: go.wait(20), chars=10_000, share=EVERYBODY)) for _ in range(16)]
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


def test_arguments_of_tools_are_judged_beside_the_event_loop() -> None:
    """A schema may take 30 ms per call: nobody else waits for that. Patiently, too: a full workshop loses no sampled turn."""
    app = create_app(collaborators(engines=ScriptedEngines(words=('<tool_call>{"name": "f", "arguments": {}}</tool_call>',))))

    async def story() -> list[httpx.Response]:
        go = threading.Event()
        held = [asyncio.ensure_future(app.chat.gateway.workshop.do(lambda: go.wait(20), chars=10_000, share=EVERYBODY)) for _ in range(16)]
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


@pytest.mark.parametrize("marks", [(b"{", b"["), (b'"role"',), (b"\x12\x00",)])
@pytest.mark.parametrize("before", [0, 1, COUNTED_BYTES - 4, COUNTED_BYTES - 1])
def test_what_stands_on_the_border_of_two_pieces_is_counted_once(marks: tuple[bytes, ...], before: int) -> None:
    raw = b"x" * before + b"".join(marks * 20_000)
    there = 20_000 * len(marks)
    assert more_than(there - 1, raw, *marks)
    assert not more_than(there, raw, *marks)
