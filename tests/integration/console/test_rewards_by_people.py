"""The rewards page at work: a rule set is replayed by the labeller and then proposed; people read what its reader was unsure of."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from html import unescape
from typing import Any

import pytest
from sqlalchemy import Engine, insert, select
from starlette.testclient import TestClient

from app.db.engine import reading, writing
from app.db.learning.label_report import labelled_turns
from app.db.learning.rule_sets import SqlReplays, SqlRules
from app.db.sight import SqlPages
from app.db.tables import audit, follow_up_readings, observations, rule_set_replays
from app.domain.ids import utc_now
from app.domain.learning.rewards import Labelled
from app.domain.learning.rule_sets import Proposal
from app.domain.people import MAY, Action, Role, Visitor, actions_of
from app.domain.policies import PolicyConfig
from pipelines.labelling.proposals import settle
from pipelines.labelling.replay import answer
from pipelines.labelling.rule_set import parse_rule_set
from tests.fakes.console import OPEN, OPERATOR, browser
from tests.fakes.releases import BOB, POLICY
from tests.integration.console.deployment import HOSTILE, deploy
from tests.integration.console.test_deeds import fields

CONFIG = PolicyConfig(model="m", base_name="b", base_model="B", held_out_share=0.0)
CORA = Visitor(actor="user:cora", actions=actions_of({Role.CONFIG_ADMIN}), policy=None)
DEAN = Visitor(actor="user:dean", actions=actions_of({Role.CONFIG_ADMIN}), policy=None)
RATING = 'name = "only-rating"\n[[terms]]\nname = "rating"\nweight = 2.0\n'


class Touchy:
    """A term of a deployment's own that cannot be made."""

    def __init__(self) -> None:
        raise KeyError("no such shop")


@contextmanager
def stored(engine: Engine) -> Iterator[Iterator[Labelled]]:
    with reading(engine) as connection:
        yield labelled_turns(connection, POLICY, limit=100)


def labeller(engine: Engine) -> bool:
    """What `ratchet label` does between two rounds."""
    read = partial(parse_rule_set, allowed=(f"{__name__}:Touchy",))
    settle(SqlRules(engine, ""), policy=POLICY, read=read, clock=utc_now)
    return answer(SqlReplays(engine), partial(stored, engine), policy=POLICY, config=CONFIG, read=read, clock=utc_now)


def rated(engine: Engine) -> None:
    """i3 was rated well, i5 badly."""
    with writing(engine) as connection:
        for id_, value in (("i3", 1.0), ("i5", -1.0)):
            connection.execute(
                insert(observations).values(
                    source="api", id=f"r-{id_}", inference_id=id_, name="rating", value=value, occurred_at=utc_now(), received_at=utc_now(),
                    tags={}, status="joined",
                )
            )  # fmt: skip


def ask(client: TestClient, toml: str) -> Any:
    page = client.get(f"/console/do/replay_rules/{POLICY}")
    assert page.status_code == 200, page.text[:500]
    return client.post(f"/console/do/replay_rules/{POLICY}", data=fields(page.text) | {"toml": toml})


@pytest.mark.parametrize(
    ("term", "why"),
    [
        ('name = "rating"\nweight = nan', "weight is nan: give a number"),
        ('name = "latency"\nweight = 1.0\nparams = { target_s = 0 }', "target_s = 0: Expected `float` > 0.0"),
        (f'name = "{__name__}:Touchy"\nweight = 1.0', "it cannot be read (KeyError: 'no such shop')"),
    ],
)
def test_a_rule_set_that_nothing_can_be_scored_by_is_refused_to_whoever_replays_or_proposes_it(engine: Engine, term: str, why: str) -> None:
    deploy(engine)
    toml, now = f'name = "bad"\n[[terms]]\n{term}\n', utc_now()
    rules = SqlRules(engine, "")
    rules.propose(Proposal(id="p", policy=POLICY, toml=toml, proposed_by=CORA.actor, proposed_at=now))
    with writing(engine) as connection:
        connection.execute(insert(rule_set_replays).values(id="r", policy=POLICY, toml=toml, asked_by=CORA.actor, asked_at=now))
    assert labeller(engine) is True
    [proposed] = rules.proposals(POLICY)
    replayed = SqlPages(engine).replay(POLICY, "r")
    assert replayed is not None
    for refused in (proposed.refused, replayed.refused):
        assert refused is not None
        assert why in refused


