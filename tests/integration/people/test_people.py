"""People on both databases: who they are, how they get in, and that four eyes count people."""

from datetime import timedelta

import pytest
from sqlalchemy import Engine, text

from app.access import SignIn
from app.db.access.keys import SqlKeys
from app.db.engine import reading
from app.db.release.audit import entries, verify
from app.domain.errors import BadRequest, DoneAlready, Refused, StaleGeneration
from app.domain.people import FIRST_LINK_LASTS, SESSION_IDLE, SESSION_LASTS, Role, SignInRefused
from app.domain.release.alarms import AlarmKind
from app.domain.release.releases import ReleaseState
from app.domain.release.terms import Terms
from app.release.basis import Basis
from tests.fakes.clock import FrozenClock
from tests.fakes.people import PASSWORD, Town, quick_passwords
from tests.fakes.releases import ADA, BOB, EVE, POLICY, ReleaseRoom, release_room


def desk_of(town: Town) -> SignIn:
    return SignIn(town.people, passwords=quick_passwords(), clock=town.clock)


def test_a_link_sets_a_password_once_and_in_time(engine: Engine) -> None:
    clock = FrozenClock()
    town = Town(engine, clock)
    desk, people = desk_of(town), town.people
    people.add("ada", roles=[Role.ADMIN], by="user:root")
    first, second = (people.invite("ada", lasts=FIRST_LINK_LASTS, by="user:root") for _ in range(2))
    for spent in (first, "", "nonsense"):
        with pytest.raises(SignInRefused):
            desk.invited(spent)
    with pytest.raises(BadRequest, match="12 to 256"):
        desk.accept(second, "short")
    with pytest.raises(BadRequest, match="guessed"):
        desk.accept(second, "ada ada ada ada")
    assert people.of_session(desk.accept(second, PASSWORD)) == people.find("ada")
    with pytest.raises(SignInRefused):
        desk.accept(second, PASSWORD)
    third = people.invite("ada", lasts=FIRST_LINK_LASTS, by="user:root")
    clock.advance(FIRST_LINK_LASTS.total_seconds())
    with pytest.raises(SignInRefused):
        desk.accept(third, PASSWORD)
    with reading(engine) as connection:
        stored = str([connection.execute(text(f"SELECT * FROM {name}")).all() for name in ("people", "invitations", "browser_sessions")])
        assert verify(connection).problem is None
    assert not any(secret in stored for secret in (first, second, PASSWORD))


def test_an_account_at_a_provider_is_bound_by_its_address_once_and_counts_alone_from_then_on(engine: Engine) -> None:
    people = Town(engine).people
    ada = people.add("ada", roles=[Role.ADMIN], email="Ada@example.com", by="user:root")
    people.add("bob", roles=[Role.VIEWER], email="bob@example.com", by="user:root")
    people.change("bob", by="user:root", disabled=True)
    assert people.of_account("provider|1", None) is None, "its address is not verified"
    assert people.of_account("provider|1", "eve@example.com") is None
    assert people.of_account("provider|2", "bob@example.com") is None
    assert people.of_account("provider|1", "ada@example.com") == ada
    assert people.of_account("provider|9", "ada@example.com") is None, "whoever gets the address next is not ada"
    people.change("ada", by="user:root", email="else@example.com")
    assert (people.of_account("provider|1", None) or ada).name == "ada"
    assert people.of_account("provider|9", "else@example.com") is None
    with reading(engine) as connection:
        bound = [(entry.subject, entry.actor, entry.detail) for entry in entries(connection) if entry.action == "person.account_bound"]
    assert bound == [("ada", "user:ada", {"account": "provider|1"})]
    people.change("bob", by="user:root", disabled=False)
    assert people.of_account("provider|1", "bob@example.com") == people.find("ada"), "the account counts, not its address"
    bob = people.of_account("provider|2", "bob@example.com")
    assert bob is not None, "nothing was bound while bob was disabled"
    assert people.of_account("provider|2", None) == people.find("bob")
    people.change("bob", by="user:root", disabled=True)
    assert people.of_account("provider|2", "bob@example.com") is None


