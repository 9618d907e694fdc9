"""Keys, people, receivers, rule sets, letters and erasures over HTTP: what is handed on, what is answered, and where a limit lies."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from app.api import keys, people, webhooks
from app.api.data import dead_letters, erasures, rules
from app.api.people import PeopleRoom
from app.api.webhooks import WebhookRoom
from app.domain.access import ApiKey, Scope
from app.domain.learning.rule_sets import Activation, Proposal
from app.domain.people import Person, Role
from app.domain.telemetry.streams import ErasureReport
from app.main import create_app
from tests.fakes.gateway import NOON, MemoryKeys, collaborators, policy_config
from tests.fakes.sights import Canned, canned

AT = NOON.isoformat().replace("+00:00", "Z")
POLICIES = {"composer": policy_config(), "tab": policy_config()}
ADA = Person(id="p1", name="ada", roles=frozenset({Role.ADMIN}), policy=None, created_at=NOON, made_by="user:root")


def known(prefix: str, policy: str | None = None, **changes: Any) -> ApiKey:
    values: dict[str, Any] = {
        "id": prefix, "hash": b"", "name": "editor", "scopes": frozenset({Scope.READ}), "rate_per_s": None, "created_at": NOON,
    }  # fmt: skip
    return ApiKey(prefix=prefix, policy=policy, **{**values, **changes})


@dataclass(frozen=True)
class Asking:
    """A service with one router, and how it is asked."""

    client: TestClient
    key: str
    held: MemoryKeys

    def __call__(self, method: str, path: str, body: Any = None) -> Any:
        return self.client.request(method, path, json=body, headers={"x-api-key": self.key})


def service(router: Any, *, policy: str | None = None, person: Person | None = None) -> Asking:
    """Asked with an admin's key: a program's, or somebody's own."""
    held = MemoryKeys()
    key = held.add(Scope.ADMIN, policy=policy)
    if person is not None:
        held.keys = [replace(held.keys[0], person_id=person.id)]
    town = canned(ever=True, of_token=person, of_session=None)
    app = create_app(collaborators(keys=held, policies=POLICIES, routers=[router], people=town))
    return Asking(TestClient(app, raise_server_exceptions=False), key, held)


def keys_service(policy: str | None = None, rotate: Callable[..., object] = lambda by: None) -> tuple[Asking, Canned]:
    book = canned(
        history=[known("rk_1"), known("rk_2", "tab"), known("rk_3", "composer")], create=(known("rk_9"), "rk_9_text"),
        revoke=known("rk_2", "tab", revoked_at=NOON),
    )  # fmt: skip
    return service(keys.router(book, rotate=rotate, policies=POLICIES, clock=lambda: NOON), policy=policy), book


def test_a_key_is_made_as_it_was_asked_for_and_good_at_once() -> None:
    ask, book = keys_service()
    reads = ask.held.reads
    made = ask("POST", "/v1/keys", {"name": "x", "scopes": ["read"], "policy": "tab", "rate_per_s": 1e9, "expires_days": 2})
    assert (made.status_code, made.json()) == (201, {"key": "rk_9_text", "prefix": "rk_9"})
    (_, _, told), *_ = book.heard
    assert told == {
        "name": "x", "scopes": (Scope.READ,), "policy": "tab", "rate_per_s": 1e9, "expires_at": NOON + timedelta(days=2),
        "by": "service:test",
    }  # fmt: skip
    assert ask.held.reads == reads + 1, "read again before it is answered"
    ask("POST", "/v1/keys", {"name": "x", "scopes": ["read"]})
    assert (book.heard[-1][2]["expires_at"], book.heard[-1][2]["policy"]) == (None, None)


