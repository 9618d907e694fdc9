"""What people do from pages to keys, people and stored data: asked first, done once, refused where it moved on, by the one role table."""

import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any, cast

import pytest
from sqlalchemy import Engine, func, select
from starlette.testclient import TestClient

from app.console.deeds.pages import DeedPages
from app.db.access.keys import SqlKeys
from app.db.access.people import SqlPeople, hands_of
from app.db.engine import open_engine, reading
from app.db.sight import SqlPages
from app.db.tables import audit, dead_letters, done_requests, erasures, turns
from app.domain.access import Scope, split_key
from app.domain.errors import BadConfig
from app.domain.ids import hash_actor, utc_now
from app.domain.people import MAY, Action, Role, Visitor, actions_of
from tests.fakes import console
from tests.fakes.console import ADMIN, OPEN, OPERATOR, browser
from tests.fakes.people import Town, quick_passwords
from tests.fakes.releases import ReleaseRoom
from tests.fakes.sights import looking
from tests.integration.console.deployment import HOSTILE, deploy

EVE = Visitor(actor="user:eve", actions=actions_of({Role.ADMIN}), policy=None)
DEEDS = {
    "add_person": ("new", Action.MANAGE_PEOPLE, Action.SEE_ACCESS), "change_person": ("zoe", Action.MANAGE_PEOPLE, Action.SEE_ACCESS),
    "invite_person": ("zoe", Action.MANAGE_PEOPLE, Action.SEE_ACCESS), "sign_out_person": ("zoe", Action.MANAGE_PEOPLE, Action.SEE_ACCESS),
    "disable_person": ("zoe", Action.MANAGE_PEOPLE, Action.SEE_ACCESS), "enable_person": ("zoe", Action.MANAGE_PEOPLE, Action.SEE_ACCESS),
    "make_key": ("new", Action.MANAGE_KEYS, Action.SEE_ACCESS), "rotate_key": ("KEY", Action.MANAGE_KEYS, Action.SEE_ACCESS),
    "revoke_key": ("KEY", Action.MANAGE_KEYS, Action.SEE_ACCESS), "rotate_sessions": ("sessions", Action.MANAGE_KEYS, Action.SEE_ACCESS),
    "replay_letter": ("1", Action.MEND_DATA, Action.MEND_DATA), "replay_letters": ("all", Action.MEND_DATA, Action.MEND_DATA),
    "erase": ("person", Action.ERASE, Action.ERASE),
}  # fmt: skip
"""(subject, what it takes, what it takes to see the question)."""


@pytest.fixture
def engine(sqlite_url: str) -> Iterator[Engine]:
    opened = open_engine(sqlite_url)
    yield opened
    opened.dispose()


@pytest.fixture
def room(engine: Engine) -> ReleaseRoom:
    made = deploy(engine)
    people = SqlPeople(engine)
    people.add("root", roles=[Role.ADMIN], by="user:setup")
    people.add("zoe", roles=[Role.OPERATOR], email="zoe@example.com", by="user:setup")
    return made


def fields(text: str) -> dict[str, str]:
    """What the form would send as it stands."""
    form = text.split('<form class="act"')[1].split("</form>")[0]
    found: dict[str, str] = {}
    for one in re.findall(r"<input ([^>]*)>", form):
        named = dict(re.findall(r'([\w-]+)="([^"]*)"', one))
        if "name" in named and (named.get("type") != "checkbox" or " checked" in one):
            found[named["name"]] = unescape(named.get("value", "on"))
    for name, options in re.findall(r'<select[^>]* name="(\w+)">(.*?)</select>', form, re.S):
        chosen = re.search(r'<option value="([^"]*)" selected', options)
        found[name] = chosen[1] if chosen else ""
    return found


def ask(client: TestClient, deed: str, subject: str) -> dict[str, str]:
    page = client.get(f"/console/do/{deed}/{subject}")
    assert page.status_code == 200, page.text[:600]
    return fields(page.text)


def send(client: TestClient, deed: str, subject: str, filled: dict[str, str]) -> Any:
    return client.post(f"/console/do/{deed}/{subject}", data=filled)


def secret_of(answer: Any) -> str:
    assert answer.status_code == 200, answer.text[:600]
    return unescape(answer.text.split('id="secret">')[1].split("</pre>")[0])


