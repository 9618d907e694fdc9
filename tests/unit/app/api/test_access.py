"""Keys, scopes and rates at the door."""

import asyncio
import logging
import time
from datetime import timedelta
from typing import Any

import pytest
from starlette.testclient import TestClient

from app.api.entry.access import Access
from app.api.entry.rates import Bucket
from app.api.entry.sessions import Sessions
from app.domain.access import ApiKey, Scope
from app.domain.errors import Overloaded, RatchetError, Unavailable
from app.main import create_app
from tests.fakes.clock import FrozenClock
from tests.fakes.gateway import MemoryKeys, collaborators, policy_config
from tests.fakes.inbox import MemoryInbox

EVENT = {"id": "e", "inference_id": "i", "name": "undo", "value": True, "occurred_at": "2026-11-21T12:00:00Z"}


SESSIONS = Sessions(lambda: ("a session secret",))


def post(client: TestClient, key: str | None, **headers: str) -> Any:
    return client.post("/v1/events", json=EVENT, headers=headers | ({"authorization": f"Bearer {key}"} if key else {}))


def service(keys: MemoryKeys, **changes: Any) -> tuple[TestClient, MemoryInbox]:
    inbox = MemoryInbox()
    app = create_app(collaborators(inbox=inbox, keys=keys, **changes))
    return TestClient(app, raise_server_exceptions=False), inbox


def test_without_keys_the_door_is_open_and_with_the_first_it_is_not() -> None:
    assert post(service(MemoryKeys())[0], None).status_code == 202
    keys = MemoryKeys()
    keys.add(Scope.INGEST)
    assert post(service(keys)[0], None).status_code == 401


@pytest.mark.parametrize("way", ["bearer", "x-api-key", "basic"])
def test_a_key_comes_in_any_of_three_ways(way: str) -> None:
    keys = MemoryKeys()
    key = keys.add(Scope.INGEST)
    client, _ = service(keys)
    if way == "basic":
        assert client.post("/v1/events", json=EVENT, auth=("whoever", key)).status_code == 202
    else:
        assert post(client, None, **{"bearer": {"authorization": f"Bearer {key}"}, "x-api-key": {"x-api-key": key}}[way]).status_code == 202


def test_wrong_expired_and_unscoped_keys_are_told_apart() -> None:
    keys, clock = MemoryKeys(), FrozenClock()
    good = keys.add(Scope.INGEST)
    expiring = keys.add(Scope.INGEST, expires_at=clock() + timedelta(hours=1))
    reader = keys.add(Scope.READ)
    admin = keys.add(Scope.ADMIN)
    client, inbox = service(keys, clock=clock)
    wrong = good[:-1] + ("A" if good[-1] != "A" else "B")
    assert [post(client, key).status_code for key in (good, expiring, admin)] == [202, 202, 202]
    assert [post(client, key).status_code for key in (wrong, "nonsense", "rk_00000000_x")] == [401, 401, 401]
    odd = client.post("/v1/events", json=EVENT, headers=[(b"authorization", "Bearer rs_é.ü".encode("latin-1"))])
    assert odd.status_code == 401
    refused = post(client, reader)
    assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
    clock.advance(3601)
    assert [post(client, key).status_code for key in (good, expiring)] == [202, 401]
    assert len(inbox.events) == 1


@pytest.mark.parametrize(
    ("method", "path", "scope"),
    [
        ("GET", "/v1/models", Scope.SAMPLE),
        ("POST", "/v1/chat/completions", Scope.SAMPLE),
        ("GET", "/v1/models", Scope.INGEST),
        ("POST", "/v1/chat/completions", Scope.INGEST),
        ("POST", "/feedback", Scope.INGEST),
        ("DELETE", "/feedback/x", Scope.INGEST),
        ("POST", "/api/public/scores", Scope.INGEST),
        ("POST", "/v1/span_annotations", Scope.INGEST),
        ("POST", "/v1/logs", Scope.INGEST),
        ("POST", "/rl/start_session", Scope.INGEST),
        ("POST", "/api/3.0/mlflow/traces/t/assessments", Scope.INGEST),
        ("GET", "/v1/runs", Scope.READ),
        ("GET", "/v1/versions", Scope.READ),
        ("GET", "/v1/labels/report?policy=composer", Scope.READ),
        ("GET", "/metrics", Scope.READ),
    ],
)
def test_every_endpoint_asks_for_its_scope(method: str, path: str, scope: Scope) -> None:
    keys = MemoryKeys()
    right, wrong = keys.add(scope), keys.add(Scope.INGEST if scope == Scope.READ else Scope.READ)
    client, _ = service(keys)
    codes = [client.request(method, path, headers={"x-api-key": key} if key else {}).status_code for key in ("", wrong, right)]
    assert codes[:2] == [401, 403]
    assert codes[2] not in (401, 403)


