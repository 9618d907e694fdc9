"""Blind pairs on pages: nothing tells the sides apart before the vote, and everybody votes once."""

import re
import threading
from dataclasses import replace
from datetime import timedelta
from html import unescape
from typing import Any

import pytest
from sqlalchemy import Engine, insert, select
from starlette.testclient import TestClient

from app.db import locks
from app.db.access.erasures import announce, erase_actor
from app.db.engine import reading, writing
from app.db.release.pairs import SqlPairs
from app.db.release.release_views import SqlReleaseViews
from app.db.tables import audit, blind_pairs, blind_votes, erasures, observations
from app.db.upkeep.past import retire_pairs
from app.domain.ids import utc_now
from app.domain.people import Visitor
from app.domain.release.pairs import BlindPair
from app.domain.telemetry.events import Erasure
from tests.fakes.console import OPEN, OPERATOR, VIEWER, browser
from tests.fakes.releases import BOB, POLICY
from tests.integration.console.deployment import HOSTILE, deploy

RELEASE = "release-2"
BOBBY = Visitor(actor=BOB, actions=OPERATOR.actions, policy=None)
ANSWERS = ("the answer with a river", "the answer with a mountain")


def pair(number: int = 0, *, champion: str = ANSWERS[0], candidate: str = ANSWERS[1], **more: Any) -> BlindPair:
    given: dict[str, Any] = {
        "salt": f"salt {number}", "cluster": "p1", "messages": [{"role": "user", "content": f"question {number}"}], "candidate_score": 1.0,
    }  # fmt: skip
    return BlindPair(
        id=f"pair-{number:03}", release_id=RELEASE, policy=POLICY, suite="known", task=f"t{number}", champion_answer=champion,
        candidate_answer=candidate, champion_score=0.0, **given | more,
    )  # fmt: skip


def kept(engine: Engine, *pairs: BlindPair) -> Any:
    room = deploy(engine)
    SqlPairs(engine).keep(pairs, at=utc_now())
    return room


def fields(text: str) -> dict[str, str]:
    inputs = re.findall(r"<input ([^>]*)>", text.split('<form class="act vote"')[1].split("</form>")[0])
    named = [dict(re.findall(r'([\w-]+)="([^"]*)"', one)) for one in inputs]
    return {one["name"]: unescape(one.get("value", "")) for one in named if "name" in one}


def look(client: TestClient, **query: str) -> str:
    answer = client.get(f"/console/pairs/{RELEASE}", params=query)
    assert answer.status_code == 200, answer.text[:500]
    return answer.text


def say(client: TestClient, choice: str, **more: str) -> Any:
    return client.post(f"/console/pairs/{RELEASE}", data=fields(look(client)) | {"choice": choice} | more)


def votes(engine: Engine) -> list[dict[str, Any]]:
    with reading(engine) as connection:
        rows = connection.execute(select(blind_votes).order_by(blind_votes.c.pair_id, blind_votes.c.voted_at))
        return [dict(row._mapping) for row in rows]


def without_the_time(text: str) -> str:
    return re.sub(r"as of <time.*?</time>.*?</p>", "", text, flags=re.DOTALL)


def test_a_page_says_the_same_whichever_answer_is_whose(sqlite_engine: Engine) -> None:
    """Both answers change places between the versions and the draw turns round with them: not one byte may differ."""
    kept(sqlite_engine)
    pages: list[str] = []
    left = next(n for n in range(50) if pair(salt=f"salt {n}").candidate_is_left(OPERATOR.actor))
    right = next(n for n in range(50) if not pair(salt=f"salt {n}").candidate_is_left(OPERATOR.actor))
    for one in (pair(salt=f"salt {left}"), pair(salt=f"salt {right}", champion=ANSWERS[1], candidate=ANSWERS[0])):
        with writing(sqlite_engine) as connection:
            connection.execute(blind_pairs.delete())
        SqlPairs(sqlite_engine).keep([one], at=utc_now())
        pages.append(without_the_time(look(browser(sqlite_engine))))
    assert ANSWERS[0] in pages[0]
    assert pages[0] == pages[1]
    assert "tiny-v2" not in pages[0]
    assert "v1" not in re.sub(r"tiny-v1", "", pages[0].split("<main")[1])


def test_of_a_long_conversation_the_last_eight_messages_are_shown(sqlite_engine: Engine) -> None:
    kept(sqlite_engine, pair(messages=[{"role": "user", "content": f"message {n}."} for n in range(1, 11)]))
    assert re.findall(r"message (\d+)\.", look(browser(sqlite_engine))) == ["3", "4", "5", "6", "7", "8", "9", "10"]


