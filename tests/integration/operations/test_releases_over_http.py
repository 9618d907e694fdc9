"""What commands about releases send to the service and what they print of its answer; and how the terminal shows a deployment."""

import json
from pathlib import Path
from typing import Any

import pytest

from app.domain.errors import NotFound, Refused, UnknownPolicy
from pipelines.commands.operating import Silent
from tests.integration.operations.canned import POLICY, Canned, cells

ID = "01980000-0000-7000-8000-00000000000a"
EVIDENCE = "e" * 64
ONE_VOTE = "one vote of two: a second person has to run the same command"
SINCE = "2026-02-03T04:05:06.789+00:00"


def release(**changes: Any) -> dict[str, Any]:
    return {
        "id": ID, "policy": POLICY, "version_name": "tiny-s1", "state": "READY", "stage": None, "evidence_digest": EVIDENCE,
        "reason": "why", "changed_at": SINCE, "champion_digest": "c" * 64, "champion_generation": 3, "approvals_needed": 2,
        "initiator": "system:loop", "terms": {}, "gates": [], "approval_expires_at": None,
    } | changes  # fmt: skip


def deployment(**changes: Any) -> dict[str, Any]:
    pointer = {"generation": 3, "digest": "c" * 64, "changed_at": SINCE}
    return {"pointer": pointer, "frozen": None, "unfreeze_votes": [], "alarms": [], "quarantine": []} | changes


def acted(act: str, **answer: Any) -> dict[str, Any]:
    """A service that knows the release, its pointer at generation 3, and carries the act out."""
    done = {"version_name": "tiny-s1", "state": "APPROVED", "reason": "looked"} | answer
    return {
        f"GET /v1/releases/{ID}": release(), "GET /v1/releases": {"data": [release()]}, f"POST /v1/releases/{ID}/{act}": done,
        f"GET /v1/policies/{POLICY}/deployment": deployment(),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "sent"),
    [
        (("approve", ID, "--evidence", EVIDENCE), {"pointer_generation": 3}),
        (("approve", ID, "--evidence", "other", "--generation", "2", "--reason", "fine"),
         {"evidence_digest": "other", "pointer_generation": 2, "reason": "fine"}),
        (("reject", ID, "--reason", "bad"), {"pointer_generation": 3, "reason": "bad"}),
        (("reject", "tiny-s1", "--reason", "bad", "--generation", "1"), {"pointer_generation": 1, "reason": "bad"}),
        (("abort", ID[:8], "--reason", "bad"), {"pointer_generation": 3, "reason": "bad"}),
        (("rollback", ID, "--reason", "bad"), {"pointer_generation": 3, "reason": "bad"}),
        (("rollback", ID, "--reason", "bad", "--to", "v1"), {"pointer_generation": 3, "reason": "bad", "to": "v1"}),
    ],
)  # fmt: skip
def test_an_act_names_what_was_looked_at_and_says_what_it_rested_on(
    service: Canned, data: Path, words: tuple[str, ...], sent: dict[str, Any]
) -> None:
    told, sent = service.told("release", *words, answers=acted(words[0]), data=data), {"evidence_digest": EVIDENCE} | sent
    asked, body = service.sent[-1]
    assert (asked, body | {"request_id": ""}) == (f"POST /v1/releases/{ID}/{words[0]}", sent | {"request_id": ""})
    seen = f"evidence {sent['evidence_digest'][:12]}, pointer generation {sent['pointer_generation']}"
    assert told.output == f"tiny-s1 is APPROVED: looked [{seen}]\n"
    again = service.told("release", *words, answers=acted(words[0], already="done before"), data=data)
    assert again.output == f"tiny-s1 is APPROVED: looked (done before) [{seen}]\n"