def test_a_rule_set_is_replayed_over_stored_labels_before_it_is_proposed(engine: Engine) -> None:
    deploy(engine)
    rated(engine)
    client = browser(engine, visitor=CORA)
    asked = ask(client, RATING)
    assert asked.status_code == 303
    where = asked.headers["location"]
    assert "It waits for the labeller" in client.get(where).text
    assert labeller(engine)
    assert not labeller(engine), "answered once"
    page = unescape(client.get(where).text)
    assert re.search(r"\d+ of the newest 24 labels would move", page)
    assert "Replay of only-rating" in page
    movers = client.get(where, params={"sheet": "movers", "as": "json"}).json()
    top = {row["turn"]: (row["before"], row["after"]) for row in movers}
    assert top["i5"] == (pytest.approx(0.0), pytest.approx(-2.0))
    assert top["i3"] == (pytest.approx(0.3), pytest.approx(2.0))
    assert [abs(row["change"]) for row in movers] == sorted((abs(row["change"]) for row in movers), reverse=True)
    shifts = {row["term"]: row for row in client.get(where, params={"sheet": "terms", "as": "json"}).json()}
    assert (shifts["rating"]["spoke in"], shifts["rating"]["would speak in"], shifts["rating"]["would pay"]) == (0, 2, 0.0)
    assert (shifts["edit_persistence"]["spoke in"], shifts["edit_persistence"]["would speak in"]) == (24, 0)
    assert shifts["edit_persistence"]["reward shift per label"] == pytest.approx(-0.2)
    replay_id = where.split("/replays/")[1].split("?")[0]
    proposal = client.get(f"/console/do/propose_rules/{replay_id}")
    assert "of 24 labels would move" in proposal.text
    done = client.post(f"/console/do/propose_rules/{replay_id}", data=fields(proposal.text))
    assert done.status_code == 303
    labeller(engine)
    assert SqlRules(engine, "").active(POLICY) == RATING
    assert "in force" in client.get("/console/rewards").text
    with reading(engine) as connection:
        acts = connection.execute(select(audit.c.actor, audit.c.action).where(audit.c.action.startswith("rule_set.")).order_by(audit.c.seq))
        assert [tuple(row) for row in acts] == [
            ("user:cora", "rule_set.replay"), ("user:cora", "rule_set.propose"), ("user:cora", "rule_set.activate"),
        ]  # fmt: skip


def test_what_cannot_be_scored_by_is_refused_with_the_reason_and_never_proposed(sqlite_engine: Engine) -> None:
    deploy(sqlite_engine)
    client = browser(sqlite_engine, visitor=CORA)
    for wrong in ("", " \n", "x" * 40_001):
        kept = ask(client, wrong)
        assert (kept.status_code, "a rule set is TOML of 1 to" in kept.text) == (409, True)
    where = ask(client, RATING.replace('"rating"', '"vibes"')).headers["location"]
    labeller(sqlite_engine)
    page = unescape(client.get(where).text)
    assert "The labeller cannot score by it" in page
    assert "no term is named 'vibes'" in page
    replay_id = where.split("/replays/")[1].split("?")[0]
    refused = client.post(f"/console/do/propose_rules/{replay_id}", data=fields(client.get(f"/console/do/propose_rules/{replay_id}").text))
    assert (refused.status_code, "cannot score by it" in refused.text) == (409, True)


