"""Deeds as somebody fills them in: what reaches the hands, at each bound and one beyond it, and what is asked and told around it."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from app.console.deeds.asking import Asking, Hands, Outcome
from app.console.deeds.pages import DeedPages
from app.domain.access import ApiKey, Order, Scope
from app.domain.errors import BadRequest, DoneAlready, NotFound
from app.domain.learning.rule_sets import AskedReplay, Replay
from app.domain.people import Person, Role
from app.domain.telemetry.streams import DeadLetter, StoredDeadLetter
from app.domain.views.pages import RuleSetInfo
from tests.fakes.sights import Canned, canned, looking

AT = datetime(2026, 11, 24, 6, tzinfo=UTC)
TOLD = "2026-11-24 06:00:00"
FORM = {"seen": "5", "request_id": "q1"}
EVE = Person(
    id="p1", name="eve", roles=frozenset({Role.OPERATOR, Role.VIEWER}), policy="tab", created_at=AT, made_by="user:root", email="e@x.de"
)


def key(prefix: str, **changes: Any) -> ApiKey:
    values: dict[str, Any] = {
        "id": prefix, "hash": b"", "name": "editor", "scopes": frozenset({Scope.READ, Scope.INGEST}), "policy": "tab", "rate_per_s": 2.0,
        "created_at": AT,
    }  # fmt: skip
    return ApiKey(prefix=prefix, **{**values, **changes})


KEYS = [key("rk_1"), key("rk_2", person_id="p1"), key("rk_3", revoked_at=AT), key("rk_4", person_id="p1", expires_at=AT), key("rk_5")]


def letter(id_: int, *, reason: str = "odd", payload: bytes = b"{}", replayed: bool = False) -> StoredDeadLetter:
    found = DeadLetter(topic="events", partition=1, offset=2, headers={"b": "2", "a": "1"}, payload=payload, reason=reason)
    return StoredDeadLetter(
        id=id_, letter=found, attempts=1, first_seen_at=AT, last_seen_at=AT, replayed_at=AT if replayed else None
    )  # fmt: skip


class World:
    """Everything that deeds act through, and whoever does them."""

    def __init__(self, *, letters: Sequence[StoredDeadLetter] = (), replay: AskedReplay | None = None, done: bool = False) -> None:
        self.people = Canned(find=EVE, add=EVE, change=EVE, invite="secret", sign_out=EVE)
        self.keys = Canned(history=KEYS, create=(key("rk_9"), "rk_9_text"), revoke=KEYS[0])
        self.requests = Canned(
            refuse_done=self._refuse if done else None, done=None, carrying_out=self._refuse if done else lambda _order: nullcontext()
        )  # fmt: skip
        self.rules = Canned(active="", propose=None)
        self.replays = Canned(ask=None)
        self.letters = Canned(
            find=lambda ids=(), after=0, limit=1_000, **_: [
                one for one in letters if (not ids or one.id in ids) and one.id > after
            ][:limit],
            failed_again=None,
        )  # fmt: skip
        self.did: list[Any] = []
        self.sight = Canned(
            head=(7, "h"), sessions=[1, 2], every_key=KEYS, replay=replay,
            rule_sets=[RuleSetInfo(digest="d1", name="gentle", activated_by="user:ada", activated_at=AT, toml="x = 1\n")],
        )  # fmt: skip
        hands: dict[str, Any] = {
            "people": self.people, "keys": self.keys, "requests": self.requests, "rules": self.rules, "replays": self.replays,
            "letters": self.letters,
        }  # fmt: skip
        self.pages = DeedPages(Hands(
            **hands, store=lambda: canned(apply=None), pseudonym_of=lambda *, actor, pseudonym: f"{actor}/{pseudonym}",
            forget=lambda who, *, by: cast("Any", self.did.append((who, by))), rotate=lambda *, by: self.did.append(by),
            policies=("tab", "composer"), address="https://r", clock=lambda: AT,
        ))  # fmt: skip

    def _refuse(self, _order: Order) -> None:
        raise DoneAlready("it was done")

    def ask(self, deed: str, subject: str, *roles: Role, typed: dict[str, str] | None = None, **query: str) -> Asking:
        asked = self.pages.confirm(looking(*roles, sight=self.sight, query=query), deed, subject, typed=typed)
        return cast("Asking", asked["asking"])

    def do(self, deed: str, subject: str, *roles: Role, by: str = "user:ada", of: str | None = None, **form: str) -> Any:
        return self.pages.do(looking(*roles, actor=by, of=of, sight=self.sight), deed, subject, FORM | form)

    def outcome(self, deed: str, subject: str, **form: str) -> Outcome:
        return cast("Outcome", self.do(deed, subject, **form)["outcome"])


def order(act: str, subject: str, **changes: Any) -> Order:
    return replace(Order(request_id="q1", actor="user:ada", act=act, subject=subject, seen=5), **changes)


@pytest.mark.parametrize(
    ("form", "taken"),
    [
        ({"request_id": "q"}, True), ({"request_id": "q" * 100}, True), ({"request_id": "q" * 101}, False), ({"request_id": ""}, False),
        ({"seen": "0"}, True), ({"seen": "9" * 18}, True), ({"seen": "9" * 19}, False), ({"seen": ""}, False), ({"seen": "-1"}, False),
    ],
)  # fmt: skip
def test_a_form_carries_what_was_seen_and_the_name_of_its_request(form: dict[str, str], *, taken: bool) -> None:
    world = World()
    came = world.do("sign_out_person", "eve", **form)
    assert ([call[0] for call in world.people.heard] == ["sign_out"]) is taken
    assert (came == "/console/people/eve?policy=tab") is taken
    assert taken or "open" in came["moved"]


def test_an_order_says_who_did_what_to_whom_and_of_a_long_name_the_first_hundred_and_fifty_characters() -> None:
    world = World()
    world.do("sign_out_person", "e" * 151)
    long = order("sign_out_person", "e" * 150)
    assert world.people.heard == [("sign_out", ("e" * 150,), {"by": "user:ada", "order": long})]


def test_a_deed_is_shown_and_done_by_who_may_and_nothing_happens_twice() -> None:
    world = World()
    with pytest.raises(NotFound, match="this is for admin, auditor to see"):
        world.ask("sign_out_person", "eve", Role.OPERATOR)
    world.ask("sign_out_person", "eve", Role.AUDITOR)
    refused = world.do("sign_out_person", "eve", Role.AUDITOR)
    assert "ada may not do this: admin may" in refused["moved"]
    with pytest.raises(NotFound, match="of every policy to see"):
        world.do("sign_out_person", "eve", of="tab")
    with pytest.raises(NotFound, match="there is no deed 'x'"):
        world.do("x", "eve")
    assert "this service is open" in world.do("sign_out_person", "eve", *Role, by="anonymous", who="bob")["moved"]
    assert not [call for call in world.people.heard if call[0] == "sign_out"]
    again = World(done=True).outcome("rotate_sessions", "sessions")
    assert (again.title, again.sentence) == (
        "Done already", "it was done. What it showed is shown once: if it was lost, do it again from the start."
    )  # fmt: skip


@pytest.mark.parametrize(
    ("deed", "subject", "stops"),
    [
        ("add_person", "new", False), ("change_person", "eve", False), ("invite_person", "eve", False), ("sign_out_person", "eve", True),
        ("disable_person", "eve", True), ("enable_person", "eve", False), ("make_key", "new", False), ("rotate_key", "rk_1", False),
        ("revoke_key", "rk_1", True), ("rotate_sessions", "sessions", True), ("erase", "person", True), ("replay_letters", "all", False),
    ],
)  # fmt: skip
def test_what_takes_something_away_is_marked_so(deed: str, subject: str, *, stops: bool) -> None:
    values = World().pages.confirm(looking(sight=World().sight), deed, subject)
    assert (values["stops"], values["allowed"], values["named"], values["seen"]["seen"]) == (stops, True, True, "7")


def test_somebody_is_added_with_their_roles_and_gets_a_link_for_a_day() -> None:
    world = World()
    told = world.outcome("add_person", "new", name="eve", role_viewer="on", role_admin="on", for_policy="tab", email=" e@x.de ")
    assert told.secret == "https://r/console/welcome?link=secret"
    (_, name, added), (_, _, invited) = world.people.heard
    assert name == ("eve",)
    assert added == {
        "roles": frozenset({Role.VIEWER, Role.ADMIN}), "by": "user:ada", "order": order("add_person", "new"), "policy": "tab",
        "email": "e@x.de", "os_user": None,
    }  # fmt: skip
    assert invited == {"lasts": timedelta(days=1), "by": "user:ada"}
    for deed in ("add_person", "make_key"):
        with pytest.raises(NotFound, match="what is not there yet is called 'new'"):
            world.ask(deed, "eve")


def test_of_somebody_that_alone_is_changed_which_is_different() -> None:
    world = World()
    same = {"role_operator": "on", "role_viewer": "on", "for_policy": "tab", "email": "e@x.de"}
    assert "nothing of eve is different" in world.do("change_person", "eve", **same)["moved"]
    assert world.do("change_person", "eve", **same | {"os_user": "evy"}) == "/console/people/eve?policy=tab"
    assert world.people.heard[-1][2] == {"by": "user:ada", "roles": None, "order": order("change_person", "eve"), "os_user": "evy"}
    world.do("change_person", "eve", **same | {"role_viewer": ""})
    assert world.people.heard[-1][2]["roles"] == frozenset({Role.OPERATOR})
    shown = {field.name: field.value for field in world.ask("change_person", "eve").fields}
    assert (shown["role_viewer"], shown["role_admin"], shown["for_policy"], shown["email"], shown["os_user"]) == (
        "on",
        "",
        "tab",
        "e@x.de",
        "",
    )
    typed = {field.name: field.value for field in world.ask("change_person", "eve", typed={"role_admin": "on"}).fields}
    assert (typed["role_viewer"], typed["role_admin"], typed["email"]) == ("", "on", "")
    for deed, disabled in (("disable_person", True), ("enable_person", False)):
        world.do(deed, "eve")
        assert world.people.heard[-1][2] == {"by": "user:ada", "disabled": disabled, "order": order(deed, "eve")}
    assert World().ask("sign_out_person", "eve").effect.startswith("2 open sessions and 1 tokens of eve end")


@pytest.mark.parametrize(
    ("form", "taken"),
    [
        ({}, True), ({"name": "n" * 150}, True), ({"name": "n" * 151}, False), ({"name": ""}, False), ({"scope_read": ""}, False),
        ({"rate_per_s": "1000000000"}, True), ({"rate_per_s": "1000000001"}, False), ({"expires_days": "36500"}, True),
        ({"expires_days": "36500.5"}, False), ({"for_policy": "elsewhere"}, False),
    ],
)  # fmt: skip
def test_a_key_is_made_within_its_bounds(form: dict[str, str], *, taken: bool) -> None:
    world = World()
    came = world.do("make_key", "new", **{"name": "x", "scope_read": "on"} | form)
    assert ("outcome" in came) is taken
    assert (len(world.keys.heard) == 1) is taken


def test_a_key_is_made_rotated_and_revoked_as_it_was_asked_for() -> None:
    world = World()
    made = world.outcome("make_key", "new", name="x", scope_read="on", rate_per_s="2", expires_days="3")
    assert (made.title, made.secret) == ("The key rk_9", "rk_9_text")
    assert world.keys.heard[-1][2] == {
        "name": "x", "scopes": [Scope.READ], "policy": None, "rate_per_s": 2.0, "expires_at": AT + timedelta(days=3), "by": "user:ada",
        "order": order("make_key", "new"),
    }  # fmt: skip
    rotated = world.outcome("rotate_key", "rk_1")
    assert rotated.further == ("/console/do/revoke_key/rk_1?policy=tab", "Revoke rk_1")
    assert world.keys.heard[-2][2] == {
        "name": "editor", "scopes": [Scope.INGEST, Scope.READ], "policy": "tab", "rate_per_s": 2.0, "expires_at": None, "by": "user:ada",
        "order": order("rotate_key", "rk_1"),
    }  # fmt: skip
    assert "somebody's own token" in world.do("rotate_key", "rk_2")["moved"]
    assert [field.name for field in world.ask("rotate_key", "rk_1").fields] == ["expires_days"]
    assert world.do("revoke_key", "rk_1") == "/console/keys/rk_1?policy=tab"
    assert world.keys.heard[-1] == ("revoke", ("rk_1",), {"by": "user:ada", "order": order("revoke_key", "rk_1")})
    assert "turned away within two seconds" in world.ask("revoke_key", "rk_1").effect
    assert world.ask("revoke_key", "rk_3").effect == f"rk_3 was revoked at {TOLD} UTC already."
    with pytest.raises(NotFound, match="no key begins with 'rk_8'"):
        world.ask("revoke_key", "rk_8")


def test_keys_of_sessions_are_rotated_once_and_that_is_written_down() -> None:
    world = World()
    assert world.do("rotate_sessions", "sessions") == "/console/access?policy=tab"
    once = order("rotate_sessions", "keys of sessions")
    assert (world.did, [call[:2] for call in world.requests.heard]) == (["user:ada"], [("carrying_out", (once,))])
    with pytest.raises(NotFound, match="rotated together"):
        world.ask("rotate_sessions", "x")


@pytest.mark.parametrize("form", [{}, {"actor": "a", "pseudonym": "b"}, {"actor": "a" * 2001}])
def test_nobody_is_forgotten_who_is_not_named_in_one_way(form: dict[str, str]) -> None:
    world = World()
    assert world.do("erase", "person", **form)["moved"]
    assert world.did == []


def test_somebody_is_forgotten_once_and_one_is_led_to_the_proof() -> None:
    world = World()
    assert world.do("erase", "person", actor="a" * 2000).startswith(f"/console/erasures/{'a' * 2000}/None?")
    named = order("erase", f"{'a' * 2000}/None", seen=None)
    assert world.did == [(f"{'a' * 2000}/None", "user:ada")]
    assert [call[:2] for call in world.requests.heard] == [("refuse_done", (named,)), ("done", (named,))]
    with pytest.raises(NotFound, match="a person is named in the form"):
        world.ask("erase", "eve")


def test_a_letter_is_shown_with_its_headers_and_twenty_thousand_characters() -> None:
    shown = World(letters=[letter(3, reason="r" * 501, payload=b"x" * 19_990)]).ask("replay_letter", "3")
    assert shown.shown == "a: 1\nb: 2\n\n" + "x" * 19_989 + "\n[cut after 20,000 characters]"
    assert f"made no sense: {'r' * 500}. It is read" in shown.effect
    assert shown.effect.startswith("It lay at events:1:2")
    whole = World(letters=[letter(3, payload=b"x" * 19_989, replayed=True)]).ask("replay_letter", "3")
    assert whole.shown.endswith("x" * 19_989)
    assert whole.effect.startswith(f"It was replayed at {TOLD} UTC already")
    for wrong in ("-1", "x", "1" * 16):
        with pytest.raises(BadRequest, match="is no number of a dead letter"):
            World().ask("replay_letter", wrong)
    with pytest.raises(NotFound, match="there is no dead letter"):
        World().ask("replay_letter", "1" * 15)


@pytest.mark.parametrize(
    ("count", "told"), [(0, "0 letters"), (1, "1 letter "), (1_000, "1,000 letters"), (1_001, "more than 1,000 letters")]
)
def test_letters_that_wait_are_counted_up_to_a_thousand(count: int, told: str) -> None:
    assert World(letters=[letter(n + 1) for n in range(count)]).ask("replay_letters", "all").effect.startswith(told)


def test_letters_are_replayed_page_after_page_and_of_those_that_still_make_no_sense_fifty_are_told() -> None:
    world = World(letters=[letter(n + 1) for n in range(401)])
    told = world.outcome("replay_letters", "all", reason="odd")
    assert told.sentence == "0 letters applied, 401 make no sense even now."
    assert (len(told.lines), told.lines[0].partition(":")[0], told.further) == (50, "1", None)
    (_, (noted,), said) = world.requests.heard[-1]
    assert noted == order("replay_letters", "all")
    detail = {"applied": 0, "still": 401, "ids": [], "reason": "odd"}
    assert said == {"action": "dead_letters.replay", "about": "dead letters", "detail": detail}
    one = World(letters=[letter(3)])
    assert "it makes no sense even now" in one.do("replay_letter", "3")["moved"]
    assert [call[0] for call in one.requests.heard] == ["refuse_done", "done"]
    assert one.requests.heard[-1][2]["detail"] == {"applied": 0, "still": 1, "ids": [3], "reason": None}
    with pytest.raises(NotFound, match="nothing to replay that is called 'some'"):
        world.ask("replay_letters", "some")


def test_the_reason_that_is_looked_for_is_cut_and_told() -> None:
    world = World(letters=[letter(1)])
    assert "whose reason has the words 'odd'" in world.ask("replay_letters", "all", reason="odd").effect
    assert "1 letter that wait" in world.ask("replay_letters", "all", typed={}).effect
    world.ask("replay_letters", "all", typed={"reason": "r" * 201})
    assert world.letters.heard[-1][2] == {"reason": "r" * 200, "limit": 1_001}


REPLAYED = AskedReplay(
    id="r1", policy="tab", toml="x" * 20_001, asked_by="user:ada", asked_at=AT,
    outcome=Replay(turns=1_000, changed=5, before=(), after=(), segments={}, terms={}, movers=(), excluded={}, name="mild"),
)  # fmt: skip


@pytest.mark.parametrize(("toml", "taken"), [("x", True), ("x" * 40_000, True), ("x" * 40_001, False), ("  ", False), ("a\x00", False)])
def test_a_rule_set_is_replayed_as_text_that_ends_in_a_line(toml: str, *, taken: bool) -> None:
    world = World()
    came = world.do("replay_rules", "tab", toml=toml)
    assert (came == "/console/replays/q1?policy=tab") is taken
    if taken:
        ((_, (wanted, asked), _),) = world.replays.heard
        assert (wanted.toml, wanted.id, wanted.asked_by, asked) == (f"{toml}\n", "q1", "user:ada", order("replay_rules", "tab", seen=None))
    assert world.do("replay_rules", "tab", toml="a\r\nb\n")
    assert world.replays.heard[-1][1][0].toml == "a\nb\n"
    with pytest.raises(NotFound, match="there is no policy 'composer' here"):
        world.ask("replay_rules", "composer")


def test_what_is_replayed_begins_with_the_rule_set_that_is_named_or_the_one_in_force() -> None:
    world = World()
    assert [world.ask("replay_rules", "tab", digest=digest).fields[0].value for digest in ("d1", "d9")] == ["x = 1\n", ""]
    assert world.ask("replay_rules", "tab", typed={"toml": "y"}).fields[0].value == "y"


def test_a_rule_set_is_proposed_once_it_was_replayed_and_can_be_scored_by() -> None:
    world = World(replay=REPLAYED)
    asking = world.ask("propose_rules", "r1")
    assert (asking.what, len(asking.shown)) == ("mild", 20_000)
    assert f"Replayed, 5 of 1,000 labels would move; gentle is in force since {TOLD} UTC, by user:ada." in asking.effect
    assert world.do("propose_rules", "r1") == "/console/rewards?policy=tab#proposals"
    (mine,) = world.rules.heard[-1][1]
    assert (mine.id, mine.toml, mine.proposed_by, mine.proposed_at) == ("q1", REPLAYED.toml, "user:ada", AT)
    assert world.do("propose_rules", "r1", of="tab") == "/console/rewards?policy=tab#proposals", "who sees one policy may as well"
    assert World().do("replay_rules", "tab", of="tab", toml="x") == "/console/replays/q1?policy=tab"
    rests_on = order("propose_rules", "tab", moves="rule_set.activate")
    assert [call[:2] for call in world.requests.heard] == [("refuse_done", (rests_on,)), ("done", (rests_on,))] * 2
    wrong = World(replay=replace(REPLAYED, refused="no such term"))
    assert "cannot score by it: no such term" in wrong.do("propose_rules", "r1")["moved"]
    assert "it was not replayed yet" in World(replay=replace(REPLAYED, outcome=None)).ask("propose_rules", "r1").effect
    with pytest.raises(NotFound, match="no replay r1 of tab"):
        World().do("propose_rules", "r1")
    assert wrong.rules.heard == []