@pytest.mark.parametrize(
    ("field", "most", "more"),
    [
        ("name", "n" * 150, "n" * 151), ("scopes", ["read"] * 10, ["read"] * 11), ("expires_days", 36_500, 36_500.5),
        ("rate_per_s", 1e9, 1e9 + 1), ("rate_per_s", 0.001, 0), ("expires_days", 0.001, 0), ("name", "n", ""), ("scopes", ["read"], []),
    ],
)  # fmt: skip
def test_a_field_of_a_key_has_its_bounds(field: str, most: object, more: object) -> None:
    ask, book = keys_service()
    usual = {"name": "x", "scopes": ["read"]}
    assert ask("POST", "/v1/keys", usual | {field: most}).status_code == 201
    assert ask("POST", "/v1/keys", usual | {field: more}).status_code == 400
    assert len(book.heard) == 1


def test_a_key_of_one_policy_sees_and_ends_the_keys_of_that_policy_alone() -> None:
    ask, book = keys_service("tab")
    assert [key["prefix"] for key in ask("GET", "/v1/keys").json()["keys"]] == ["rk_2"]
    assert [ask("DELETE", f"/v1/keys/rk_{n}").status_code for n in (1, 2, 3, 4)] == [404, 200, 404, 404]
    assert [call for call in book.heard if call[0] == "revoke"] == [("revoke", ("rk_2",), {"by": "service:test"})]
    assert ask("POST", "/v1/keys/rotate-sessions").status_code == 403
    free, _ = keys_service()
    assert [key["prefix"] for key in free("GET", "/v1/keys").json()["keys"]] == ["rk_1", "rk_2", "rk_3"]
    ended = free("DELETE", "/v1/keys/rk_1").json()
    assert (ended["prefix"], ended["usable"], ended["revoked_at"]) == ("rk_2", False, AT)


def test_keys_of_sessions_are_signed_anew_in_the_name_of_who_asks() -> None:
    said = list[str]()

    def rotate(by: str) -> None:
        said.append(by)

    ask, _ = keys_service(rotate=rotate)
    done = ask("POST", "/v1/keys/rotate-sessions")
    assert (done.status_code, done.json(), said) == (200, {"rotated": True}, ["service:test"])


def test_who_is_let_in_without_a_key_makes_none() -> None:
    book = canned(history=[], create=(known("rk_9"), "text"), revoke=known("rk_9"))
    app = create_app(collaborators(policies=POLICIES, routers=[keys.router(book, rotate=lambda by: None, policies=POLICIES)]))
    client = TestClient(app)
    for method, path in (("POST", "/v1/keys"), ("DELETE", "/v1/keys/rk_1"), ("POST", "/v1/keys/rotate-sessions")):
        said = client.request(method, path, json={"name": "x", "scopes": ["read"]})
        assert (said.status_code, said.json()["error"]["code"]) == (403, "no_key")
    assert book.heard == []


HOOKS = {name: SimpleNamespace(policy=policy, told=lambda name=name: {"id": name}) for name, policy in (("w1", None), ("w2", "tab"))}


def hooks_service(policy: str | None = None) -> tuple[Asking, Canned, list[object]]:
    book = canned(
        all=list(HOOKS.values()), find=lambda id_: HOOKS[id_], add=HOOKS["w1"], rotate=HOOKS["w2"], disable=HOOKS["w2"],
        deliveries=[{"event": "e1"}],
    )  # fmt: skip
    sent = list[object]()

    async def send_test(hook: object) -> tuple[str, bool]:
        sent.append(hook)
        return "503", False

    room = WebhookRoom(webhooks=book, send_test=send_test, allow_loopback=True, policies=POLICIES)
    return service(webhooks.router(room), policy=policy), book, sent


