"""Who is asking, to the letter: when keys are read again, what each kind of caller may do, and whose rate and share it spends."""

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import HTTPConnection

from app.api.entry import feedback_tokens, sessions
from app.api.entry.access import ANONYMOUS, MOST_SESSIONS, Access, Caller, requires, why_not
from app.api.entry.feedback_tokens import SAYABLE, Answered, FeedbackTokens, observation_id
from app.api.entry.rates import SPENDING, Bucket, Spending
from app.api.entry.sessions import Sessions
from app.api.workshop import FEW
from app.domain.access import ApiKey, Scope
from app.domain.errors import Overloaded, Unavailable
from app.domain.people import Action, Person, Role
from app.listening.errors import HttpError
from tests.fakes.clock import FrozenClock
from tests.fakes.gateway import MemoryKeys

SESSIONS = Sessions(lambda: ("a session secret",))
CLOCK = FrozenClock()


def person(*roles: Role, policy: str | None = None, name: str = "ada") -> Person:
    return Person(id="1", name=name, roles=frozenset(roles), policy=policy, created_at=CLOCK(), made_by="user:root")


class People:
    """One person, with a session called `s` and whatever token there is."""

    def __init__(self, who: Person | None = None, *, ever: bool = False) -> None:
        self.who, self.was_ever = who, ever

    def ever(self) -> bool:
        return self.was_ever

    def of_session(self, secret: str) -> Person | None:
        return self.who if secret == "s" else None

    def of_token(self, key_id: str) -> Person | None:
        return self.who


class Seconds:
    """A clock that is moved by hand."""

    at = 100.0

    def __call__(self) -> float:
        return self.at


def service(keys: MemoryKeys, *, seconds: Seconds | None = None, people: People | None = None, alone: bool = False) -> Access:
    access = Access(keys, clock=CLOCK, sessions=SESSIONS, people=people, alone=alone, monotonic=seconds or Seconds())
    access.load()
    return access


def sent(key: str) -> dict[bytes, bytes]:
    return {b"authorization": f"Bearer {key}".encode()}


def asked(access: Access, key: str) -> Caller:
    return asyncio.run(access.identify(sent(key)))


def refused(access: Access, headers: dict[bytes, bytes]) -> HttpError:
    with pytest.raises(HttpError) as raised:
        asyncio.run(access.identify(headers))
    return raised.value


@pytest.mark.parametrize(("later", "reads"), [(1.0, 1), (1.01, 2)])
def test_keys_are_read_again_after_a_second(later: float, reads: int) -> None:
    keys, seconds = MemoryKeys(), Seconds()
    access, key = service(keys, seconds=seconds), keys.add(Scope.READ)
    asyncio.run(access.reread())
    keys.reads, seconds.at = 1, seconds.at + later

    async def story() -> None:
        await access.identify(sent(key))
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})

    asyncio.run(story())
    assert keys.reads == reads


@pytest.mark.parametrize(("later", "known"), [(2.0, True), (2.01, False)])
def test_a_request_waits_for_keys_that_are_older_than_two_seconds(later: float, known: bool) -> None:
    keys, seconds = MemoryKeys(), Seconds()
    key = keys.add(Scope.READ)
    access = service(keys, seconds=seconds)
    keys.keys, seconds.at = [], seconds.at + later
    if known:
        assert asked(access, key).key == key[:11]
    else:
        assert refused(access, sent(key)).status == 401


class Away(MemoryKeys):
    """A database that is away when it is told to be."""

    away = False

    def all(self) -> list[ApiKey]:
        if self.away:
            raise Unavailable("the database does not answer")
        return super().all()


@pytest.mark.parametrize(("later", "good"), [(60.0, True), (60.01, False)])
def test_what_was_known_is_good_for_a_minute_and_no_longer(later: float, good: bool) -> None:
    keys, seconds = Away(), Seconds()
    key = keys.add(Scope.READ)
    access = service(keys, seconds=seconds)
    keys.away, seconds.at = True, seconds.at + later
    if good:
        assert asked(access, key).key == key[:11]
    else:
        with pytest.raises(Unavailable, match="keys cannot be read"):
            asked(access, key)


def test_a_service_knows_whether_anybody_could_get_in() -> None:
    keys = MemoryKeys()
    access = Access(keys, clock=CLOCK, sessions=SESSIONS)
    assert access.load() is False
    keys.add(Scope.READ)
    assert access.load() is True