def said(engine: Engine, action: str) -> list[tuple[str, str]]:
    with reading(engine) as connection:
        query = select(audit.c.actor, audit.c.subject).where(audit.c.action == action).order_by(audit.c.seq)
        return [(row.actor, row.subject) for row in connection.execute(query)]


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("deed", DEEDS)
def test_a_role_may_from_pages_what_the_table_says(engine: Engine, room: ReleaseRoom, deed: str, role: Role) -> None:
    subject, takes, shows = DEEDS[deed]
    subject = SqlKeys(engine).create(name="ci", scopes=[Scope.READ])[0].prefix if subject == "KEY" else subject
    filled = ask(browser(engine, visitor=ADMIN), deed, subject)
    client = browser(engine, visitor=Visitor(actor="user:eve", actions=actions_of({role}), policy=None))
    assert (client.get(f"/console/do/{deed}/{subject}").status_code == 200) == (role in MAY[shows])
    with reading(engine) as connection:
        before = connection.execute(select(func.max(audit.c.seq))).scalar_one()
    answer = send(client, deed, subject, filled)
    if role in MAY[takes]:
        assert "may not do this" not in unescape(answer.text)
        assert answer.status_code in (200, 303, 409)
    else:
        assert answer.status_code == (409 if role in MAY[shows] else 404)
        with reading(engine) as connection:
            assert connection.execute(select(func.max(audit.c.seq))).scalar_one() == before
    bound = browser(engine, visitor=Visitor(actor="user:eve", actions=actions_of({role}), policy="tab"))
    assert bound.get(f"/console/do/{deed}/{subject}").status_code == 404, "all of it is about every policy"
    assert send(bound, deed, subject, filled).status_code == 404


def test_a_person_is_added_once_and_their_link_is_shown_once(engine: Engine, room: ReleaseRoom) -> None:
    client = browser(engine, visitor=ADMIN)
    filled = ask(client, "add_person", "new") | {"name": "carl", "role_viewer": "on", "role_operator": "on", "for_policy": "tab"}
    link = secret_of(send(client, "add_person", "new", filled))
    assert link.startswith("http://here/console/welcome?link=")
    carl = SqlPeople(engine).invited(link.partition("link=")[2])
    assert (carl.name, carl.roles, carl.policy, carl.made_by) == ("carl", {Role.VIEWER, Role.OPERATOR}, "tab", "user:root")
    again = send(client, "add_person", "new", filled)
    assert "nothing was done twice" in again.text
    assert "link=" not in again.text
    assert said(engine, "person.added").count(("user:root", "carl")) == 1
    with reading(engine) as connection:
        assert "user:root" in hands_of(connection, "user:carl", since=utc_now() - timedelta(days=1)), "four eyes ask there"
    assert "user:root" in client.get("/console/people/carl").text


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"name": "zoe", "role_viewer": "on"}, "there is somebody called zoe"),
        ({"name": "carl"}, "needs a role"),
        ({"name": "ci-bot", "role_viewer": "on"}, "is a program's name"),
        ({"name": "No Name", "role_viewer": "on"}, "is no name"),
        ({"name": "carl", "role_viewer": "on", "for_policy": "moon"}, "no policy is named 'moon'"),
        ({"name": "carl", "role_viewer": "on", "email": "x" * 300}, "200 characters at most"),
    ],
)
def test_what_makes_no_sense_is_refused_and_what_was_typed_is_kept(
    engine: Engine, room: ReleaseRoom, more: dict[str, str], why: str
) -> None:
    client = browser(engine, visitor=ADMIN)
    before = said(engine, "person.added")
    answer = send(client, "add_person", "new", ask(client, "add_person", "new") | {"email": "kept@example.com"} | more)
    assert answer.status_code == 409
    assert why in unescape(answer.text)
    kept = fields(answer.text)
    assert (kept["name"], kept["email"], "role_viewer" in kept) == (
        more["name"],
        more.get("email", "kept@example.com"),
        "role_viewer" in more,
    )
    assert said(engine, "person.added") == before


