"""What commands send to the service and what they print of its answer, word by word: a service that a test plays says both."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from app.domain.errors import BadInput, Refused
from pipelines.commands.terminal.kept import kept_token
from tests.integration.operations.canned import POLICY, Canned, cells

# --- keys ------------------------------------------------------------------------------------------------------------------


def test_a_key_is_made_with_what_was_said_and_nothing_that_was_not(service: Canned, data: Path) -> None:
    answers = {"POST /v1/keys": {"key": "rk_secret", "prefix": "rk_1"}}
    told = service.told("keys", "create", "--name", "product", "--scope", "ingest", "--scope", "sample", answers=answers, data=data)
    assert service.sent == [("POST /v1/keys", {"name": "product", "scopes": ["ingest", "sample"]})]
    assert told.stdout == "rk_secret\n", "a script takes the key from the standard output"
    assert told.stderr == "This is the only time the key is shown. Its prefix is rk_1; `ratchet keys revoke rk_1` ends it.\n"
    assert service.tokens == ["Bearer secret"]
    more = ("--policy", POLICY, "--rate", "2.5", "--expires-days", "3")
    service.told("keys", "create", "--name", "p", "--scope", "ingest", *more, answers=answers, data=data)
    assert service.sent[0][1] == {"name": "p", "scopes": ["ingest"], "policy": POLICY, "rate_per_s": 2.5, "expires_days": 3.0}


@pytest.mark.parametrize("said", [("--rate", "0"), ("--expires-days", "0"), ("--scope", "everything")])
def test_a_key_without_a_rate_a_life_or_a_scope_is_not_made(service: Canned, data: Path, said: tuple[str, str]) -> None:
    assert service.told("keys", "create", "--name", "p", "--scope", "ingest", *said, answers={}, data=data).exit_code == 2
    assert service.sent == []


def key(**changes: Any) -> dict[str, Any]:
    return {
        "prefix": "rk_1", "name": "product", "scopes": ["ingest", "sample"], "policy": None, "rate_per_s": None, "usable": True,
        "created_at": "2026-01-02T03:04:05+00:00", "last_used_at": None, "revoked_at": None, "expires_at": None,
    } | changes  # fmt: skip


LATER = "2026-02-03T04:05:06+00:00"


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({}, ["all", "", "2026-01-02 03:04", "never", "active"]),
        ({"policy": POLICY, "rate_per_s": 2.5, "last_used_at": LATER}, [POLICY, "2.5", "2026-01-02 03:04", "2026-02-03 04:05", "active"]),
        ({"expires_at": LATER}, ["all", "", "2026-01-02 03:04", "never", "expires 2026-02-03 04:05"]),
        ({"expires_at": LATER, "usable": False}, ["all", "", "2026-01-02 03:04", "never", "expired 2026-02-03 04:05"]),
        ({"expires_at": LATER, "revoked_at": LATER}, ["all", "", "2026-01-02 03:04", "never", "revoked 2026-02-03 04:05"]),
    ],
)
def test_a_key_is_listed_with_whom_it_is_for_and_whether_it_is_good(
    service: Canned, data: Path, changes: dict[str, Any], shown: list[str]
) -> None:
    told = service.told("keys", "list", answers={"GET /v1/keys": {"keys": [key(**changes)]}}, data=data)
    assert cells(told, of="rk_1") == ["rk_1", "product", "ingest, sample", *shown]


def test_a_key_is_ended_and_the_secret_of_sessions_is_made_anew_where_it_is_said_to_be(service: Canned, data: Path) -> None:
    told = service.told("keys", "revoke", "rk_1", answers={"DELETE /v1/keys/rk_1": {"name": "product"}}, data=data)
    assert (told.output, told.exit_code) == ("rk_1 (product) is revoked\n", 0)
    told = service.told("keys", "rotate-sessions", answers={"POST /v1/keys/rotate-sessions": {}}, data=data)
    assert told.output == f"{service.url} has a fresh secret; run this twice and every session key there was has ended\n"
    assert service.sent == [("POST /v1/keys/rotate-sessions", None)]


# --- webhooks --------------------------------------------------------------------------------------------------------------

HOOK = {"id": "0198-hook", "policy": None, "url": "https://a/b", "events": [], "signatures": 1, "disabled_at": None}


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({}, ["all", "https://a/b", "all", "1", "active"]),
        ({"policy": POLICY, "events": ["release.", "x"], "signatures": 2}, [POLICY, "https://a/b", "release., x", "2", "active"]),
        ({"disabled_at": LATER}, ["all", "https://a/b", "all", "1", "removed 2026-02-03 04:05"]),
    ],
)
def test_a_receiver_is_listed_with_what_it_hears(service: Canned, data: Path, changes: dict[str, Any], shown: list[str]) -> None:
    told = service.told("webhooks", "list", answers={"GET /v1/webhooks": {"data": [HOOK | changes]}}, data=data)
    assert cells(told, of="0198-hook") == ["0198-hook", *shown]


def test_a_receiver_is_registered_tried_turned_and_removed(service: Canned, data: Path) -> None:
    made = {"POST /v1/webhooks": {"id": "h", "secret": "whsec_1"}}
    told = service.told("webhooks", "add", "https://a", answers=made, data=data)
    assert service.sent == [("POST /v1/webhooks", {"url": "https://a", "events": []})]
    assert told.stdout == "whsec_1\n"
    assert told.stderr == "h is registered; this is the only time its secret is shown. Try it: `ratchet webhooks test h`\n"
    service.told("webhooks", "add", "https://a", "--policy", POLICY, "--event", "release.", answers=made, data=data)
    assert service.sent[0][1] == {"url": "https://a", "events": ["release."], "policy": POLICY}
    path = "POST /v1/webhooks/h/test"
    assert service.told("webhooks", "test", "h", answers={path: {"status": "200", "arrived": True}}, data=data).output == "h answered 200\n"
    refused = service.told("webhooks", "test", "h", answers={path: {"status": "500", "arrived": False}}, data=data)
    assert isinstance(refused.exception, Refused)
    assert "h did not take it (500)" in str(refused.exception)
    assert service.told("webhooks", "rotate", "h", answers={"POST /v1/webhooks/h/rotate": {"secret": "new"}}, data=data).output == "new\n"
    removed = service.told("webhooks", "remove", "h", answers={"DELETE /v1/webhooks/h": {"url": "https://a"}}, data=data)
    assert removed.output == "https://a hears no more\n"


def test_deliveries_are_listed_with_their_moments_and_as_many_as_were_asked_for(service: Canned, data: Path) -> None:
    rows = [
        {"event_id": "e1", "attempts": 2, "last_status": "204", "delivered_at": LATER, "next_attempt_at": None},
        {"event_id": "e2", "attempts": 0, "last_status": None, "delivered_at": None, "next_attempt_at": LATER},
    ]
    path = "GET /v1/webhooks/h/deliveries"
    told = service.told("webhooks", "deliveries", "h", answers={path: {"data": rows}}, data=data)
    assert cells(told, of="e1") == ["e1", "2", "204", "2026-02-03 04:05:06", ""]
    assert cells(told, of="e2") == ["e2", "0", "", "", "2026-02-03 04:05:06"]
    assert service.sent == [(f"{path}?limit=20", None)]
    for limit, code in (("0", 2), ("1", 0), ("1000", 0), ("1001", 2)):
        asked = service.told("webhooks", "deliveries", "h", "--limit", limit, answers={path: {"data": []}}, data=data)
        assert (asked.exit_code, [sent for sent, _ in service.sent]) == (code, [] if code else [f"{path}?limit={limit}"])


@pytest.mark.parametrize("words", [("keys", "list"), ("webhooks", "list"), ("webhooks", "deliveries", "h")])
def test_what_has_to_be_copied_is_whole_in_a_narrow_terminal(service: Canned, data: Path, words: tuple[str, ...]) -> None:
    id_ = "01980000-0000-7000-8000-00000000000a"
    sent = {"event_id": id_, "attempts": 2, "last_status": "204", "delivered_at": LATER, "next_attempt_at": LATER}
    answers = {
        "GET /v1/keys": {"keys": [key(prefix=id_)]}, "GET /v1/webhooks": {"data": [HOOK | {"id": id_}]},
        "GET /v1/webhooks/h/deliveries": {"data": [sent]},
    }  # fmt: skip
    assert id_ in service.told(*words, answers=answers, data=data, columns=100 if words[0] == "keys" else 40).stdout


# --- people ----------------------------------------------------------------------------------------------------------------

ADA = {
    "name": "ada", "roles": ["admin", "viewer"], "policy": None, "has_password": True, "provider": True, "made_by": "user:root",
    "disabled_at": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({}, ["all", "password provider", "user:root", "active"]),
        ({"policy": POLICY, "provider": False}, [POLICY, "password", "user:root", "active"]),
        ({"has_password": False}, ["all", "provider", "user:root", "active"]),
        ({"has_password": False, "provider": False}, ["all", "nothing yet", "user:root", "active"]),
        ({"disabled_at": LATER}, ["all", "password provider", "user:root", "disabled 2026-02-03T04:05"]),
    ],
)
def test_a_person_is_listed_with_how_they_sign_in(service: Canned, data: Path, changes: dict[str, Any], shown: list[str]) -> None:
    answers = {"GET /v1/people": {"people": [ADA | changes]}}
    told = service.told("people", "list", answers=answers, data=data)
    assert cells(told, of="ada") == ["ada", "admin, viewer", *shown]
    as_json = service.told("people", "list", "--json", answers=answers, data=data)
    assert as_json.output.startswith('[{"name": "ada"')
    assert len(as_json.output.splitlines()) == 1


def test_a_person_is_added_with_what_was_said_and_the_link_is_alone_on_the_output(service: Canned, data: Path) -> None:
    answers = {"POST /v1/people": {"link": "https://here/welcome", "roles": ["viewer", "rater"]}}
    told = service.told("people", "add", "bob", "--role", "viewer", answers=answers, data=data)
    assert service.sent == [("POST /v1/people", {"name": "bob", "roles": ["viewer"]})]
    assert told.stdout == "https://here/welcome\n"
    assert told.stderr == "bob is viewer, rater. The link is shown this once, and is good once, for a day.\n"
    more = ("--policy", POLICY, "--email", "b@example.com", "--os-user", "bob")
    service.told("people", "add", "bob", "--role", "viewer", *more, answers=answers, data=data)
    assert service.sent[0][1] == {"name": "bob", "roles": ["viewer"], "policy": POLICY, "email": "b@example.com", "os_user": "bob"}


@pytest.mark.parametrize(
    ("said", "changes"),
    [
        (("--role", "viewer"), {"roles": ["viewer"]}), (("--policy", "all"), {"policy": None}), (("--policy", POLICY), {"policy": POLICY}),
        (("--disable",), {"disabled": True}), (("--enable",), {"disabled": False}), (("--email", "b@c"), {"email": "b@c"}),
        (("--os-user", "bob"), {"os_user": "bob"}),
    ],
)  # fmt: skip
def test_what_is_changed_of_a_person_is_what_was_said(service: Canned, data: Path, said: tuple[str, ...], changes: dict[str, Any]) -> None:
    now = {"roles": ["viewer", "rater"], "policy": None, "disabled_at": None}
    told = service.told("people", "change", "bob", *said, answers={"PATCH /v1/people/bob": now}, data=data)
    assert service.sent == [("PATCH /v1/people/bob", changes)]
    assert told.output == "bob is viewer, rater of all policies\n"
    gone = {"PATCH /v1/people/bob": now | {"policy": POLICY, "disabled_at": LATER}}
    assert service.told("people", "change", "bob", *said, answers=gone, data=data).output == f"bob is viewer, rater of {POLICY}, disabled\n"


def test_nothing_is_asked_where_nothing_is_to_be_changed(service: Canned, data: Path) -> None:
    refused = service.told("people", "change", "bob", answers={}, data=data)
    assert isinstance(refused.exception, Refused)
    assert "nothing to change" in str(refused.exception)
    assert service.sent == []


def test_a_person_is_invited_again_signed_out_and_roles_are_told(service: Canned, data: Path) -> None:
    assert service.told("people", "invite", "bob", answers={"POST /v1/people/bob/link": {"link": "l"}}, data=data).output == "l\n"
    out = service.told("people", "sign-out", "bob", answers={"POST /v1/people/bob/sign-out": {}}, data=data)
    assert (out.output, service.sent) == ("every session and token of bob has ended\n", [("POST /v1/people/bob/sign-out", None)])
    roles = service.told("people", "roles", answers={"GET /v1/roles": {"vote": ["operator"], "look": ["viewer", "admin"]}}, data=data)
    assert cells(roles, of="vote").count("yes") == 1
    assert cells(roles, of="look").count("yes") == 2


# --- dead letters ------------------------------------------------------------------------------------------------------------

LETTER = {
    "id": 7, "topic": "t", "partition": 2, "offset": 30, "attempts": 3, "reason": "broken", "first_seen_at": LATER, "replayed_at": None,
}  # fmt: skip


def test_dead_letters_are_listed_a_line_each_and_those_that_wait_unless_all_are_asked_for(service: Canned, data: Path) -> None:
    answers = {"GET /v1/dead-letters": {"data": [LETTER, LETTER | {"replayed_at": LATER}]}}
    told = service.told("dlq", "list", answers=answers, data=data)
    assert told.stdout.splitlines() == [
        "7\t2026-02-03T04:05:06Z\tt:2:30\ttried 3×\tbroken", "7\t2026-02-03T04:05:06Z\tt:2:30\treplayed\tbroken",
    ]  # fmt: skip
    assert (told.stderr, service.sent) == ("2 dead letters\n", [("GET /v1/dead-letters?limit=100", None)])
    service.told("dlq", "list", "--all", "--reason", "a b", "--limit", "1000", answers=answers, data=data)
    assert service.sent == [("GET /v1/dead-letters?reason=a+b&replayed=true&limit=1000", None)]
    for limit in ("0", "1001"):
        assert service.told("dlq", "list", "--limit", limit, answers={}, data=data).exit_code == 2
    shown = service.told("dlq", "show", "7", answers={"GET /v1/dead-letters/7": {"payload": "grün"}}, data=data)
    assert shown.output == '{\n  "payload": "grün"\n}\n'


def test_a_replay_goes_on_from_page_to_page_and_adds_them_up(service: Canned, data: Path) -> None:
    path = "POST /v1/dead-letters/replay"
    pages = [
        {"applied": 5, "still": {"3": "broken", "4": "torn"}, "after": 40}, {"applied": 2, "still": {"9": "odd"}, "after": None},
    ]  # fmt: skip
    told = service.told("dlq", "replay", "3", "4", answers={path: list(pages)}, data=data)
    assert service.sent == [(path, {"ids": [3, 4], "after": 0}), (path, {"ids": [3, 4], "after": 40})]
    assert (told.stdout, told.stderr) == ("7 replayed, 3 still make no sense\n", "3: still broken\n4: still torn\n9: still odd\n")
    service.told("dlq", "replay", "--reason", "torn", answers={path: list(pages[1:])}, data=data)
    assert service.sent == [(path, {"ids": [], "reason": "torn", "after": 0})]


def test_old_letters_are_deleted_a_month_after_their_replay_or_as_it_is_said(service: Canned, data: Path) -> None:
    answers = {"POST /v1/dead-letters/purge": {"deleted": 4}}
    assert service.told("dlq", "purge", answers=answers, data=data).output == "4 deleted\n"
    assert service.sent[0][1] == {"days": 30.0}
    service.told("dlq", "purge", "--days", "0", answers=answers, data=data)
    assert service.sent[0][1] == {"days": 0.0}
    assert service.told("dlq", "purge", "--days", "-1", answers={}, data=data).exit_code == 2


# --- erasures ----------------------------------------------------------------------------------------------------------------

PSEUDONYM = "0123456789abcdef" * 2
REPORT = {
    "actor": PSEUDONYM, "already_erased": False, "turns": 1, "observations": 2, "labels": 3, "exposures": 4, "inbox_payloads": 5,
    "dead_letters": 6, "segments": 7, "trained_versions": ["v1", "v2"],
}  # fmt: skip


def test_a_person_is_forgotten_by_one_of_two_names_and_told_what_went(service: Canned, data: Path) -> None:
    told = service.told("erase", "--actor", "ada", answers={"POST /v1/erasures": REPORT}, data=data)
    assert service.sent == [("POST /v1/erasures", {"actor": "ada"})]
    assert told.output == (
        f"{PSEUDONYM}: removed 1 turns (empty shells stay), 2 observations, 3 labels, 4 exposures, 5 inbox payloads, 6 dead letters; "
        "rewrote 7 segments\nversions trained on them: v1, v2\n"
    )
    again = {"POST /v1/erasures": REPORT | {"already_erased": True, "trained_versions": []}}
    told = service.told("erase", "--pseudonym", PSEUDONYM, answers=again, data=data)
    assert service.sent == [("POST /v1/erasures", {"pseudonym": PSEUDONYM})]
    assert told.output.startswith(f"{PSEUDONYM}: erased before; removed 1 turns")
    assert told.output.endswith("versions trained on them: none\n")


@pytest.mark.parametrize("said", [(), ("--actor", "ada", "--pseudonym", PSEUDONYM), ("--pseudonym", "ada")])
def test_nobody_is_forgotten_by_two_names_by_none_or_by_a_pseudonym_that_is_none(
    service: Canned, data: Path, said: tuple[str, ...]
) -> None:
    assert isinstance(service.told("erase", *said, answers={}, data=data).exception, BadInput)
    assert service.sent == []


def test_a_proof_names_every_place_and_ends_with_one_where_something_is_left(service: Canned, data: Path) -> None:
    path = "POST /v1/erasures/verify"
    clean = [{"place": "turns", "found": 0, "cure": "erase"}, {"place": "inbox", "found": 0, "cure": ""}]
    told = service.told("erase", "--actor", "ada", "--verify", answers={path: {"pseudonym": PSEUDONYM, "places": clean}}, data=data)
    assert (told.exit_code, service.sent) == (0, [(path, {"actor": "ada"})])
    assert told.output == f"       0  turns\n       0  inbox\n{PSEUDONYM}: nothing is left in 2 places\n"
    left = [{"place": "turns", "found": 2, "cure": "erase"}, {"place": "inbox", "found": 3, "cure": ""}]
    told = service.told("erase", "--actor", "ada", "--verify", answers={path: {"pseudonym": PSEUDONYM, "places": left}}, data=data)
    assert told.exit_code == 1
    assert told.output == f"       2  turns (erase)\n       3  inbox\n{PSEUDONYM}: 5 traces are left in 2 places\n"
    swept = service.told("erase", "--sweep", answers={"POST /v1/erasures/sweep": {"removed": 8}}, data=data)
    assert (swept.output, service.sent) == ("removed 8 segments that no row knew\n", [("POST /v1/erasures/sweep", None)])


# --- rules and signing in ------------------------------------------------------------------------------------------------------


def test_rules_are_in_force_once_a_labeller_said_so_and_its_refusal_is_told(service: Canned, data: Path) -> None:
    (data / "rules.toml").write_text('name = "mine"\n')
    path, words = f"/v1/policies/{POLICY}/rules", ("rules", "activate", str(data / "rules.toml"), "--policy", POLICY)
    waiting = {"id": 2, "state": "waiting", "refused": None, "digest": "d" * 64}
    settled = {"proposals": [{"id": 1, "state": "waiting"}, waiting | {"state": "in_force"}]}
    looks = [{"proposals": [waiting]}, settled]
    told = service.told(*words, answers={f"POST {path}": waiting, f"GET {path}": looks}, data=data)
    assert told.output == f"{'d' * 12} is in force for {POLICY}; running labellers score by it within seconds\n"
    assert [asked for asked, _ in service.sent] == [f"POST {path}", f"GET {path}", f"GET {path}"]
    assert service.sent[0][1]["toml"] == 'name = "mine"\n'
    told = service.told(*words, answers={f"POST {path}": waiting | {"state": "refused", "refused": "no term pays"}}, data=data)
    assert isinstance(told.exception, Refused)
    assert "refused by the labeller: no term pays" in str(told.exception)
    assert len(service.sent) == 1, "what is settled is asked after no more"


def test_a_person_signs_in_with_a_password_and_the_token_is_kept_for_this_service_alone(
    service: Canned, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = {"GET /v1/me": {"actor": "user:ada", "roles": ["admin", "rater"]}, "POST /v1/sign-in": {"token": "rt_12345678_x"}}
    told = service.told("login", "--name", "ada", answers=me, data=data, typed="hunter2\n", token="other")
    asked = service.sent[0][1]
    assert (asked["name"], asked["password"], asked["expires_days"]) == ("ada", "hunter2", 30.0)
    assert asked["token_name"].startswith("terminal on ")
    assert service.tokens == [None, "Bearer rt_12345678_x"], "nobody signs in as somebody else"
    assert told.output.endswith(f"signed in to {service.url} as user:ada (admin, rater); the token is in {data}/ratchet/tokens.json\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(data))
    assert kept_token(service.url) == "rt_12345678_x"
    answers = {"DELETE /v1/tokens/rt_12345678": {}}
    assert service.told("logout", answers=answers, data=data).output == f"the token for {service.url} has ended\n"
    assert (service.tokens, kept_token(service.url)) == (["Bearer rt_12345678_x"], None)
    assert isinstance(service.told("logout", answers=answers, data=data).exception, Refused)


def test_a_program_s_key_is_no_token_and_a_token_that_was_made_elsewhere_is_kept(service: Canned, data: Path) -> None:
    program = {"GET /v1/me": {"actor": "key:rk_1", "roles": []}}
    refused = service.told("login", "--token", answers=program, data=data, typed="rk_1\n")
    assert isinstance(refused.exception, Refused)
    assert not (data / "ratchet" / "tokens.json").exists()
    told = service.told("login", "--token", answers={"GET /v1/me": {"actor": "user:a", "roles": ["x"]}}, data=data, typed=" made \n")
    assert (told.exit_code, service.tokens) == (0, ["Bearer made"])
    for days, code in (("0", 2), ("366.1", 2), ("366", 0)):
        answers = {"POST /v1/sign-in": {"token": "t"}, "GET /v1/me": {"actor": "user:a", "roles": ["x"]}}
        told = service.told("login", "--name", "a", "--days", days, answers=answers, data=data, typed="p\n")
        assert told.exit_code == code


# --- history ---------------------------------------------------------------------------------------------------------------------


def test_an_import_counts_what_became_of_each_event_and_tells_the_refused_ones(service: Canned, data: Path) -> None:
    talk = {"id": 1, "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "\ud800"}]}
    with zipfile.ZipFile(data / "s.whl", "w") as archive:
        archive.writestr("x/data/part.json", json.dumps([talk, talk | {"id": 2}, talk | {"id": 3}]))
    results = [{"status": "accepted"}, {"status": "duplicate"}, {"status": "rejected", "reason": "no text"}]
    words = ("import", "sharegpt", "--wheel", str(data / "s.whl"), "--policy", POLICY, "--key", "secret", "--url", service.url)
    told = service.told(*words, answers={"POST /v1/events": [(202, {"results": results})]}, data=data)
    assert json.loads(told.stdout) == {
        "conversations": 3, "accepted": 1, "duplicate": 1, "conflict": 0, "rejected": 1, "too_large": 0,
    }  # fmt: skip
    assert told.stderr == "rejected: no text\n"
    [(_, sent)] = service.sent
    assert [event["data"]["completion"] for event in sent] == ["?"] * 3, "half a pair is no text"
    assert service.tokens == ["Bearer secret"]
    few = service.told(*words, "--limit", "2", answers={"POST /v1/events": [(202, {"results": []})]}, data=data)
    assert (json.loads(few.stdout)["conversations"], len(service.sent[0][1])) == (2, 2)
    assert service.told(*words, "--limit", "0", answers={}, data=data).exit_code == 2