@pytest.mark.parametrize(
    ("alone", "people", "is_open"), [(True, None, True), (True, False, True), (True, True, False), (False, None, False)]
)
def test_a_service_is_open_where_nobody_was_ever_added_and_nobody_else_reaches_it(alone: bool, people: bool | None, is_open: bool) -> None:
    access = service(MemoryKeys(), people=None if people is None else People(ever=people), alone=alone)
    assert access.open is is_open


def test_an_open_service_closes_with_the_first_person() -> None:
    people, seconds = People(), Seconds()
    access = service(MemoryKeys(), people=people, seconds=seconds, alone=True)
    assert asyncio.run(access.identify({})) is ANONYMOUS
    people.was_ever = True
    asyncio.run(access.reread())
    assert (access.open, refused(access, {}).status) == (False, 401)


def test_on_an_open_service_everybody_may_do_everything_but_say_who_people_are() -> None:
    assert ANONYMOUS.actions == frozenset(Action) - {Action.MANAGE_PEOPLE}
    assert Caller(name="another", scopes=frozenset({Scope.READ}), policy=None).actions == {Action.LOOK, Action.READ_AUDIT}


@pytest.mark.parametrize(
    ("headers", "token"),
    [
        ({b"x-api-key": b"a", b"authorization": b"Bearer b"}, "a"), ({b"authorization": b"bearer  b "}, "b"),
        ({b"authorization": b"rk_plain"}, "rk_plain"), ({b"x-api-key": b"Bearer c"}, "c"), ({b"authorization": b"Token d"}, "Token d"),
        ({b"authorization": b"BASIC " + base64.b64encode(b"user:e:f")}, "e:f"), ({b"authorization": b"Basic !"}, ""),
        ({b"authorization": b"Basic " + base64.b64encode(b"\xff:x")}, ""), ({}, None),
    ],
)  # fmt: skip
def test_a_key_is_found_wherever_clients_put_it(headers: dict[bytes, bytes], token: str | None) -> None:
    class Looked(Access):
        found: str | None = "nothing"

        def _check(self, token: str | None) -> tuple[ApiKey, Caller]:
            self.found = token
            return super()._check(token)

    access = Looked(MemoryKeys(), clock=CLOCK, sessions=SESSIONS, monotonic=Seconds())
    access.load()
    error = refused(access, headers)
    assert access.found == token
    assert (error.status, error.code, error.headers) == (401, "invalid_api_key", {"WWW-Authenticate": 'Basic realm="ratchet"'})


def test_a_program_is_signed_by_its_key_s_name_and_has_a_line_of_its_own() -> None:
    keys = MemoryKeys()
    key = keys.add(Scope.INGEST, policy="tab", rate_per_s=2)
    caller = asked(service(keys), key)
    prefix = key[:11]
    assert (caller.name, caller.key, caller.actor, caller.policy) == (f"key:{prefix}", prefix, "service:test", "tab")
    assert (caller.share.line, caller.share.member, caller.person, caller.episode_id) == (f"key:{prefix}", "", None, None)


def test_a_rate_survives_a_new_read_of_the_keys_and_an_unlimited_key_has_none() -> None:
    keys, seconds = MemoryKeys(), Seconds()
    limited, free = keys.add(Scope.READ, rate_per_s=2), keys.add(Scope.READ)
    access = service(keys, seconds=seconds)
    for _ in range(2):
        access.permit(asked(access, limited), Scope.READ)
    asyncio.run(access.reread())
    with pytest.raises(Overloaded):
        access.permit(asked(access, limited), Scope.READ)
    assert asked(access, free).bucket is None


def test_what_costs_nothing_takes_nothing_and_a_scope_comes_before_a_rate() -> None:
    keys = MemoryKeys()
    access = service(keys)
    bucket = Bucket(1, Seconds())
    caller = Caller(name="c", scopes=frozenset({Scope.READ}), policy=None, bucket=bucket)
    assert access.permit(caller, Scope.READ, cost=0) is caller
    with pytest.raises(HttpError, match="has the scopes read, not ingest: create one with --scope ingest") as raised:
        access.permit(caller, Scope.INGEST)
    assert (raised.value.status, raised.value.code, bucket.left()) == (403, "scope", 1.0)
    with pytest.raises(HttpError, match="has the scopes none"):
        access.permit(replace(caller, scopes=frozenset()), Scope.READ)
    access.allow(caller, Action.LOOK)
    assert bucket.left() == 0.0


def test_what_a_request_spends_is_known_to_its_answer() -> None:
    access, own, parents = service(MemoryKeys()), Bucket(9, Seconds()), Bucket(5, Seconds())
    caller = Caller(name="c", scopes=frozenset({Scope.SAMPLE}), policy=None, bucket=parents, session_bucket=own)
    spending = Spending()
    token = SPENDING.set(spending)
    access.permit(caller, Scope.SAMPLE, cost=2)
    SPENDING.reset(token)
    assert spending.buckets == [own, parents]
    assert [bucket.left() for bucket in spending.buckets] == [7.0, 3.0]
    assert spending.headers() == parents.headers()
    assert Spending().headers() == []