def test_probes_need_no_key() -> None:
    keys = MemoryKeys()
    keys.add(Scope.ADMIN)
    client, _ = service(keys)
    assert [client.get(path).status_code for path in ("/health", "/status", "/info")] == [200, 200, 200]


def test_no_page_of_ours_loads_a_script_from_another_host() -> None:
    client, _ = service(MemoryKeys())
    assert [client.get(path).status_code for path in ("/docs", "/redoc")] == [404, 404]


def test_a_key_for_another_policy_gets_no_answers_from_this_one() -> None:
    keys = MemoryKeys()
    key = keys.add(Scope.INGEST, policy="tab")
    client, _ = service(keys, policies={"composer": policy_config(), "tab": policy_config()})
    body = {"model": "composer", "messages": [{"role": "user", "content": "x"}]}
    assert client.post("/v1/chat/completions", json=body, headers={"x-api-key": key}).status_code == 403


def test_a_rate_is_kept_and_says_when_to_come_back() -> None:
    keys = MemoryKeys()
    key = keys.add(Scope.INGEST, rate_per_s=0.01)
    client, _ = service(keys)
    first, second = post(client, key), post(client, key)
    assert (first.status_code, second.status_code) == (202, 429)
    assert 90 <= int(second.headers["retry-after"]) <= 100


SCORE = {"traceId": "t", "name": "rating", "value": 1.0}
ANNOTATION = {"span_id": "s", "name": "rating", "annotator_kind": "HUMAN", "result": {"score": 1.0}}
RECORD = {"eventName": "gen_ai.evaluation.result", "attributes": [{"key": "gen_ai.evaluation.name", "value": {"stringValue": "rating"}}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/events", lambda n: [EVENT | {"id": f"e{i}"} for i in range(n)]),
        ("/v1/events", lambda n: [{"broken": i} for i in range(n)]),
        ("/api/public/scores", lambda n: [SCORE | {"id": f"s{i}"} for i in range(n)]),
        ("/v1/span_annotations", lambda n: {"data": [ANNOTATION | {"identifier": str(i)} for i in range(n)]}),
        ("/v1/logs", lambda n: {"resourceLogs": [{"scopeLogs": [{"logRecords": [RECORD] * n}]}]}),
    ],
)
def test_a_rate_counts_the_records_of_a_body_and_not_the_body(path: str, body: Any) -> None:
    keys = MemoryKeys()
    key = keys.add(Scope.INGEST, rate_per_s=10)
    client, inbox = service(keys)
    answers = [client.post(path, json=body(count), headers={"x-api-key": key}) for count in (8, 8)]
    assert answers[0].status_code not in (429, 503)
    assert answers[1].status_code == (503 if path == "/v1/logs" else 429), "8 of 10 tokens are spent"
    assert len(inbox.events) <= 8, "what is refused for its rate is not worked on"


def test_every_answer_says_what_is_left_of_the_rate() -> None:
    keys = MemoryKeys()
    key, free = keys.add(Scope.INGEST, rate_per_s=0.5), keys.add(Scope.INGEST)
    client, _ = service(keys)
    answers = [post(client, key) for _ in range(2)]
    said = [[answer.headers[f"ratelimit-{name}"] for name in ("limit", "remaining", "reset")] for answer in answers]
    assert [answer.status_code for answer in answers] == [202, 429]
    assert said == [["1", "0", "2"], ["1", "0", "2"]]
    assert "ratelimit-limit" not in post(client, free).headers
    assert len({answer.headers["x-request-id"] for answer in answers}) == 2