@pytest.mark.parametrize("act", ["approve", "reject", "abort", "rollback"])
def test_a_pointer_that_was_never_set_has_no_generation_to_be_named(service: Canned, data: Path, act: str) -> None:
    answers = acted(act) | {f"GET /v1/policies/{POLICY}/deployment": deployment(pointer=None)}
    answers[f"GET /v1/releases/{ID}"] = release(evidence_digest=None)
    words = ("--evidence", EVIDENCE) if act == "approve" else ("--reason", "bad")
    told = service.told("release", act, ID, *words, answers=answers, data=data)
    assert "pointer_generation" not in service.sent[-1][1]
    assert told.output.endswith(f"[evidence {'e' * 12 if act == 'approve' else 'none'}, pointer generation None]\n")
    assert service.told("release", act, ID, *words, "--generation", "0", answers=answers, data=data).exit_code == 2


@pytest.mark.parametrize(
    ("digest", "said"), [(EVIDENCE, f"name the evidence that you looked at: --evidence {EVIDENCE}"), (None, "the release is READY")]
)
def test_nobody_approves_without_naming_what_they_looked_at(service: Canned, data: Path, digest: str | None, said: str) -> None:
    answers = acted("approve") | {f"GET /v1/releases/{ID}": release(evidence_digest=digest)}
    refused = service.told("release", "approve", ID, answers=answers, data=data)
    assert isinstance(refused.exception, Refused)
    assert said in str(refused.exception)
    assert [asked for asked, _ in service.sent] == [f"GET /v1/releases/{ID}"]


@pytest.mark.parametrize(
    ("words", "path", "answer", "said"),
    [
        (("anchor", POLICY), "anchor", {"anchor": "a" * 64}, f"the anchor of {POLICY} is {'a' * 64}"),
        (("anchor", POLICY), "anchor", {"already": "renewed"}, f"the anchor of {POLICY} is renewed already"),
        (("unfreeze", POLICY), "unfreeze", {"free": True}, "promotions are free"),
        (("unfreeze", POLICY), "unfreeze", {"free": False}, ONE_VOTE),
        (("unfreeze", POLICY), "unfreeze", {"free": True, "already": "voted"}, "voted"),
        (("lift", POLICY, "dd"), f"quarantine/{'d' * 64}/lift", {"lifted": True}, "it may serve again"),
        (("lift", POLICY, "dd"), f"quarantine/{'d' * 64}/lift", {"lifted": False}, ONE_VOTE),
        (("lift", POLICY, "dd"), f"quarantine/{'d' * 64}/lift", {"lifted": False, "already": "voted"}, "voted"),
        (("pin", POLICY, "two"), f"versions/{'2' * 64}/pin", {}, f"{'2' * 64} is kept until it is unpinned"),
        (("unpin", POLICY, "22"), f"versions/{'2' * 64}/unpin", {}, f"{'2' * 64} is kept only while something else needs it"),
    ],
)  # fmt: skip
def test_an_act_on_a_policy_says_what_became_of_it(
    service: Canned, data: Path, words: tuple[str, ...], path: str, answer: dict[str, Any], said: str
) -> None:
    barred = [{"digest": "d" * 64}, {"digest": "f" * 64}]
    answers = {
        f"GET /v1/policies/{POLICY}/deployment": deployment(quarantine=barred), f"POST /v1/policies/{POLICY}/{path}": answer,
        "GET /v1/versions": {"data": [{"digest": "1" * 64, "name": "one"}, {"digest": "2" * 64, "name": "two"}]},
    }  # fmt: skip
    reason = () if words[0] == "unfreeze" else ("--reason", "because")
    told = service.told("release", *words, *reason, answers=answers, data=data)
    assert told.output == f"{said}\n"
    asked, body = service.sent[-1]
    assert asked == f"POST /v1/policies/{POLICY}/{path}"
    assert body["reason"] == ("unfreeze" if words[0] == "unfreeze" else "because")
    assert body.get("pointer_generation") == (3 if words[0] in ("anchor", "pin", "unpin") else None)
    assert isinstance(service.told("release", words[0], "nobody", *words[2:], *reason, answers={}, data=data).exception, UnknownPolicy)
    assert service.sent == [], "a policy that is not declared here is asked nothing about"