@pytest.mark.parametrize(
    ("roles", "code"), [((Role.OPERATOR,), None), ((Role.VIEWER,), "role"), ((), "scope")], ids=["may", "may not", "a program"]
)
def test_who_may_not_is_told_by_role_or_by_scope(roles: Sequence[Role], code: str | None) -> None:
    access = service(MemoryKeys())
    who = person(*roles) if roles else None
    caller = Caller(name="c", scopes=frozenset({Scope.READ}), policy=None, person=who)
    if code is None:
        assert access.allow(caller, Action.ABORT) is caller
        return
    with pytest.raises(HttpError) as raised:
        access.allow(caller, Action.ABORT)
    assert (raised.value.status, raised.value.code, str(raised.value)) == (403, code, why_not(caller, Action.ABORT))


def test_why_somebody_may_not_names_who_may_and_how() -> None:
    ada = Caller(name="c", scopes=frozenset(), policy="tab", person=person(Role.VIEWER, Role.AUDITOR, policy="tab"))
    program = Caller(name="c", scopes=frozenset({Scope.READ, Scope.INGEST}), policy=None)
    nobody = replace(program, scopes=frozenset(), policy="tab")
    assert why_not(ada, Action.APPROVE) == "ada is auditor, viewer, and approve is for admin, operator: ask an admin"
    assert why_not(ada, Action.MANAGE_PEOPLE).endswith(" is for admin of all policies: ask an admin")
    assert why_not(ada, Action.SAMPLE).endswith("sample is for products alone, with keys of their own: ask an admin")
    assert why_not(program, Action.APPROVE).startswith("approve takes a person (admin, operator), and this is a program's key")
    assert why_not(program, Action.ABORT) == "this key has the scopes ingest, read; abort takes release or admin: create one with it"
    assert why_not(nobody, Action.ERASE) == "this key has the scopes none; erase takes admin of all policies: create one with it"


def with_token(who: Person | None, *, of: str | None = None, rate_per_s: float | None = None) -> tuple[Access, str]:
    keys = MemoryKeys()
    key = keys.add(policy=of, rate_per_s=rate_per_s)
    keys.keys = [replace(keys.keys[0], person_id="1")]
    return service(keys, people=None if who is None else People(who)), key


@pytest.mark.parametrize(
    ("his", "token", "policy"), [(None, None, None), ("tab", None, "tab"), (None, "tab", "tab"), ("tab", "tab", "tab")]
)
def test_a_token_speaks_for_its_person_where_both_are_there(his: str | None, token: str | None, policy: str | None) -> None:
    access, key = with_token(person(Role.OPERATOR, policy=his), of=token, rate_per_s=3)
    caller = asked(access, key)
    assert (caller.name, caller.actor, caller.policy, caller.scopes) == (f"key:{key[:11]}", "user:ada", policy, {Scope.READ})
    assert (caller.share.line, caller.bucket is not None, Action.APPROVE in caller.actions) == ("user:ada", True, True)


def test_a_token_of_nobody_or_for_another_policy_has_ended() -> None:
    for who in (None, person(Role.OPERATOR, policy="composer")):
        access, key = with_token(who, of="tab")
        said = "`ratchet login` makes another" if who is None else "this token is for tab, and ada is there for composer"
        assert said in str(refused(access, sent(key)))


def test_whose_browser_session_it_is_is_asked_each_time() -> None:
    ada = person(Role.VIEWER, policy="tab")
    access = service(MemoryKeys(), people=People(ada))
    caller = asyncio.run(access.signed_in("s"))
    assert caller is not None
    assert (caller.name, caller.actor, caller.policy, caller.person, caller.key) == ("session of ada", "user:ada", "tab", ada, "")
    assert asyncio.run(access.signed_in("another")) is None
    assert asyncio.run(service(MemoryKeys()).signed_in("s")) is None


def session_key(parent: str, *, source: str = "gateway") -> str:
    return SESSIONS.issue("episode", parent=parent, now=CLOCK(), source=source)[0]