def test_a_batch_over_http_is_paid_for_before_the_next_one() -> None:
    keys = MemoryKeys()
    key = keys.add(Scope.INGEST, rate_per_s=10)
    client, inbox = service(keys)
    batches = [[EVENT | {"id": f"{batch}-{i}"} for i in range(500)] for batch in range(2)]
    answers = [client.post("/v1/events", json=batch, headers={"x-api-key": key}) for batch in batches]
    assert [answer.status_code for answer in answers] == [202, 429]
    assert 45 <= int(answers[1].headers["retry-after"]) <= 50
    assert len(inbox.events) == 500


def test_a_broken_body_costs_a_token_too() -> None:
    keys = MemoryKeys()
    key = keys.add(Scope.INGEST, rate_per_s=1)
    client, _ = service(keys)
    headers = {"x-api-key": key, "content-type": "application/json"}
    assert [client.post("/v1/events", content=b"[{", headers=headers).status_code for _ in range(2)] == [400, 429]


def test_a_bucket_refills_with_time_and_lets_a_large_batch_through_when_full() -> None:
    now = [0.0]
    bucket = Bucket(10, lambda: now[0])
    bucket.take(10)
    with pytest.raises(Overloaded) as raised:
        bucket.take(5)
    assert raised.value.retry_after_s == pytest.approx(0.5)
    now[0] = 0.5
    bucket.take(5)
    now[0] = 1.6
    bucket.take(500)


def test_a_batch_larger_than_the_bucket_is_paid_for_to_its_last_record() -> None:
    """500 at 10 a second are fifty seconds of them: one full bucket more is there after 50 s, and one record after 49.1."""
    now = [0.0]
    bucket = Bucket(10, lambda: now[0])
    bucket.take(500)
    assert bucket.headers() == [(b"ratelimit-limit", b"10"), (b"ratelimit-remaining", b"0"), (b"ratelimit-reset", b"50")]
    for second in range(1, 50):
        now[0] = float(second)
        with pytest.raises(Overloaded) as raised:
            bucket.take(10)
        assert raised.value.retry_after_s == pytest.approx(50 - second)
    now[0] = 50.0
    bucket.take(10)


def test_no_size_of_batch_lets_more_records_through_than_the_rate() -> None:
    """The rate of 1 a second let 30,000 records through in a minute, in batches of 500."""
    for size in (1, 7, 500):
        now, taken = [0.0], 0
        bucket = Bucket(1, lambda now=now: now[0])
        while now[0] < 3_600:
            try:
                bucket.take(size)
                taken += size
            except Overloaded:
                now[0] += 1.0
        assert 3_600 <= taken <= 3_600 + size


class SlowClock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


class BreakingKeys(MemoryKeys):
    """A database that stops answering."""

    broken = False

    def all(self) -> list[ApiKey]:
        if self.broken:
            raise Unavailable("the database does not answer")
        return super().all()


def headers(key: str) -> dict[bytes, bytes]:
    return {b"authorization": f"Bearer {key}".encode()}


def test_a_revoked_key_is_refused_after_a_quiet_time_and_within_seconds_when_busy() -> None:
    keys, clock = MemoryKeys(), SlowClock()
    key = keys.add(Scope.INGEST)
    keys.add(Scope.ADMIN)
    access = Access(keys, clock=FrozenClock(), sessions=SESSIONS, monotonic=clock)
    access.load()

    async def check() -> str:
        try:
            return (await access.caller(headers(key), Scope.INGEST)).name[:4]
        except RatchetError as error:
            return type(error).__name__

    async def story() -> list[str]:
        said = [await check()]
        keys.keys = keys.keys[1:]
        clock.at += 1.5  # busy: the read begins now, this request does not wait for it
        said.append(await check())
        await asyncio.sleep(0.05)
        said.append(await check())
        return said

    assert asyncio.run(story()) == ["key:", "key:", "HttpError"]
    keys.add(Scope.INGEST)
    clock.at += 60  # quiet: this request waits for the read
    assert asyncio.run(check()) == "HttpError"


def test_known_keys_are_good_for_a_minute_without_a_database(caplog: pytest.LogCaptureFixture) -> None:
    keys, clock = BreakingKeys(), SlowClock()
    key = keys.add(Scope.INGEST)
    access = Access(keys, clock=FrozenClock(), sessions=SESSIONS, monotonic=clock)
    access.load()
    keys.broken = True

    async def check() -> str:
        try:
            return (await access.caller(headers(key), Scope.INGEST)).name[:4]
        except RatchetError as error:
            return type(error).__name__

    clock.at += 30
    with caplog.at_level(logging.WARNING):
        assert asyncio.run(check()) == "key:"
        clock.at += 60
        assert asyncio.run(check()) == "Unavailable"
    assert "keys_unreadable" in caplog.text