def test_one_version_is_meant_or_none(service: Canned, data: Path) -> None:
    known = {"GET /v1/versions": {"data": [{"digest": "11", "name": "one"}, {"digest": "12", "name": "two"}]}}
    barred = {f"GET /v1/policies/{POLICY}/deployment": deployment(quarantine=[{"digest": "11"}, {"digest": "12"}])}
    for words, said in (
        (("pin", POLICY, "1"), "2 versions of tab are called '1'"), (("unpin", POLICY, "3"), "0 versions of tab are called '3'"),
        (("lift", POLICY, "1"), "2 quarantined versions begin with '1'"), (("lift", POLICY, "3"), "0 quarantined versions begin with '3'"),
    ):  # fmt: skip
        refused = service.told("release", *words, "--reason", "r", answers=known | barred, data=data)
        assert isinstance(refused.exception, NotFound)
        assert said in str(refused.exception)


# --- how a deployment is -----------------------------------------------------------------------------------------------------


def shown(releases: list[dict[str, Any]] | None = None, held: list[dict[str, Any]] | None = None, **changes: Any) -> dict[str, Any]:
    """A service with one policy."""
    return {
        "GET /health": {"api": "ok"}, "GET /v1/me": {"actor": "user:ada"}, "GET /v1/policies": {"data": [POLICY]},
        "GET /v1/releases": {"data": releases or []}, "GET /v1/engines": {"data": [{"address": "http://e", "policies": held or []}]},
        f"GET /v1/policies/{POLICY}/deployment": deployment(**changes),
    }  # fmt: skip


def test_a_calm_deployment_ends_with_nought_and_shows_what_is_live(service: Canned, data: Path) -> None:
    told = service.told("status", answers=shown(), data=data)
    assert told.exit_code == 0
    assert told.stdout.splitlines()[0] == f"{service.url} as user:ada"
    assert cells(told, of=POLICY) == [POLICY, "c" * 12, "3", "2026-02-03T04:05:06", "free"]
    assert told.stdout.splitlines()[-1] == "nothing needs you"
    assert "version" not in told.stdout, "nothing is in flight"
    assert ("GET /v1/releases?limit=200", None) in service.sent
    service.told("status", "--policy", POLICY, answers=shown(), data=data)
    assert (f"GET /v1/releases?policy={POLICY}&limit=200", None) in service.sent
    bare = service.told("status", answers=shown(pointer=None), data=data)
    assert cells(bare, of=POLICY) == [POLICY, "nothing yet", "", "", "free"]


@pytest.mark.parametrize(
    ("changes", "need"),
    [
        ({"frozen": "harm", "unfreeze_votes": ["user:a"]}, "promotions are frozen (harm): 1 of 2 votes (ratchet release unfreeze tab)"),
        ({"alarms": [{"kind": "gap", "reason": "paid more", "until": "unfrozen", "ended_at": None}]}, "gap: paid more, until unfrozen"),
        ({"held": [{"policy": POLICY, "lag": {"champions": 2}}]}, "the engine at http://e is 2 champions behind"),
        ({"releases": [release(approvals_needed=None, approval_expires_at="2020-01-01T00:00:00+00:00")]},
         f"tiny-s1 is READY: 1 approval, and the time for it is over (ratchet release approve {ID} --evidence {EVIDENCE})"),
    ],
)  # fmt: skip
def test_what_needs_somebody_is_a_sentence_and_ends_with_one(service: Canned, data: Path, changes: dict[str, Any], need: str) -> None:
    told = service.told("status", answers=shown(**changes), data=data)
    assert (told.exit_code, told.stdout.splitlines()[-1]) == (1, f"! {POLICY}: {need}")
    assert cells(told, of=f"{POLICY} ")[-1] == ("frozen" if "frozen" in changes else "free") or "releases" in changes
    as_json = service.told("status", "--json", answers=shown(**changes), data=data)
    assert (as_json.exit_code, json.loads(as_json.stdout)["needs"]) == (1, [f"{POLICY}: {need}"])


