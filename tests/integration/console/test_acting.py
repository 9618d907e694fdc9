"""Acts from pages: the effect is spelled out, done once, on what was seen; what moved on is said and what was typed is kept."""

import re
import threading
from html import unescape
from typing import Any

from sqlalchemy import Engine, func, select
from starlette.testclient import TestClient

from app.db.engine import reading
from app.db.tables import approvals, audit
from app.domain.people import Visitor
from app.domain.release.alarms import AlarmKind
from app.domain.release.releases import ReleaseState
from tests.fakes.console import OPEN, OPERATOR, VIEWER, browser
from tests.fakes.releases import BOB, POLICY, ReleaseRoom
from tests.integration.console.deployment import deploy

CANDIDATE = "release-2"
BOBBY = Visitor(actor=BOB, actions=OPERATOR.actions, policy=None)


def form(client: TestClient, act: str, subject: str = CANDIDATE) -> dict[str, str]:
    """The fields of an act's form as a browser would send them."""
    page = client.get(f"/console/act/{act}/{subject}")
    assert page.status_code == 200, page.text
    return fields(page.text)


def fields(text: str) -> dict[str, str]:
    inputs = re.findall(r"<input ([^>]*)>", text.split('<form class="act"')[1].split("</form>")[0])
    named = [dict(re.findall(r'([\w-]+)="([^"]*)"', one)) for one in inputs]
    return {one["name"]: unescape(one.get("value", "")) for one in named if "name" in one}


def send(client: TestClient, act: str, filled: dict[str, str], subject: str = CANDIDATE) -> Any:
    return client.post(f"/console/act/{act}/{subject}", data=filled)


def count(engine: Engine, table: str, **of: str) -> int:
    known = {"approvals": approvals, "audit": audit}[table]
    with reading(engine) as connection:
        return connection.execute(
            select(func.count()).select_from(known).where(*(known.c[name] == value for name, value in of.items()))
        ).scalar_one()


def test_the_effect_is_spelled_out_the_act_done_and_a_lost_answer_is_found_out(engine: Engine) -> None:
    room = deploy(engine)
    client = browser(engine, room.desk)
    page = client.get(f"/console/act/approve/{CANDIDATE}").text
    assert "tiny-v1 → tiny-v2 for 12 people" in page
    filled = fields(page) | {"reason": "looked at every gate"}
    first, again = send(client, "approve", filled), send(client, "approve", filled)
    assert (first.status_code, again.status_code) == (303, 303)
    assert "nothing was done twice" in client.get(again.headers["location"]).text
    assert "nothing was done twice" not in client.get(first.headers["location"]).text
    assert room.desk.find(CANDIDATE).state is ReleaseState.APPROVED
    assert count(engine, "approvals") == 1
    assert count(engine, "audit", action="release.approval") == 1


def test_two_tabs_and_two_clicks_at_once_give_one_approval(engine: Engine) -> None:
    room = deploy(engine)
    client = browser(engine, room.desk)
    tabs = [form(client, "approve"), form(client, "approve")]
    answers: list[int] = []
    clicks = [threading.Thread(target=lambda tab=tab: answers.append(send(client, "approve", tab).status_code)) for tab in (*tabs, *tabs)]
    for click in clicks:
        click.start()
    for click in clicks:
        click.join()
    assert sorted(answers) == [303, 303, 409, 409], "one tab's both clicks are one act; the other tab's come to nothing"
    assert count(engine, "approvals") == 1


def test_a_browser_beside_a_terminal_gives_one_approval_and_says_what_happened_since(engine: Engine) -> None:
    room = deploy(engine)
    client = browser(engine, room.desk)
    filled = form(client, "approve") | {"reason": "my very own words"}
    room.desk.approve(CANDIDATE, approver=BOB, evidence=filled["evidence"])
    answer = send(client, "approve", filled)
    assert answer.status_code == 409
    assert "Nothing was done" in answer.text
    assert "APPROVED since you looked" in answer.text
    assert fields(answer.text)["reason"] == "my very own words"
    assert count(engine, "approvals") == 1


def test_what_the_pointer_did_meanwhile_is_said_and_nothing_is_rolled_back_unseen(sqlite_engine: Engine) -> None:
    room = deploy(sqlite_engine)
    room.desk.approve(CANDIDATE, approver=BOB, evidence=room.desk.find(CANDIDATE).evidence_digest or "")
    client = browser(sqlite_engine, room.desk)
    stale = form(client, "roll_back", "release-1")
    room.desk.promote(room.desk.begin_promotion(CANDIDATE).id)
    answer = send(client, "roll_back", stale | {"reason": "it does harm"}, "release-1")
    assert answer.status_code == 409
    assert "moved on since you looked" in answer.text
    assert "promote of v2" in answer.text
    assert room.desk.pointer(POLICY).digest == "v2"