def test_a_session_ends_by_leaving_idling_age_a_new_sign_in_and_being_disabled(engine: Engine) -> None:
    clock = FrozenClock()
    town = Town(engine, clock)
    desk, people = desk_of(town), town.people
    ada = town.person("ada", Role.ADMIN)
    town.person("bob", Role.ADMIN)
    left = desk.with_password("ada", PASSWORD)
    desk.leave(left)
    idle = desk.with_password("ada", PASSWORD)
    rotated = desk.with_password(" ADA ", PASSWORD)
    after = desk.with_password("ada", PASSWORD, instead_of=rotated)
    assert [people.of_session(each) for each in (left, rotated, "x")] == [None] * 3
    steps = int(SESSION_LASTS / SESSION_IDLE) * 2
    for step in range(steps):
        assert people.of_session(after) == ada, step
        clock.advance(SESSION_IDLE.total_seconds() / 2)
    assert people.of_session(idle) is None
    assert people.of_session(after) is None, "however busy"
    fresh, token = desk.with_password("ada", PASSWORD), town.token(ada)
    key = next(key for key in SqlKeys(engine, clock=clock).all() if token.startswith(key.prefix))
    assert people.of_token(key.id) == ada
    people.change("ada", by="user:bob", disabled=True)
    assert (people.of_session(fresh), people.of_token(key.id)) == (None, None)
    people.change("ada", by="user:bob", disabled=False)
    assert (people.of_session(fresh), people.of_token(key.id)) == (None, None), "what ended stays so"


def test_wrong_passwords_lock_and_all_that_is_wrong_sounds_alike(engine: Engine) -> None:
    clock = FrozenClock()
    town = Town(engine, clock)
    desk = desk_of(town)
    town.person("ada")
    said = set()

    def tries(name: str, password: str) -> bool:
        try:
            desk.with_password(name, password)
        except SignInRefused as error:
            said.add(str(error))
            return False
        return True

    assert [tries("ada", "wrong") for _ in range(4)] == [False] * 4
    assert tries("ada", PASSWORD), "four wrong ones are forgiven"
    assert [tries("ada", "wrong") for _ in range(5)] == [False] * 5
    assert not tries("ada", PASSWORD), "locked"
    clock.advance(61)
    assert not tries("ada", "wrong"), "one more, and it is locked for two minutes"
    clock.advance(61)
    assert not tries("ada", PASSWORD)
    clock.advance(61)
    assert tries("ada", PASSWORD)
    assert not tries("nobody", PASSWORD)
    town.people.add("new", roles=[Role.VIEWER], by=ADA)
    assert not tries("new", "")
    assert len(said) == 1


def test_the_last_admin_stays_and_names_are_peoples_and_unique(engine: Engine) -> None:
    town = Town(engine)
    people = town.people
    town.person("ada", Role.ADMIN)
    town.person("tab", Role.ADMIN, policy="tab")
    for change in ({"roles": [Role.VIEWER]}, {"disabled": True}, {"policy": "tab"}):
        with pytest.raises(Refused, match="last admin"):
            people.change("ada", by=ADA, **change)  # pyright: ignore[reportArgumentType]
    with pytest.raises(Refused, match="already"):
        people.add("ada", roles=[Role.VIEWER], by=ADA)
    for name in ("deploy-bot", "Ada", "", "a b", "user:x", "<b>", "x" * 65):
        with pytest.raises(BadRequest):
            people.add(name, roles=[Role.VIEWER], by=ADA)
    with reading(engine) as connection:
        assert not [entry for entry in entries(connection) if entry.action == "person.changed"]


# --- four eyes count people


def waiting(room: ReleaseRoom) -> tuple[str, str]:
    release = room.ready("v2")
    return release.id, release.evidence_digest or ""


def strict(engine: Engine, **terms: object) -> ReleaseRoom:
    return release_room(engine, terms=Terms(**{"config_hash": "config", "approvals": 2, **terms}))  # pyright: ignore[reportArgumentType]


def test_an_address_is_one_person_s_and_who_wants_it_is_told(engine: Engine) -> None:
    people = Town(engine).people
    people.add("ada", roles=[Role.ADMIN], email="ada@example.com", by="user:root")
    people.add("bob", roles=[Role.VIEWER], by="user:root")
    with pytest.raises(Refused, match="address"):
        people.change("bob", email="Ada@example.com", by="user:ada")
    assert people.find("bob").email is None


def test_an_admin_who_mints_two_people_cannot_approve_with_them(engine: Engine) -> None:
    """The admin's own yes beside a fresh account of theirs, and two fresh accounts beside each other."""
    room = strict(engine)
    town = Town(engine, room.clock)
    town.person("ada", Role.ADMIN)
    for name in ("bob", "eve"):
        town.people.add(name, roles=[Role.OPERATOR], by=ADA)
        town.people.accept(town.people.invite(name, lasts=timedelta(days=1), by=ADA), password_hash="x")
    release, digest = waiting(room)
    room.desk.approve(release, approver=BOB, evidence=digest)
    for second in (ADA, EVE):
        with pytest.raises(Refused, match="do not count beside each other"):
            room.desk.approve(release, approver=second, evidence=digest)
    town.person("old")
    assert room.desk.approve(release, approver="user:old", evidence=digest).state is ReleaseState.APPROVED