def test_what_moved_on_is_said_and_nothing_is_done(engine: Engine, room: ReleaseRoom) -> None:
    one, other = browser(engine, visitor=ADMIN), browser(engine, visitor=EVE)
    first = ask(one, "change_person", "zoe") | {"role_auditor": "on"}
    second = ask(other, "change_person", "zoe") | {"role_admin": "on", "os_user": "zz"}
    assert send(one, "change_person", "zoe", first).status_code == 303
    stale = send(other, "change_person", "zoe", second)
    assert stale.status_code == 409
    assert "person.changed by user:root" in unescape(stale.text)
    assert fields(stale.text)["os_user"] == "zz", "what was typed is kept"
    zoe = SqlPeople(engine).find("zoe")
    assert (zoe.roles, zoe.os_user) == ({Role.OPERATOR, Role.AUDITOR}, None)
    fresh = fields(stale.text)
    assert send(other, "change_person", "zoe", fresh).status_code == 303, "looked at again, it is done"
    assert SqlPeople(engine).find("zoe").roles == {Role.OPERATOR, Role.ADMIN}


def test_nothing_different_is_no_change_and_the_last_admin_stays(engine: Engine, room: ReleaseRoom) -> None:
    client = browser(engine, visitor=ADMIN)
    same = send(client, "change_person", "zoe", ask(client, "change_person", "zoe"))
    assert "nothing of zoe is different" in same.text
    last = ask(client, "change_person", "root") | {"role_viewer": "on"}
    last.pop("role_admin")
    assert "is the last admin" in send(client, "change_person", "root", last).text
    assert "is the last admin" in send(client, "disable_person", "root", ask(client, "disable_person", "root")).text
    before = said(engine, "person.email_made")
    assert send(client, "change_person", "zoe", ask(client, "change_person", "zoe") | {"role_viewer": "on"}).status_code == 303
    assert said(engine, "person.email_made") == before, "an address that stays is nobody's hand"


def test_a_reset_shows_a_link_once_and_signing_out_and_disabling_end_everything(engine: Engine, room: ReleaseRoom) -> None:
    town = Town(engine, utc_now)
    nia = town.person("nia")
    session, client = town.people.enter(nia, how="password"), browser(engine, visitor=ADMIN)
    token = split_key(town.token(nia))
    assert token is not None
    assert "1 open sessions and 1 tokens of nia" in client.get("/console/do/sign_out_person/nia").text
    assert send(client, "sign_out_person", "nia", ask(client, "sign_out_person", "nia")).status_code == 303
    assert town.people.of_session(session) is None
    assert [key.prefix for key in SqlKeys(engine).all() if key.prefix == token[0]] == []
    link = secret_of(send(client, "invite_person", "nia", ask(client, "invite_person", "nia")))
    town.people.accept(link.partition("link=")[2], password_hash=quick_passwords().hash("another sentence", of="nia"))
    session = town.people.enter(nia, how="password")
    assert send(client, "disable_person", "nia", ask(client, "disable_person", "nia")).status_code == 303
    assert town.people.of_session(session) is None
    assert "enable them first" in send(client, "invite_person", "nia", ask(client, "invite_person", "nia")).text
    assert send(client, "enable_person", "nia", ask(client, "enable_person", "nia")).status_code == 303
    assert town.people.find("nia").disabled_at is None


def test_a_key_is_made_rotated_and_revoked_and_no_page_tells_it_again(engine: Engine, room: ReleaseRoom) -> None:
    client, book = browser(engine, visitor=ADMIN), SqlKeys(engine)
    filled = ask(client, "make_key", "new") | {"name": "the editor", "scope_ingest": "on", "for_policy": "tab", "rate_per_s": "50"}
    assert "at least one scope" in send(client, "make_key", "new", {k: v for k, v in filled.items() if k != "scope_ingest"}).text
    assert "a number above 0" in send(client, "make_key", "new", filled | {"rate_per_s": "-1"}).text
    assert "36500" in send(client, "make_key", "new", filled | {"expires_days": "36501"}).text.replace(",", "")
    secret = secret_of(send(client, "make_key", "new", filled | {"expires_days": "30"}))
    (key,) = [key for key in book.all() if key.name == "the editor"]
    assert key.matches((split_key(secret) or ("", ""))[1])
    assert (key.scopes, key.policy, key.rate_per_s, key.made_by) == ({Scope.INGEST}, "tab", 50.0, "user:root")
    assert key.expires_at is not None
    assert secret not in send(client, "make_key", "new", filled | {"expires_days": "30"}).text
    assert len([one for one in book.history() if one.name == "the editor"]) == 1, "sent again, it is done already"
    book.note_used({key.id: datetime(2026, 11, 21, 12, 34, tzinfo=UTC)})
    for page in ("/console/access", f"/console/keys/{key.prefix}"):
        assert secret not in client.get(page).text
        assert "12:34" in client.get(page).text
    rotated = send(client, "rotate_key", key.prefix, ask(client, "rotate_key", key.prefix))
    after = next(one for one in book.all() if one.name == "the editor" and one.prefix != key.prefix)
    assert (after.scopes, after.policy, after.rate_per_s) == (key.scopes, key.policy, key.rate_per_s)
    assert f"/console/do/revoke_key/{key.prefix}" in rotated.text
    mine, theirs = ask(client, "revoke_key", key.prefix), ask(browser(engine, visitor=EVE), "revoke_key", key.prefix)
    assert send(client, "revoke_key", key.prefix, mine).status_code == 303
    assert "key.revoked by user:root" in unescape(send(browser(engine, visitor=EVE), "revoke_key", key.prefix, theirs).text)
    assert said(engine, "key.revoked") == [("user:root", key.prefix)]
    assert client.get("/console/do/revoke_key/rk_00000000").status_code == 404