@pytest.mark.parametrize(
    "changes",
    [
        {"alarms": [{"kind": "gap", "reason": "r", "until": "u", "ended_at": SINCE}]},
        {"held": [{"policy": POLICY, "lag": {"champions": 0}}]},
        {"held": [{"policy": POLICY, "lag": None}, {"policy": "other", "lag": {"champions": 2}}]},
        {"releases": [release(policy="other")]}, {"releases": [release(state="CHAMPION")]},
    ],
)  # fmt: skip
def test_what_is_over_or_another_policy_s_needs_nobody(service: Canned, data: Path, changes: dict[str, Any]) -> None:
    assert service.told("status", answers=shown(**changes), data=data).exit_code == 0


def test_a_service_that_is_unwell_ends_with_one_and_says_what_of_it(service: Canned, data: Path) -> None:
    told = service.told("status", answers=shown() | {"GET /health": {"api": "ok", "relay": "3 waiting"}}, data=data)
    assert (told.exit_code, told.stdout.splitlines()[1]) == (1, "! relay: 3 waiting")
    refused = service.told("status", "--policy", "nobody", answers=shown(), data=data)
    assert isinstance(refused.exception, NotFound)
    assert "none that user:ada sees" in str(refused.exception)


@pytest.mark.parametrize(
    ("state", "flies"), [("CANARY", True), ("JUDGING", True), ("READY", True), ("APPROVED", True), ("PROMOTING", True), ("QUEUED", False)]
)
def test_what_is_in_flight_has_a_row(service: Canned, data: Path, state: str, flies: bool) -> None:
    rows = [release(state=state, policy="other"), release(state=state)]
    told = service.told("status", "--json", answers=shown(releases=rows), data=data)
    assert [row["policy"] for row in json.loads(told.stdout)["flight"]] == [POLICY] * flies
    if flies:
        row = cells(service.told("status", answers=shown(releases=rows), data=data), of=ID)
        assert row == [ID, "tiny-s1", state, "why", "2026-02-03T04:05:06"]


def test_releases_are_asked_for_as_it_was_said_and_shown_short(service: Canned, data: Path) -> None:
    answers = {"GET /v1/releases": {"data": [release(stage=0), release(id="other", evidence_digest=None, stage=None)]}}
    told = service.told("releases", answers=answers, data=data)
    assert cells(told, of=ID) == [ID, POLICY, "tiny-s1", "READY", "0", "e" * 12, "why", "2026-02-03T04:05:06"]
    assert cells(told, of="other") == ["other", POLICY, "tiny-s1", "READY", "", "", "why", "2026-02-03T04:05:06"]
    assert service.sent == [("GET /v1/releases?limit=20", None)]
    for limit, code in (("0", 2), ("1", 0), ("1000", 0), ("1001", 2)):
        assert service.told("releases", "--limit", limit, "--state", "READY", answers=answers, data=data).exit_code == code
        assert service.sent == ([] if code else [(f"GET /v1/releases?state=READY&limit={limit}", None)])


def slot(status: str, **changes: Any) -> dict[str, Any]:
    row = {"policy": POLICY, "slot": "s", "status": status, "step": "batch", "reason": None, "started_at": SINCE, "took_s": 61.5}
    return row | changes


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([slot("held"), slot("held")], 1), ([slot("failed"), slot("held")], 1), ([slot("held"), slot("done"), slot("held")], 0),
        ([slot("done"), slot("held"), slot("held")], 0), ([slot("held")], 0), ([slot("held"), slot("held", policy="other")], 0), ([], 0),
    ],
)  # fmt: skip
def test_two_slots_in_a_row_without_an_update_end_with_one(service: Canned, data: Path, rows: list[dict[str, Any]], code: int) -> None:
    told = service.told("slots", answers={"GET /v1/slots": {"data": rows}}, data=data)
    assert (told.exit_code, service.sent) == (code, [("GET /v1/slots?limit=48", None)])
    if rows:
        assert cells(told, of=POLICY) == [POLICY, "s", rows[0]["status"], "batch", "", "2026-02-03T04:05:06", "62 s"]
    for limit, exit_code in (("0", 2), ("1", code), ("1000", code), ("1001", 2)):
        assert service.told("slots", "--limit", limit, answers={"GET /v1/slots": {"data": rows}}, data=data).exit_code == exit_code