def test_a_receiver_is_registered_tried_renewed_and_stopped_in_the_name_of_who_asks() -> None:
    ask, book, sent = hooks_service()
    made = ask("POST", "/v1/webhooks", {"url": "mailto:a@x.de", "policy": "tab", "events": ["release."]})
    assert (made.status_code, made.json()["id"]) == (201, "w1")
    told = book.heard[-1][2]
    assert (told["policy"], told["url"], told["events"], told["by"]) == ("tab", "mailto:a@x.de", ("release.",), "service:test")
    assert made.json()["secret"] == told["secret"]
    tried = ask("POST", "/v1/webhooks/w2/test")
    assert (tried.json(), sent) == ({"status": "503", "arrived": False}, [HOOKS["w2"]])
    renewed = ask("POST", "/v1/webhooks/w2/rotate")
    assert (renewed.json(), book.heard[-1][2]["by"]) == ({"id": "w2", "secret": book.heard[-1][1][1]}, "service:test")
    assert ask("DELETE", "/v1/webhooks/w2").json() == {"id": "w2"}
    assert (book.heard[-1][0], book.heard[-1][1], book.heard[-1][2]["by"]) == ("disable", ("w2",), "service:test")


def test_an_address_that_nothing_can_be_sent_to_is_not_registered() -> None:
    ask, book, _ = hooks_service()
    assert ask("POST", "/v1/webhooks", {"url": "mailto:nobody"}).status_code == 400
    assert book.heard == []


@pytest.mark.parametrize(("asked", "limit"), [("", 100), ("?limit=1000", 1000), ("?limit=1", 1)])
def test_what_became_of_the_newest_deliveries_is_told_a_hundred_at_a_time(asked: str, limit: int) -> None:
    ask, book, _ = hooks_service()
    assert ask("GET", f"/v1/webhooks/w1/deliveries{asked}").json() == {"data": [{"event": "e1"}]}
    assert book.heard[-1] == ("deliveries", ("w1",), {"limit": limit})


def test_a_list_has_between_one_and_a_thousand_rows() -> None:
    ask, _, _ = hooks_service()
    assert [ask("GET", f"/v1/webhooks/w1/deliveries?limit={n}").status_code for n in (0, 1001)] == [422, 422]


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "w1/test"), ("POST", "w1/rotate"), ("DELETE", "w1"), ("GET", "w1/deliveries")],
)
def test_a_key_of_one_policy_touches_no_receiver_of_all_of_them(method: str, path: str) -> None:
    ask, book, sent = hooks_service("tab")
    assert [hook["id"] for hook in ask("GET", "/v1/webhooks").json()["data"]] == ["w2"]
    assert ask(method, f"/v1/webhooks/{path}").status_code == 404
    assert ask(method, f"/v1/webhooks/{path.replace('w1', 'w2')}").status_code == 200
    assert all(call[1][0] == "w2" for call in book.heard if call[0] not in ("all", "find"))
    assert all(hook is HOOKS["w2"] for hook in sent)


def people_service(person: Person | None = ADA) -> tuple[Asking, Canned, Canned]:
    bob = replace(ADA, id="p2", name="bob", policy="tab", email="b@x.de", subject="s", has_password=True, disabled_at=NOON)
    book = canned(all=[ADA, bob], add=bob, change=bob, invite="secret", sign_out=bob)
    own = [known("rk_1", person_id="p1"), known("rk_2", person_id="p2"), known("rk_3")]
    tokens = canned(history=own, create=(known("rk_9", "tab"), "rk_9_text"), revoke=known("rk_1", revoked_at=NOON))
    room = PeopleRoom(people=book, keys=tokens, desk=canned(person_with=bob), policies=POLICIES, address="https://r", clock=lambda: NOON)
    return service(people.router(room), person=person), book, tokens


BOB = {
    "name": "bob", "roles": ["admin"], "policy": "tab", "email": "b@x.de", "os_user": None, "has_password": True, "provider": True,
    "created_at": AT, "made_by": "user:root", "disabled_at": AT,
}  # fmt: skip