def test_a_check_takes_microseconds_and_ten_thousand_wrong_keys_less_than_a_second() -> None:
    keys = MemoryKeys()
    good = headers(keys.add(Scope.INGEST))
    wrong = headers(keys.add(Scope.INGEST)[:12] + "x" * 43)
    access = Access(keys, clock=FrozenClock(), sessions=SESSIONS)
    access.load()

    async def many(count: int, given: dict[bytes, bytes]) -> float:
        started = time.process_time()
        for _ in range(count):
            try:
                await access.caller(given, Scope.INGEST)
            except RatchetError:
                continue
        return time.process_time() - started

    assert asyncio.run(many(10_000, wrong)) < 1
    assert asyncio.run(many(10_000, good)) / 10_000 < 50e-6


def test_no_key_is_in_logs_or_errors(caplog: pytest.LogCaptureFixture) -> None:
    keys = MemoryKeys()
    key = keys.add(Scope.READ)
    client, _ = service(keys)
    with caplog.at_level(logging.DEBUG):
        answer = post(client, key)
    assert key[12:] not in answer.text + caplog.text


@pytest.mark.parametrize("ending", ["expires", "is revoked"])
def test_the_only_key_that_ends_opens_nothing(ending: str) -> None:
    keys, clock, seconds = MemoryKeys(), FrozenClock(), SlowClock()
    keys.add(Scope.ADMIN)
    access = Access(keys, clock=clock, sessions=SESSIONS, alone=True, monotonic=seconds)
    access.load()
    if ending == "expires":
        clock.advance(86_400)
    keys.keys = []
    seconds.at += 60
    with pytest.raises(RatchetError, match="no API key"):
        asyncio.run(access.caller({}, Scope.INGEST))
    access.load()  # nor does a restart
    with pytest.raises(RatchetError, match="no API key"):
        asyncio.run(access.caller({}, Scope.INGEST))


def test_without_a_key_a_service_that_others_reach_is_closed() -> None:
    access = Access(MemoryKeys(), clock=FrozenClock(), sessions=SESSIONS, alone=False)
    access.load()
    with pytest.raises(RatchetError, match="no API key"):
        asyncio.run(access.caller({}, Scope.READ))


def test_the_first_key_closes_an_open_service_while_it_runs() -> None:
    keys, seconds = MemoryKeys(), SlowClock()
    access = Access(keys, clock=FrozenClock(), sessions=SESSIONS, alone=True, monotonic=seconds)
    access.load()
    assert asyncio.run(access.caller({}, Scope.ADMIN)).name == "anonymous"
    keys.add(Scope.READ)
    keys.keys = []  # and it was revoked before the service looked
    seconds.at += 60
    with pytest.raises(RatchetError, match="no API key"):
        asyncio.run(access.caller({}, Scope.ADMIN))


@pytest.mark.parametrize("header", ["Forwarded", "Via", "X-Real-IP", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto"])
def test_nobody_comes_through_a_proxy_to_an_open_service(header: str) -> None:
    """Else a proxy on this machine makes an operator of everybody who reaches it."""
    keys = MemoryKeys()
    app = create_app(collaborators(keys=keys, alone=True))
    client = TestClient(app, raise_server_exceptions=False)
    paths = ["/v1/models", "/v1/runs", "/v1/keys"]
    brought = {path: client.get(path, headers={header: "203.0.113.7"}) for path in paths}
    assert {answer.status_code for path, answer in brought.items() if client.get(path).status_code == 200} == {403}
    assert brought["/v1/models"].json()["error"]["code"] == "open"
    assert client.post("/v1/events", json=EVENT, headers={header: "1"}).status_code == 403
    started = client.post("/rl/start_session", json={"task_id": "t"}).json()["api_key"]
    assert client.get("/v1/models", headers={header: "1", "x-api-key": started}).status_code == 403
    key = keys.add(Scope.READ)
    asyncio.run(app.state.access.reread())
    assert client.get("/v1/runs", headers={header: "1", "x-api-key": key}).status_code == 200, "a closed one asks for keys instead"