def test_the_secret_of_session_keys_is_not_rotated_twice_by_two_tabs(engine: Engine, room: ReleaseRoom) -> None:
    """Those signed two secrets ago end: a second rotation nobody looked at would end what the first promised to keep."""
    one, other = browser(engine, visitor=ADMIN), browser(engine, visitor=EVE)
    mine, theirs = ask(one, "rotate_sessions", "sessions"), ask(other, "rotate_sessions", "sessions")
    assert send(one, "rotate_sessions", "sessions", mine).status_code == 303
    assert "nothing was done twice" in send(one, "rotate_sessions", "sessions", mine).text
    assert "session_secret.rotated by user:root" in unescape(send(other, "rotate_sessions", "sessions", theirs).text)
    assert said(engine, "session_secret.rotated") == [("user:root", "keys of sessions")]


def test_a_form_that_is_sent_twice_at_once_rotates_the_secret_of_session_keys_once(engine: Engine, room: ReleaseRoom) -> None:
    """Both were looked up before either was done."""
    rotated: list[str] = []
    again: list[Any] = []

    def rotate(*, by: str) -> None:
        rotated.append(by)
        if len(rotated) == 1:
            again.append(send())

    pages = DeedPages(replace(console.hands_of(engine), rotate=rotate))

    def send() -> Any:
        form = {"seen": "999", "request_id": "sent twice"}
        return pages.do(looking(actor="user:root", sight=cast("Any", SqlPages(engine))), "rotate_sessions", "sessions", form)

    assert send() == "/console/access?policy=tab"
    assert rotated == ["user:root"]
    assert again[0]["title"] == "Done already"


def test_a_rotation_that_failed_is_not_told_as_done_when_it_is_asked_for_again(engine: Engine, room: ReleaseRoom) -> None:
    def rotate(*, by: str) -> None:
        raise BadConfig("RATCHET_SESSION_SECRETS is set")

    form = {"seen": "999", "request_id": "failed"}
    failing, working = (DeedPages(hands) for hands in (replace(console.hands_of(engine), rotate=rotate), console.hands_of(engine)))
    asked = looking(actor="user:root", sight=cast("Any", SqlPages(engine)))
    refused = failing.do(asked, "rotate_sessions", "sessions", form)
    assert cast("Any", refused)["moved"] == "RATCHET_SESSION_SECRETS is set"
    assert working.do(asked, "rotate_sessions", "sessions", form) == "/console/access?policy=tab"
    assert said(engine, "session_secret.rotated") == [("user:root", "keys of sessions")]


def test_on_an_open_deployment_nobody_manages_access_and_who_mends_data_says_who_they_are(engine: Engine, room: ReleaseRoom) -> None:
    client = browser(engine, visitor=OPEN)
    for deed, subject in (("make_key", "new"), ("add_person", "new"), ("invite_person", "zoe")):
        answer = send(
            client, deed, subject, ask(client, deed, subject) | {"who": "carol", "name": "x", "scope_read": "on", "role_viewer": "on"}
        )
        assert answer.status_code == 409
        assert "ratchet people first" in answer.text
    filled = ask(client, "replay_letters", "all")
    assert "say who you are" in send(client, "replay_letters", "all", filled | {"who": ""}).text
    assert "0 letters applied" in send(client, "replay_letters", "all", filled | {"who": "carol"}).text
    assert said(engine, "dead_letters.replay") == [("user:carol", "dead letters")]