def test_somebody_is_added_with_a_link_that_lasts_a_day() -> None:
    ask, book, _ = people_service()
    body = {"name": "bob", "roles": ["viewer"], "policy": "tab", "email": "b@x.de", "os_user": "bobby"}
    made = ask("POST", "/v1/people", body)
    assert (made.status_code, made.json()) == (201, BOB | {"link": "https://r/console/welcome?link=secret"})
    asked = {"roles": (Role.VIEWER,), "policy": "tab", "email": "b@x.de", "os_user": "bobby", "by": "user:ada"}
    assert book.heard == [("add", ("bob",), asked), ("invite", ("bob",), {"lasts": timedelta(days=1), "by": "user:ada"})]
    again = ask("POST", "/v1/people/eve/link")
    assert (again.status_code, again.json()) == (201, {"name": "eve", "link": "https://r/console/welcome?link=secret"})
    assert book.heard[-1] == ("invite", ("eve",), {"lasts": timedelta(days=1), "by": "user:ada"})


def test_of_somebody_that_alone_is_changed_which_is_named() -> None:
    ask, book, _ = people_service()
    assert ask("PATCH", "/v1/people/bob", {"policy": None, "disabled": False}).json() == BOB
    assert book.heard[-1] == ("change", ("bob",), {"by": "user:ada", "policy": None, "disabled": False})
    assert ask("PATCH", "/v1/people/bob", {"policy": "elsewhere"}).status_code == 400
    assert ask("POST", "/v1/people/bob/sign-out").json() == BOB
    assert book.heard[-1] == ("sign_out", ("bob",), {"by": "user:ada"})
    assert [one["name"] for one in ask("GET", "/v1/people").json()["people"]] == ["ada", "bob"]


def test_everybody_lists_makes_and_ends_their_own_tokens_alone() -> None:
    ask, _, tokens = people_service()
    listed = ask("GET", "/v1/tokens").json()["tokens"]
    assert listed == [
        {"prefix": "rk_1", "name": "editor", "policy": None, "created_at": AT, "expires_at": None, "revoked_at": None, "usable": True,
         "last_used_at": None}
    ]  # fmt: skip
    made = ask("POST", "/v1/tokens", {"name": "laptop", "policy": "tab", "expires_days": 2})
    assert (made.status_code, made.json()["token"], made.json()["prefix"]) == (201, "rk_9_text", "rk_9")
    ends = NOON + timedelta(days=2)
    assert tokens.heard[-1][2] == {"name": "laptop", "scopes": (), "policy": "tab", "expires_at": ends, "by": "user:ada", "of": ADA}
    assert [ask("DELETE", f"/v1/tokens/rk_{n}").status_code for n in (1, 2, 3)] == [200, 404, 404]
    assert tokens.heard[-1][0] == "history"
    program, _, _ = people_service(None)
    assert [program("GET", "/v1/tokens").status_code, program("POST", "/v1/tokens", {"name": "x"}).status_code] == [403, 403]


def test_a_terminal_gets_a_token_for_a_name_and_a_password() -> None:
    ask, _, tokens = people_service()
    made = ask("POST", "/v1/sign-in", {"name": "bob", "password": "p" * 300})
    assert (made.status_code, made.json()["token"]) == (201, "rk_9_text")
    told = tokens.heard[-1][2]
    assert (told["name"], told["policy"], told["by"], told["expires_at"]) == ("terminal", "tab", "user:bob", NOON + timedelta(days=30))
    for wrong in ({"password": "p" * 301}, {"password": ""}, {"password": "p", "expires_days": 367}):
        assert ask("POST", "/v1/sign-in", {"name": "bob"} | wrong).status_code == 400
    assert ask("GET", "/v1/me").json()["roles"] == ["admin"]
    assert people_service(None)[0]("GET", "/v1/me").json()["roles"] == []