def test_a_slot_that_runs_took_nothing_yet(service: Canned, data: Path) -> None:
    told = service.told("slots", answers={"GET /v1/slots": {"data": [slot("running", took_s=None)]}}, data=data)
    assert cells(told, of=POLICY)[-1] == ""


def test_two_releases_are_compared_by_state_terms_and_figures_and_the_same_is_not_told(service: Canned, data: Path) -> None:
    gate = {"gate": "offline", "verdict": "pass", "reason": "fine", "evidence": {"score": {"mean": 0.5, "n": 3}}}
    one = release(gates=[gate], terms={"canary": {"hours": 1}})
    other = release(
        id="other", gates=[gate | {"verdict": "fail", "evidence": {"score": {"mean": 0.25, "n": 3}}}], terms={"canary": {"hours": 2}}
    )
    answers = {
        "GET /v1/releases": {"data": [one, other]}, f"GET /v1/releases/{ID}": one, "GET /v1/releases/other": other,
    }  # fmt: skip
    told = service.told("diff", ID, "other", "--json", answers=answers, data=data)
    assert told.exit_code == 1
    assert json.loads(told.stdout) == [
        {"what": "offline.score.mean", "one": 0.5, "other": 0.25}, {"what": "offline.verdict", "one": "pass", "other": "fail"},
        {"what": "terms.canary.hours", "one": 1, "other": 2},
    ]  # fmt: skip
    shown = service.told("diff", ID, "other", answers=answers, data=data)
    assert cells(shown, of="offline.verdict") == ["offline.verdict", "pass", "fail"]
    same = service.told("diff", ID, ID, "--json", answers=answers, data=data)
    assert (same.exit_code, json.loads(same.stdout)) == (0, [])


@pytest.mark.parametrize(("lines", "asked", "told"), [("2", 2, ["1", "2"]), ("1", 1, ["1", "2"]), ("0", 1, [])])
def test_the_chain_is_shown_the_oldest_first(service: Canned, data: Path, lines: str, asked: int, told: list[str]) -> None:
    entry = {"occurred_at": SINCE, "actor": "user:ada", "action": "a", "subject": "s", "detail": {"why": "grün\u202e"}}
    answers = {"GET /v1/audit": {"data": [entry | {"seq": 2}, entry | {"seq": 1}]}}
    found = service.told("tail", "--no-follow", "--lines", lines, "--subject", "s", answers=answers, data=data)
    assert service.sent == [(f"GET /v1/audit?subject=s&limit={asked}", None)]
    assert [line.split()[0] for line in found.stdout.splitlines()] == told
    if told:
        assert found.stdout.splitlines()[0] == '1 2026-02-03T04:05:06 user:ada a s {"why": "grün�"}'
    service.told("tail", "--no-follow", answers=answers, data=data)
    assert service.sent == [("GET /v1/audit?limit=20", None)]
    for number, code in (("-1", 2), ("1000", 0), ("1001", 2)):
        assert service.told("tail", "--no-follow", "--lines", number, answers=answers, data=data).exit_code == code


def test_a_look_that_finds_no_service_ends_a_counted_top_and_its_looks_are_as_many_as_were_asked_for(service: Canned, data: Path) -> None:
    told = service.told("top", "--json", "--count", "2", "--every", "0.2", answers=shown(), data=data)
    assert (len(told.stdout.splitlines()), told.exit_code) == (2, 0)
    away = service.told("top", "--json", "--count", "2", "--every", "0.2", "--url", "http://127.0.0.1:9", answers={}, data=data)
    assert (away.stdout, isinstance(away.exception, Silent)) == ("", True)
    for words in (("--count", "0"), ("--count", "1", "--every", "0.19")):
        assert service.told("top", *words, answers=shown(), data=data).exit_code == 2