def test_a_session_is_its_parent_s_for_one_episode_and_of_its_own_source_and_member() -> None:
    keys = MemoryKeys()
    parent = keys.add(Scope.INGEST, policy="tab")
    caller = asked(service(keys), session_key(parent[:11], source="rollout:sums"))
    assert (caller.scopes, caller.episode_id, caller.source, caller.policy) == ({Scope.SAMPLE}, "episode", "rollout:sums", "tab")
    assert (caller.name, caller.key, caller.actor) == (f"session of key:{parent[:11]}", parent[:11], "service:test")
    assert (caller.share.line, caller.share.member, caller.share.most) == (f"sessions of key:{parent[:11]}", "episode", FEW)


def test_a_session_without_a_parent_is_good_on_an_open_service_alone() -> None:
    caller = asked(service(MemoryKeys(), alone=True), session_key(""))
    assert (caller.name, caller.scopes, caller.episode_id) == ("session of anonymous", {Scope.SAMPLE}, "episode")
    assert caller.actions == {Action.SAMPLE}, "what everybody may do there, an agent may not"
    assert refused(service(MemoryKeys()), sent(session_key(""))).status == 401
    assert refused(service(MemoryKeys(), alone=True), sent(session_key("rk_00000000"))).status == 401


def test_a_session_of_a_key_that_may_not_sample_is_none() -> None:
    keys = MemoryKeys()
    reader = keys.add(Scope.READ)
    assert "POST /rl/start_session with another" in str(refused(service(keys), sent(session_key(reader[:11]))))


def test_ten_thousand_sessions_keep_their_rate_in_mind_and_the_one_that_was_silent_longest_goes() -> None:
    assert MOST_SESSIONS == 10_000
    access = service(MemoryKeys())
    spent = [access._bucket_of(name, 1.0) for name in ("oldest", "used again")]
    for bucket in spent:
        bucket.take(1)
    access._session_buckets.update(dict.fromkeys(map(str, range(MOST_SESSIONS - 2)), spent[0]))
    assert access._bucket_of("used again") is spent[1]
    assert len(access._session_buckets) == MOST_SESSIONS
    access._bucket_of("one more")
    assert [access._bucket_of(name) is bucket for name, bucket in zip(("used again", "oldest"), reversed(spent), strict=True)] == [
        True,
        False,
    ]


@pytest.mark.parametrize("parent", ["", "of a key"])
def test_who_speaks_of_an_answer_has_a_line_with_those_of_its_key(parent: str) -> None:
    keys = MemoryKeys()
    prefix = keys.add(Scope.INGEST)[:11] if parent else ""
    token = FeedbackTokens(SESSIONS.secrets).issue("i", policy="tab", now=CLOCK(), parent=prefix)
    found = asyncio.run(service(keys).answered(sent(token)))
    assert found is not None
    answered, caller = found
    expires = CLOCK().timestamp() + 7 * 86_400
    assert answered == Answered(answer="i", policy="tab", parent=prefix, expires=expires)
    assert (caller.name, caller.policy, caller.scopes, caller.actions) == ("answer i", "tab", frozenset(), frozenset())
    assert (caller.share.line, caller.share.member, caller.share.most) == (f"answers of {prefix or 'tab'}", "i", FEW)
    assert caller.bucket is not None
    assert caller.bucket.left() == 9.0
    assert asyncio.run(service(keys).answered({})) is None
    assert asyncio.run(service(keys).answered(sent("rk_00000000_x"))) is None


def test_what_a_person_says_and_for_how_long_keys_of_episodes_are_good() -> None:
    assert {str(name) for name in SAYABLE} == {"rating", "comment", "undo", "regenerate"}
    assert observation_id(Answered(answer="i", policy="p", expires=0), "rating") == "ft:i:rating"
    key, ends = SESSIONS.issue("e", parent="", now=CLOCK())
    assert (ends - CLOCK(), ends.tzinfo, key[:3]) == (timedelta(days=1), CLOCK().tzinfo, "rs_")
    assert SESSIONS.read(key, now=ends - timedelta(seconds=1)) is not None
    assert SESSIONS.read(key, now=ends) is None
    assert (sessions.RATE_PER_S, feedback_tokens.RATE_PER_S, feedback_tokens.FEEDBACK_PREFIX) == (20.0, 10.0, "ft_")


@pytest.mark.parametrize("what", [Scope.READ, Action.LOOK], ids=["a scope", "an action"])
def test_an_endpoint_knows_who_asked_and_charges_one(what: Scope | Action) -> None:
    keys = MemoryKeys()
    key = keys.add(Scope.READ, rate_per_s=5)
    access = service(keys)

    app = Starlette()
    app.state.access = access
    connection = HTTPConnection({"type": "http", "app": app, "headers": [*sent(key).items()]})
    caller: Any = asyncio.run(requires(what)(connection))  # type: ignore[arg-type]
    assert caller is connection.state.caller
    assert caller.bucket.left() == 4.0