def rules_service(policy: str | None = None) -> tuple[Asking, Canned]:
    entries = [Activation(digest=f"d{n}", name="n", activated_by="user:ada", activated_at=NOON) for n in range(30)]
    mine = Proposal(id="q", policy="tab", toml="secret", proposed_by="user:ada", proposed_at=NOON)
    book = canned(history=entries, proposals=[mine], propose=lambda one: one)
    return service(rules.router(rules.RuleRoom(rules=book, policies=POLICIES, clock=lambda: NOON)), policy=policy), book


def test_twenty_of_what_was_in_force_are_told_and_proposals_without_their_text() -> None:
    ask, book = rules_service()
    told = ask("GET", "/v1/policies/tab/rules").json()
    assert [entry["digest"] for entry in told["history"]] == [f"d{n}" for n in range(20)]
    assert told["proposals"] == [
        {"id": "q", "policy": "tab", "proposed_by": "user:ada", "proposed_at": AT,
         "settled_at": None, "digest": None, "refused": None, "state": "waiting"}
    ]  # fmt: skip
    assert book.heard[-1] == ("proposals", ("tab",), {"newest": 20})
    assert len(ask("GET", "/v1/policies/tab/rules?limit=1").json()["history"]) == 1
    assert ask("GET", "/v1/policies/elsewhere/rules").status_code == 400


def test_a_rule_set_is_proposed_under_the_name_that_the_caller_gave_it_or_a_new_one() -> None:
    ask, book = rules_service()
    made = ask("POST", "/v1/policies/tab/rules", {"toml": "x" * 40_000, "request_id": "r1"})
    assert (made.status_code, made.json()["id"], made.json()["state"]) == (202, "r1", "waiting")
    (proposed,) = book.heard[-1][1]
    assert (proposed.policy, proposed.proposed_by, proposed.proposed_at) == ("tab", "service:test", NOON)
    assert len(ask("POST", "/v1/policies/tab/rules", {"toml": "x"}).json()["id"]) == 36
    for toml in ("", "x" * 40_001):
        assert ask("POST", "/v1/policies/tab/rules", {"toml": toml}).status_code == 400
    assert rules_service("composer")[0]("POST", "/v1/policies/tab/rules", {"toml": "x"}).status_code == 403


def letters_service(policy: str | None = None) -> tuple[Asking, Canned, list[dict[str, Any]]]:
    notes = list[dict[str, Any]]()
    book = canned(find=[], purge=3)
    room = dead_letters.LetterRoom(letters=book, store=lambda: canned(), note=lambda **said: notes.append(said), clock=lambda: NOON)
    return service(dead_letters.router(room), policy=policy), book, notes


@pytest.mark.parametrize(
    ("asked", "how"),
    [
        ("", {"reason": None, "pending": True, "after": 0, "limit": 100}),
        ("?reason=odd&replayed=true&after=7&limit=3", {"reason": "odd", "pending": False, "after": 7, "limit": 3}),
    ],
)
def test_letters_that_wait_are_listed_a_hundred_at_a_time_from_the_first(asked: str, how: dict[str, Any]) -> None:
    ask, book, _ = letters_service()
    assert ask("GET", f"/v1/dead-letters{asked}").json() == {"data": []}
    assert book.heard == [("find", (), how)]


def test_what_is_done_to_letters_is_noted_with_who_did_it() -> None:
    ask, book, notes = letters_service()
    done = ask("POST", "/v1/dead-letters/replay", {"ids": [1], "reason": "odd", "after": 4})
    assert done.json() == {"applied": 0, "still": {}, "after": None}
    assert ask("POST", "/v1/dead-letters/purge", {"days": 2}).json() == {"deleted": 3}
    assert book.heard[-1] == ("purge", (), {"before": NOON - timedelta(days=2)})
    subject = {"actor": "service:test", "subject": "dead letters"}
    assert notes == [
        subject | {"action": "dead_letters.replay", "detail": {"applied": 0, "still": 0, "ids": [1], "reason": "odd"}},
        subject | {"action": "dead_letters.purge", "detail": {"deleted": 3, "days": 2}},
    ]
    assert ask("GET", "/v1/dead-letters/5").status_code == 404