def test_a_champion_is_rolled_back_with_people_and_conversations_named(sqlite_engine: Engine) -> None:
    room = promoted(sqlite_engine)
    client = browser(sqlite_engine, room.desk)
    page = client.get(f"/console/act/roll_back/{CANDIDATE}")
    assert re.search(r"tiny-v2 → tiny-v1 for 12 people; \d+ open conversations go on with tiny-v1", page.text)
    answer = send(client, "roll_back", fields(page.text))
    assert answer.status_code == 303
    assert room.desk.pointer(POLICY).digest == "v1"
    assert "quarantine" in client.get("/console/versions").text


def promoted(engine: Engine) -> ReleaseRoom:
    room = deploy(engine)
    room.desk.approve(CANDIDATE, approver=BOB, evidence=room.desk.find(CANDIDATE).evidence_digest or "")
    room.desk.promote(room.desk.begin_promotion(CANDIDATE).id)
    return room


def test_who_may_not_act_is_told_who_may_and_nothing_is_done(sqlite_engine: Engine) -> None:
    room = deploy(sqlite_engine)
    client = browser(sqlite_engine, room.desk, visitor=VIEWER)
    page = client.get(f"/console/act/approve/{CANDIDATE}")
    assert "You may not do this" in page.text
    answer = send(client, "approve", fields(page.text))
    assert answer.status_code == 409
    assert "admin, operator may" in answer.text
    assert room.desk.find(CANDIDATE).state is ReleaseState.READY


def test_on_an_open_deployment_people_say_who_they_are(sqlite_engine: Engine) -> None:
    room = deploy(sqlite_engine)
    client = browser(sqlite_engine, room.desk, visitor=OPEN)
    filled = form(client, "approve")
    assert "who" in filled
    nameless = send(client, "approve", filled | {"who": " "})
    assert nameless.status_code == 409
    assert "say who you are" in nameless.text
    assert send(client, "approve", filled | {"who": "carol"}).status_code == 303
    assert count(sqlite_engine, "approvals", approver="user:carol") == 1


def test_on_an_open_deployment_nobody_is_two(sqlite_engine: Engine) -> None:
    room = deploy(sqlite_engine)
    room.desk.freeze(POLICY, AlarmKind.GAP, actor="system:watch", reason="paid more, no better")
    client = browser(sqlite_engine, room.desk, visitor=OPEN)
    for act, subject in (("unfreeze", POLICY), ("lift", "v9")):
        for who in ("carol", "dave"):
            answer = send(client, act, form(client, act, subject) | {"who": who, "reason": "looked into it"}, subject)
            assert (answer.status_code, "one person could be two" in unescape(answer.text)) == (409, True), (act, who)
    with room.ledger.transaction(POLICY) as tx:
        assert tx.frozen() is not None


def test_a_form_without_a_reason_or_with_another_s_request_does_nothing(sqlite_engine: Engine) -> None:
    room = deploy(sqlite_engine)
    client, other = browser(sqlite_engine, room.desk), browser(sqlite_engine, room.desk, visitor=BOBBY)
    filled = form(client, "approve")
    assert "needs a reason" in send(client, "approve", filled | {"reason": ""}).text
    assert send(client, "approve", filled | {"generation": "x"}).status_code == 400
    assert send(client, "approve", filled).status_code == 303
    stolen = send(other, "reject", filled | {"reason": "no"})
    assert stolen.status_code == 409
    assert room.desk.find(CANDIDATE).state is ReleaseState.APPROVED


def test_a_policy_s_key_meets_another_policy_s_release_as_nothing(sqlite_engine: Engine) -> None:
    room = deploy(sqlite_engine)
    client = browser(sqlite_engine, room.desk, visitor=Visitor(actor=BOB, actions=OPERATOR.actions, policy="composer"))
    for act, subject in (("approve", CANDIDATE), ("unfreeze", POLICY), ("lift", "v2")):
        page = client.get(f"/console/act/{act}/{subject}?policy={POLICY}")
        assert page.status_code == 404, "404, not 403: it does not exist for them"
        assert send(client, act, {"policy": POLICY, "reason": "x", "generation": "1"}, subject).status_code in (200, 404)
    assert room.desk.find(CANDIDATE).state is ReleaseState.READY