def test_a_replay_is_asked_for_once_and_a_proposal_rests_on_what_is_in_force(sqlite_engine: Engine) -> None:
    deploy(sqlite_engine)
    cora, dean = browser(sqlite_engine, visitor=CORA), browser(sqlite_engine, visitor=DEAN)
    filled = fields(cora.get(f"/console/do/replay_rules/{POLICY}").text) | {"toml": RATING}
    first, again = (cora.post(f"/console/do/replay_rules/{POLICY}", data=filled) for _ in range(2))
    assert (first.status_code, "nothing was done twice" in again.text) == (303, True)
    with reading(sqlite_engine) as connection:
        assert len(connection.execute(select(rule_set_replays.c.id)).all()) == 1
    other = ask(dean, RATING.replace("2.0", "3.0")).headers["location"]
    labeller(sqlite_engine)
    labeller(sqlite_engine)
    ids = [where.split("/replays/")[1].split("?")[0] for where in (first.headers["location"], other)]
    forms = [fields(one.get(f"/console/do/propose_rules/{id_}").text) for one, id_ in zip((cora, dean), ids, strict=True)]
    assert cora.post(f"/console/do/propose_rules/{ids[0]}", data=forms[0]).status_code == 303
    assert "nothing was done twice" in cora.post(f"/console/do/propose_rules/{ids[0]}", data=forms[0]).text
    labeller(sqlite_engine)
    stale = dean.post(f"/console/do/propose_rules/{ids[1]}", data=forms[1])
    assert stale.status_code == 409
    assert "rule_set.activate by user:cora" in unescape(stale.text)
    assert SqlRules(sqlite_engine, "").active(POLICY) == RATING


@pytest.mark.parametrize("role", Role)
def test_a_role_may_with_rules_what_the_table_says(sqlite_engine: Engine, role: Role) -> None:
    deploy(sqlite_engine)
    where = ask(browser(sqlite_engine, visitor=CORA), RATING).headers["location"]
    replay_id = where.split("/replays/")[1].split("?")[0]
    client = browser(sqlite_engine, visitor=Visitor(actor="user:eve", actions=actions_of({role}), policy=None))
    assert client.get(where).status_code == 200
    for deed, subject in (("replay_rules", POLICY), ("propose_rules", replay_id)):
        page = client.get(f"/console/do/{deed}/{subject}")
        answered = client.post(f"/console/do/{deed}/{subject}", data=fields(page.text) | {"toml": RATING})
        assert (answered.status_code == 303) == (role in MAY[Action.CHANGE_RULES]), deed
        assert answered.status_code in (303, 409)
    bound = browser(sqlite_engine, visitor=Visitor(actor="user:eve", actions=actions_of({role}), policy="composer"))
    for path in (f"/do/replay_rules/{POLICY}", f"/do/propose_rules/{replay_id}", f"/replays/{replay_id}", "/readings"):
        assert bound.get(f"/console{path}?policy={POLICY}").status_code == 404


def unsure(engine: Engine, words: str = "hm, and now?") -> None:
    """Two follow-ups that wait, the one of i3 first."""
    with writing(engine) as connection:
        for n, id_ in enumerate(("i3", "i5")):
            connection.execute(
                insert(observations).values(
                    source="api", id=f"f-{id_}", inference_id=id_, name="follow_up", value=words, occurred_at=utc_now(),
                    received_at=utc_now(), tags={}, status="joined",
                )
            )  # fmt: skip
            connection.execute(
                insert(follow_up_readings).values(
                    inference_id=id_, observation_id=f"f-{id_}", policy=POLICY, labelled_at=utc_now().replace(year=2026 - n),
                    leaned_to="dissatisfied", unsure=True,
                )
            )  # fmt: skip


def marks(text: str) -> dict[str, str]:
    inputs = re.findall(r"<input ([^>]*)>", text.split('<form class="act vote"')[1].split("</form>")[0])
    named = [dict(re.findall(r'([\w-]+)="([^"]*)"', one)) for one in inputs]
    return {one["name"]: unescape(one.get("value", "")) for one in named if "name" in one}