@pytest.mark.parametrize(
    ("path", "most", "more"),
    [
        ("replay", {"ids": [1] * 1000}, {"ids": [1] * 1001}), ("replay", {"after": 0}, {"after": -1}),
        ("replay", {"after": 2**53}, {"after": 2**53 + 1}), ("replay", {"reason": "x" * 2000}, {"reason": "x" * 2001}),
        ("purge", {"days": 0}, {"days": -0.1}), ("purge", {"days": 36_500}, {"days": 36_501}),
    ],
)  # fmt: skip
def test_an_act_on_letters_has_its_bounds(path: str, most: dict[str, Any], more: dict[str, Any]) -> None:
    ask, _, notes = letters_service()
    assert [ask("POST", f"/v1/dead-letters/{path}", body).status_code for body in (most, more)] == [200, 400]
    assert len(notes) == 1


@pytest.mark.parametrize(("method", "path"), [("GET", ""), ("GET", "/1"), ("POST", "/replay"), ("POST", "/purge")])
def test_a_key_of_one_policy_sees_no_letter(method: str, path: str) -> None:
    ask, book, notes = letters_service("tab")
    assert ask(method, f"/v1/dead-letters{path}", {"days": 1} if path == "/purge" else {}).status_code == 403
    assert (book.heard, notes) == ([], [])


REPORT = ErasureReport(
    actor="ab", turns=1, observations=2, labels=3, exposures=4, inbox_payloads=5, dead_letters=6, segments=7, trained_versions=("v1",),
    already_erased=False,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Left:
    """A place where something of somebody is left."""

    place: str
    found: int = 2
    cure: str = "again"


def erasing() -> tuple[Asking, list[Any]]:
    did = list[Any]()

    def forget(pseudonym: str, *, by: str) -> ErasureReport:
        did.append((pseudonym, by))
        return REPORT

    room = erasures.ErasureRoom(
        pseudonym_of=lambda *, actor, pseudonym: f"{actor} {pseudonym}", forget=forget, sweep=lambda: 4,
        left_of=lambda who: [Left(place=f"turns of {who}")], note=lambda **said: did.append(said),
    )  # fmt: skip
    return service(erasures.router(room)), did


def test_who_is_to_be_forgotten_is_named_in_one_way_and_what_went_is_told() -> None:
    ask, did = erasing()
    done = ask("POST", "/v1/erasures", {"actor": "a" * 2000})
    assert done.json() == {**vars(REPORT), "trained_versions": ["v1"]}
    assert did == [(f"{'a' * 2000} None", "service:test")]
    for wrong in ({}, {"actor": "a", "pseudonym": "b"}, {"actor": "a" * 2001}, {"actor": ""}):
        for path in ("", "/verify"):
            assert ask("POST", f"/v1/erasures{path}", wrong).status_code == 400
    assert len(did) == 1
    left = ask("POST", "/v1/erasures/verify", {"pseudonym": "b"}).json()
    assert left == {"pseudonym": "None b", "places": [{"place": "turns of None b", "found": 2, "cure": "again"}]}
    assert ask("POST", "/v1/erasures/sweep").json() == {"removed": 4}
    assert did[-1] == {"actor": "service:test", "action": "segments.swept", "subject": "segments", "detail": {"removed": 4}}


def test_what_takes_every_policy_is_not_for_a_key_of_one() -> None:
    room = erasures.ErasureRoom(
        pseudonym_of=lambda **_: "x", forget=lambda *_, **__: REPORT, sweep=lambda: 0, left_of=lambda _: [], note=lambda **_: None
    )
    ask = service(erasures.router(room), policy="tab")
    assert [ask("POST", f"/v1/erasures{path}", {"actor": "a"}).status_code for path in ("", "/verify", "/sweep")] == [403] * 3