def test_a_vote_is_stored_before_it_is_revealed_and_only_to_who_voted(engine: Engine) -> None:
    kept(engine, pair())
    client, other = browser(engine), browser(engine, visitor=BOBBY)
    before = look(client, seen="pair-000")
    assert "You said" not in before
    answer = say(client, "left")
    assert answer.status_code == 303
    (stored,) = votes(engine)
    left_is_candidate = pair().candidate_is_left(OPERATOR.actor)
    assert stored["favoured"] == ("candidate" if left_is_candidate else "champion")
    assert (stored["voter"], stored["counted"], stored["proven"], stored["candidate_left"]) == (
        OPERATOR.actor,
        True,
        True,
        left_is_candidate,
    )
    after = client.get(answer.headers["location"]).text
    assert "You said: <b>the candidate" in after if left_is_candidate else "You said: <b>the champion" in after
    assert "You have judged all 1 pairs" in after
    assert "You said" not in look(other, seen="pair-000"), "whoever has not voted yet is told nothing"


def test_a_vote_is_a_gold_observation_and_an_audit_entry_that_does_not_say_what(engine: Engine) -> None:
    kept(engine, pair())
    say(browser(engine), "neither")
    with reading(engine) as connection:
        (said,) = connection.execute(select(observations).where(observations.c.source == "blind")).all()
        (entry,) = connection.execute(select(audit).where(audit.c.action == "release.judged")).all()
    assert (said.name, said.actor, said.status, said.policy) == ("blind_preference", OPERATOR.actor, "joined", POLICY)
    assert said.value["favoured"] == "neither"
    assert said.tags == {"gold": "true"}
    assert entry.detail == {"policy": POLICY, "pair": "pair-000"}


def test_nobody_votes_twice_on_a_pair_and_a_lost_answer_is_found_out(engine: Engine) -> None:
    kept(engine, pair())
    client = browser(engine)
    filled = fields(look(client))
    first = client.post(f"/console/pairs/{RELEASE}", data=filled | {"choice": "left"})
    again = client.post(f"/console/pairs/{RELEASE}", data=filled | {"choice": "right"})
    assert (first.status_code, again.status_code) == (303, 303)
    assert "nothing was done twice" in client.get(again.headers["location"]).text
    assert len(votes(engine)) == 1


def test_two_people_at_once_give_two_votes_of_which_one_counts(engine: Engine) -> None:
    kept(engine, pair())
    clients = [browser(engine), browser(engine, visitor=BOBBY)]
    filled = [fields(look(client)) for client in clients]
    clicks = [
        threading.Thread(target=lambda c=c, f=f: c.post(f"/console/pairs/{RELEASE}", data=f | {"choice": "same"}))
        for c, f in zip(clients, filled, strict=True)
    ]
    for click in clicks:
        click.start()
    for click in clicks:
        click.join()
    assert [vote["counted"] for vote in votes(engine)].count(True) == 1
    assert len(votes(engine)) == 2


def test_the_preference_is_on_the_candidate_s_page_and_in_what_is_read_of_it(engine: Engine) -> None:
    kept(engine, *(pair(n) for n in range(6)))
    client = browser(engine)
    for n in range(4):
        on_the_left = pair(n).candidate_is_left(OPERATOR.actor)
        assert fields(look(client))["pair"] == f"pair-{n:03}"
        say(client, "left" if on_the_left else "right")
    page = client.get(f"/console/releases/{RELEASE}").text
    assert "favour the candidate by +1.00 [" in page
    assert "4 of 6 pairs, 1 person" in page
    assert "The suites&#39; graders favour the same answer in 4 of 4" in page or "graders favour the same answer in 4 of 4" in page
    read = SqlReleaseViews(engine).release(RELEASE)["preference"]
    assert (read["candidate"], read["counted"], read["pairs"], read["net"]) == (4, 4, 6, 1.0)
    assert "favour the candidate by +1.00" in read["told"]


def test_the_votes_of_a_suite_say_how_often_people_agree_with_its_grader(engine: Engine) -> None:
    kept(engine, *(pair(n, candidate_score=1.0 if n else 0.0) for n in range(4)))
    client, began = browser(engine), utc_now()
    for n, choice in enumerate(("candidate", "champion", "candidate", "same")):
        left = pair(n).candidate_is_left(OPERATOR.actor) is (choice == "candidate")
        say(client, choice if choice == "same" else "left" if left else "right")
    book = SqlPairs(engine)
    # of the first pair the grader favours neither answer, of the last one the person
    assert book.graded(POLICY, "known", since=began) == [False, True]
    assert book.graded(POLICY, "another", since=began) == []
    assert book.graded("another", "known", since=began) == []
    assert book.graded(POLICY, "known", since=utc_now()) == []