def test_a_reset_credential_counts_again_after_a_day(sqlite_engine: Engine) -> None:
    room = strict(sqlite_engine)
    town = Town(sqlite_engine, room.clock)
    town.person("ada", Role.ADMIN)
    town.person("bob")
    town.people.invite("bob", lasts=timedelta(days=1), by=ADA)
    release, digest = waiting(room)
    room.desk.approve(release, approver=ADA, evidence=digest)
    room.clock.advance(3600)
    with pytest.raises(Refused, match="do not count beside each other"):
        room.desk.approve(release, approver=BOB, evidence=digest)
    later = Town(sqlite_engine, FrozenClock(room.clock() + timedelta(hours=23)))
    later.token(later.people.find("bob"))  # of their own: nobody else's hand
    room.clock.advance(23 * 3600)
    newer = room.ready("v3")
    room.desk.approve(newer.id, approver=ADA, evidence=newer.evidence_digest or "")
    assert room.desk.approve(newer.id, approver=BOB, evidence=newer.evidence_digest or "").state is ReleaseState.APPROVED


def test_who_edited_the_gates_is_found_under_their_name_on_the_machine_and_behind_a_credential(sqlite_engine: Engine) -> None:
    room = strict(sqlite_engine, approvals=1, edited_by="user:root")
    town = Town(sqlite_engine, room.clock)
    town.people.add("ada", roles=[Role.ADMIN], os_user="root", by="system:test")
    town.person("bob")
    release, digest = waiting(room)
    with pytest.raises(Refused, match="last edited"):
        room.desk.approve(release, approver=ADA, evidence=digest)
    town.people.invite("bob", lasts=timedelta(days=1), by=ADA)
    with pytest.raises(Refused, match="must not decide here"):
        room.desk.approve(release, approver=BOB, evidence=digest)


def test_votes_are_peoples_too(sqlite_engine: Engine) -> None:
    room = strict(sqlite_engine)
    town = Town(sqlite_engine, room.clock)
    town.people.add("ada", roles=[Role.ADMIN], os_user="root", by="system:test")
    room.desk.freeze(POLICY, AlarmKind.GAP, actor="system:watch", reason="alarms")
    assert not room.desk.unfreeze(POLICY, actor=ADA)
    with pytest.raises(Refused, match="same person"):
        room.desk.unfreeze(POLICY, actor="user:root")
    assert room.desk.unfreeze(POLICY, actor=BOB)


# --- what an act rests on


def test_a_request_is_carried_out_once_and_says_so(engine: Engine) -> None:
    room = release_room(engine)
    release, digest = waiting(room)
    basis = Basis(actor=ADA, act="approve", subject=release, request_id="r-1", generation=1)
    assert room.desk.on(basis).approve(release, approver=ADA, evidence=digest).state is ReleaseState.APPROVED
    with pytest.raises(DoneAlready, match="done already"):
        room.desk.on(basis).approve(release, approver=ADA, evidence=digest)
    with pytest.raises(Refused, match="another act"):
        room.desk.on(Basis(actor=BOB, act="abort", subject=release, request_id="r-1")).abort(release, actor=BOB, reason="x")
    assert room.ledger.find(release).state is ReleaseState.APPROVED


def test_a_refused_request_was_not_carried_out(sqlite_engine: Engine) -> None:
    room = release_room(sqlite_engine)
    release, digest = waiting(room)
    basis = Basis(actor=ADA, act="approve", subject=release, request_id="r-1")
    with pytest.raises(Refused, match="look at it again"):
        room.desk.on(basis).approve(release, approver=ADA, evidence="f" * 64)
    assert room.desk.on(basis).approve(release, approver=ADA, evidence=digest).state is ReleaseState.APPROVED


def test_an_act_on_what_moved_on_says_what_happened_since(sqlite_engine: Engine) -> None:
    room = release_room(sqlite_engine)
    first = room.champion("v2")
    second = room.champion("v3")
    basis = Basis(actor=ADA, act="roll_back", subject=first.id, generation=2)
    with pytest.raises(StaleGeneration, match=r"generation 2, now 3\): promote of v3 by system:watch at .* Nothing was done"):
        room.desk.on(basis).roll_back(first.id, actor=ADA, reason="rude")
    waits = room.ready("v4")
    other = Basis(actor=ADA, act="reject", subject=waits.id, evidence="e" * 64)
    with pytest.raises(StaleGeneration, match="it is READY"):
        room.desk.on(other).reject(waits.id, approver=ADA, reason="no")
    assert room.ledger.find(second.id).state is ReleaseState.CHAMPION