def test_a_message_is_read_before_anything_is_told_and_once(engine: Engine) -> None:
    deploy(engine)
    unsure(engine)
    client, other = browser(engine), browser(engine, visitor=Visitor(actor=BOB, actions=OPERATOR.actions, policy=None))
    assert "2 follow-ups wait" in client.get("/console/rewards").text
    page = client.get("/console/readings").text
    assert "hm, and now?" in page
    assert "hello" in page, "the answer before it"
    assert "leaned" not in page
    theirs = marks(other.get("/console/readings").text)
    mine = marks(page)
    said = client.post("/console/readings", data=mine | {"mood": "satisfied"})
    assert said.status_code == 303
    told = client.get(said.headers["location"]).text
    assert "user:ada read it as <b>satisfied</b>" in told
    assert "leaned to dissatisfied and abstained" in told
    again = client.post("/console/readings", data=mine | {"mood": "dissatisfied"})
    assert "nothing was done twice" in client.get(again.headers["location"]).text
    late = other.post("/console/readings", data=theirs | {"mood": "dissatisfied"})
    assert late.status_code == 409
    assert "user:ada read it as satisfied" in unescape(late.text)
    assert marks(late.text)["turn"] == "i5", "the next one is asked about"
    assert "its leaning was right in 0 of 1" in late.text
    later = re.search(r'href="([^"]*before=[^"]*)"', late.text)
    assert later is not None
    assert "Nothing waits" in client.get(unescape(later[1])).text


@pytest.mark.parametrize("role", Role)
def test_a_role_may_read_what_the_table_says(sqlite_engine: Engine, role: Role) -> None:
    deploy(sqlite_engine)
    unsure(sqlite_engine)
    filled = marks(browser(sqlite_engine).get("/console/readings").text)
    client = browser(sqlite_engine, visitor=Visitor(actor="user:eve", actions=actions_of({role}), policy=None))
    assert ("hm, and now?" in client.get("/console/readings").text) == (role in MAY[Action.JUDGE])
    assert (client.post("/console/readings", data=filled | {"mood": "neutral"}).status_code == 303) == (role in MAY[Action.JUDGE])


def test_programs_read_nothing_bad_input_is_refused_and_on_an_open_deployment_people_say_who_they_are(sqlite_engine: Engine) -> None:
    deploy(sqlite_engine)
    unsure(sqlite_engine)
    filled = marks(browser(sqlite_engine).get("/console/readings").text)
    robot = browser(sqlite_engine, visitor=Visitor(actor="service:ci", actions=OPERATOR.actions, policy=None))
    assert robot.post("/console/readings", data=filled | {"mood": "neutral"}).status_code == 409
    client = browser(sqlite_engine)
    assert client.post("/console/readings", data=filled | {"mood": "furious"}).status_code == 400
    assert client.post("/console/readings", data=filled | {"turn": "none", "mood": "neutral"}).status_code == 404
    for before in ("yesterday", "2026-01-01T00:00:00"):
        assert client.get("/console/readings", params={"before": before}).status_code == 400
    anybody = browser(sqlite_engine, visitor=OPEN)
    assert "say who you are" in anybody.post("/console/readings", data=filled | {"mood": "neutral"}).text
    assert anybody.post("/console/readings", data=filled | {"mood": "neutral", "who": "carol"}).status_code == 303
    with reading(sqlite_engine) as connection:
        assert tuple(connection.execute(select(follow_up_readings.c.read_by, follow_up_readings.c.proven).where(
            follow_up_readings.c.mood.is_not(None)
        )).one()) == ("user:carol", False)  # fmt: skip


@pytest.mark.parametrize("word", HOSTILE)
def test_hostile_words_in_a_rule_set_and_a_message_are_shown_and_do_nothing(sqlite_engine: Engine, word: str) -> None:
    plain = word.replace("\x00", "")
    deploy(sqlite_engine)
    unsure(sqlite_engine, plain)
    client, cora = browser(sqlite_engine), browser(sqlite_engine, visitor=CORA)
    said = client.post("/console/readings", data=marks(client.get("/console/readings").text) | {"mood": "neutral"})
    asked = ask(cora, f'name = """{plain}"""\n# {plain}\n[[terms]]\nname = "rating"\nweight = 1.0\n')
    labeller(sqlite_engine)
    where = asked.headers["location"]
    shown = [client.get(path).text for path in (said.headers["location"], "/console/readings", where, "/console/rewards")]
    shown.append(cora.get(f"/console/do/propose_rules/{where.split('/replays/')[1].split('?')[0]}").text)
    for text in shown:
        main = text.split("<main")[1].split("</main>")[0]
        assert not re.search(r"<(img|script|a hx|b data-hx)", main)
        assert len(text) < 300_000