def test_who_may_not_judge_is_shown_no_pair_and_stores_nothing(sqlite_engine: Engine) -> None:
    kept(sqlite_engine, pair())
    client = browser(sqlite_engine, visitor=VIEWER)
    assert ANSWERS[0] not in look(client)
    refused = client.post(f"/console/pairs/{RELEASE}", data={"pair": "pair-000", "choice": "left"})
    assert refused.status_code == 409
    robot = browser(sqlite_engine, visitor=replace(OPERATOR, actor="service:ci"))
    assert robot.post(f"/console/pairs/{RELEASE}", data={"pair": "pair-000", "choice": "left"}).status_code == 409
    stranger = browser(sqlite_engine, visitor=Visitor(actor=BOB, actions=OPERATOR.actions, policy="composer"))
    assert stranger.get(f"/console/pairs/{RELEASE}?policy={POLICY}").status_code == 404
    assert stranger.post(f"/console/pairs/{RELEASE}?policy={POLICY}", data={"pair": "pair-000", "choice": "left"}).status_code in (200, 404)
    assert votes(sqlite_engine) == []


def test_bad_input_is_refused_with_the_reason(sqlite_engine: Engine) -> None:
    kept(sqlite_engine, pair())
    client = browser(sqlite_engine)
    assert "there is no choice" in say(client, "both").text
    assert "no such pair" in say(client, "left", pair="pair-999").text
    assert client.get("/console/pairs/nothing").status_code == 404
    assert votes(sqlite_engine) == []


def test_on_an_open_deployment_people_say_who_they_are_and_nothing_proves_it(sqlite_engine: Engine) -> None:
    kept(sqlite_engine, pair(), pair(1))
    client = browser(sqlite_engine, visitor=OPEN)
    assert "nobody is named" in say(client, "left", who=" ").text
    answer = say(client, "left", who="carol")
    assert answer.status_code == 303
    assert "You said" in client.get(answer.headers["location"]).text
    (stored,) = votes(sqlite_engine)
    assert (stored["voter"], stored["proven"]) == ("user:carol", False)


@pytest.mark.parametrize("word", HOSTILE)
def test_what_models_and_people_wrote_is_shown_and_does_nothing(sqlite_engine: Engine, word: str) -> None:
    plain = word.replace("\x00", "")
    kept(sqlite_engine, pair(champion=f"{plain} one", candidate=f"{plain} two", messages=[{"role": plain[:40], "content": plain}]))
    client = browser(sqlite_engine)
    for text in (look(client), client.get(say(client, "same").headers["location"]).text):
        main = text.split("<main")[1].split("</main>")[0]
        assert not re.search(r"<(img|script|a hx|b data-hx)", main)
        assert len(text) < 300_000
    assert len(votes(sqlite_engine)) == 1


def test_a_pair_goes_with_its_person_and_with_its_time_but_the_votes_stay(sqlite_engine: Engine) -> None:
    room = kept(sqlite_engine, pair(), pair(1, cluster="somebody else"))
    say(browser(sqlite_engine), "same")
    with writing(sqlite_engine) as connection:
        erase_actor(
            connection,
            Erasure(id="e1", actor="p1", requested_by="test", occurred_at=utc_now()),
            now=utc_now(),
        )
    assert [one.id for one in SqlPairs(sqlite_engine).of(RELEASE)] == ["pair-001"]
    with writing(sqlite_engine) as connection:
        assert retire_pairs(connection, before=utc_now() + timedelta(days=1), limit=10) == 0, "its release is still under way"
    room.desk.abort(RELEASE, actor=BOB, reason="over")
    with writing(sqlite_engine) as connection:
        assert retire_pairs(connection, before=utc_now() + timedelta(days=1), limit=10) == 1
    assert len(votes(sqlite_engine)) == 1
    assert "1 the same, 0 both bad; 1 of 1 pairs" in browser(sqlite_engine).get(f"/console/releases/{RELEASE}").text


def test_an_examination_that_goes_on_after_an_erasure_keeps_no_pairs_of_the_person(engine: Engine) -> None:
    announce(engine, Erasure(id="e", actor="alice", requested_by="user:op", occurred_at=utc_now()))
    pairs = SqlPairs(engine)
    pairs.keep([pair(1, cluster="alice"), pair(2, cluster="bob")], at=utc_now())
    pairs.keep([pair(3, cluster="alice")], at=utc_now())
    assert [one.id for one in pairs.of(RELEASE)] == ["pair-002"]


def test_pairs_wait_for_an_erasure_that_is_being_announced(postgres_engine: Engine) -> None:
    pairs, erased = SqlPairs(postgres_engine), Erasure(id="e", actor="alice", requested_by="user:op", occurred_at=utc_now())
    keeping = threading.Thread(target=pairs.keep, args=([pair(1, cluster="alice")],), kwargs={"at": utc_now()})
    with writing(postgres_engine) as connection:
        locks.hold(connection, locks.ERASURES)
        keeping.start()
        keeping.join(0.3)
        waited = keeping.is_alive()
        row = {"actor": "alice", "requested_by": "user:op", "erased_at": erased.occurred_at, "report": {}}
        connection.execute(insert(erasures), row)
    keeping.join(300)
    assert waited
    assert pairs.of(RELEASE) == []