def test_a_letter_is_read_and_replayed_and_one_that_makes_no_sense_stays_with_the_reason(engine: Engine, room: ReleaseRoom) -> None:
    client = browser(engine)
    page = client.get("/console/do/replay_letter/1").text
    assert "hello" in page, "what it says"
    filled = fields(page)
    answer = send(client, "replay_letter", "1", filled)
    assert (answer.status_code, "it makes no sense even now" in answer.text) == (409, True)
    assert "nothing was done twice" in send(client, "replay_letter", "1", filled).text
    with reading(engine) as connection:
        assert connection.execute(select(dead_letters.c.attempts)).scalar_one() == 2, "tried once"
    assert said(engine, "dead_letters.replay") == [(OPERATOR.actor, "dead letters")]
    none = send(client, "replay_letters", "all", ask(client, "replay_letters", "all") | {"reason": "no such words"})
    assert "0 letters applied, 0 make no sense" in none.text
    every = send(client, "replay_letters", "all", ask(client, "replay_letters", "all"))
    assert "0 letters applied, 1 make no sense" in every.text
    for subject in ("99", "x", "1" * 30):
        assert client.get(f"/console/do/replay_letter/{subject}").status_code in (400, 404)


def test_a_person_is_erased_once_and_led_to_the_proof(engine: Engine, room: ReleaseRoom) -> None:
    client = browser(engine, visitor=ADMIN)
    filled = ask(client, "erase", "person")
    for wrong in ({}, {"actor": "a", "pseudonym": "b" * 32}, {"pseudonym": "nobody"}):
        assert send(client, "erase", "person", filled | wrong).status_code == 409
    with reading(engine) as connection:
        assert connection.execute(select(func.count()).select_from(turns).where(turns.c.erased_at.is_not(None))).scalar_one() == 0
    alice = hash_actor("alice@example.com", salt="pepper")
    with engine.begin() as connection:
        connection.execute(turns.update().where(turns.c.inference_id == "i3").values(actor=alice))
    answer = send(client, "erase", "person", filled | {"actor": "alice@example.com"})
    assert answer.headers["location"].startswith(f"/console/erasures/{alice}?")
    assert "nothing is left" in client.get(answer.headers["location"]).text
    with reading(engine) as connection:
        assert connection.execute(select(turns.c.inference_id).where(turns.c.erased_at.is_not(None))).scalars().all() == ["i3"]
        assert connection.execute(select(erasures.c.requested_by).where(erasures.c.actor == alice)).scalar_one() == "user:root"
        assert "alice@example.com" not in str(connection.execute(select(done_requests)).all())
    assert "nothing was done twice" in send(client, "erase", "person", filled | {"actor": "alice@example.com"}).text
    assert said(engine, "erase") == [("user:root", alice)]


@pytest.mark.parametrize("word", HOSTILE)
def test_hostile_words_in_every_field_are_shown_and_do_nothing(engine: Engine, room: ReleaseRoom, word: str) -> None:
    client = browser(engine, visitor=ADMIN)
    for deed, subject, names in (
        ("add_person", "new", ("name", "email", "os_user", "for_policy")), ("make_key", "new", ("name", "rate_per_s", "expires_days")),
        ("replay_letters", "all", ("reason",)), ("erase", "person", ("actor", "pseudonym")), ("change_person", "zoe", ("email", "os_user")),
    ):  # fmt: skip
        filled = ask(client, deed, subject) | dict.fromkeys(names, word) | {"role_viewer": "on", "scope_read": "on"}
        answer = send(client, deed, subject, filled)
        assert answer.status_code in (200, 303, 409), (deed, answer.text[:300])
        shown = answer.text + client.get("/console/access").text
        main = "".join(part.split("</main>")[0] for part in shown.split("<main")[1:])
        assert not re.search(r"<(img|script|a hx|b data-hx)", main), deed
        assert len(answer.text) < 300_000


def test_a_form_without_its_marks_does_nothing(engine: Engine, room: ReleaseRoom) -> None:
    client = browser(engine, visitor=ADMIN)
    filled = ask(client, "revoke_key", SqlKeys(engine).create(name="ci", scopes=[Scope.READ])[0].prefix)
    prefix = SqlKeys(engine).history()[-1].prefix
    for broken in ({"seen": "x"}, {"seen": ""}, {"request_id": ""}, {"request_id": "x" * 200}):
        answer = send(client, "revoke_key", prefix, filled | broken)
        assert answer.status_code == 409
        assert "open" in answer.text
    assert said(engine, "key.revoked") == []
    assert client.get("/console/do/explode/it").status_code == 404
