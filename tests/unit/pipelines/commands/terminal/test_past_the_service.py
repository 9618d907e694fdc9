"""What commands do on the database itself: it is written down before it is done, and what the service would refuse is refused here too."""

import json
import socket
import stat
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine, insert, select

from app import wiring
from app.db.access.keys import SqlKeys
from app.db.access.people import SqlPeople
from app.db.engine import reading, writing
from app.db.tables import audit, dead_letters
from app.domain.access import Scope
from app.domain.errors import BadConfig, BadInput, NotFound, RatchetError, Refused, UnknownPolicy
from app.domain.ids import utc_now
from app.domain.people import Role
from app.release.webhooks import new_secret
from pipelines.commands.operating import os_user, require_one_person
from tests.fakes.people import Town
from tests.fakes.releases import POLICY, ReleaseRoom, release_room, version
from tests.unit.pipelines.commands.terminal.at_a_terminal import Terminal, cells

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
GLASS = "--break-glass"
ONLY_RATING = 'name = "only-rating"\n[[terms]]\nname = "rating"\nweight = 1.0\n'


def newest_audit(engine: Engine) -> str:
    with reading(engine) as connection:
        return connection.execute(select(audit.c.action).order_by(audit.c.seq.desc()).limit(1)).scalar_one()


# --- keys and people -----------------------------------------------------------------------------------------------------------


def test_a_key_is_made_here_for_what_was_said_and_its_prefix_is_told(terminal: Terminal) -> None:
    made = terminal("keys", "create", "--name", "product", "--scope", "ingest", "--policy", POLICY, "--rate", "2.5", GLASS)
    [key] = SqlKeys(terminal.engine).all()
    assert (key.name, [*key.scopes], key.policy, key.rate_per_s, key.expires_at) == ("product", [Scope.INGEST], POLICY, 2.5, None)
    assert made.stdout.startswith(key.prefix)
    assert f"Its prefix is {key.prefix}; " in made.stderr
    assert terminal.broken() == [("break_glass", "product", "keys create", "")]
    assert newest_audit(terminal.engine) == "key.created"
    terminal.said("keys", "create", "--name", "short", "--scope", "read", "--expires-days", "2", GLASS)
    short = next(key for key in SqlKeys(terminal.engine).all() if key.name == "short")
    assert short.expires_at is not None
    assert timedelta(days=1.9) < short.expires_at - datetime.now(UTC) < timedelta(days=2.1)
    assert isinstance(terminal.refused("keys", "create", "--name", "x", "--scope", "read", "--policy", "none", GLASS), UnknownPolicy)
    assert len(SqlKeys(terminal.engine).all()) == 2


def test_keys_are_listed_and_ended_here_with_the_same_words(terminal: Terminal) -> None:
    key, _ = SqlKeys(terminal.engine).create(name="product", scopes=[Scope.INGEST])
    assert cells(terminal.said("keys", "list", GLASS), of=key.prefix)[:5] == [key.prefix, "product", "ingest", "all", ""]
    assert terminal.broken() == [], "who looks is not written down"
    assert terminal.said("keys", "revoke", key.prefix, GLASS) == f"{key.prefix} (product) is revoked\n"
    assert cells(terminal.said("keys", "list", GLASS), of=key.prefix)[-1].startswith("revoked ")
    assert terminal.broken() == [("break_glass", key.prefix, "keys revoke", "")]
    terminal.said("keys", "rotate-sessions", GLASS)
    assert terminal.broken()[-1] == ("break_glass", "keys of sessions", "keys rotate-sessions", "")


def test_who_breaks_the_glass_is_the_user_of_the_system_on_this_host(terminal: Terminal) -> None:
    terminal.said("keys", "rotate-sessions", GLASS)
    with reading(terminal.engine) as connection:
        row = connection.execute(select(audit).where(audit.c.action == "break_glass")).one()
    assert (row.actor, row.detail["host"]) == (os_user(), socket.gethostname())


def first(terminal: Terminal, *more: str) -> str:
    return terminal.said("people", "first", "root", *more)


def test_the_first_admin_is_added_with_their_user_and_gets_a_link_for_a_quarter_of_an_hour(terminal: Terminal) -> None:
    path = terminal.folder / "secrets" / "first_admin_link"
    said = f"{path} has a link with which root sets a password: good once, until 15 minutes from now\n"
    assert first(terminal, "--os-user", "r") == said
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    one = path.read_text()
    [person] = SqlPeople(terminal.engine).all()
    assert (person.name, [*person.roles], person.os_user) == ("root", [Role.ADMIN], "r")
    first(terminal)
    assert path.read_text() != one, "a new link, though they have set no password yet"
    assert len(SqlPeople(terminal.engine).all()) == 1


def test_somebody_who_is_there_becomes_an_admin_and_keeps_what_they_were(terminal: Terminal) -> None:
    SqlPeople(terminal.engine).add("root", roles=[Role.AUDITOR], by="system:test")
    first(terminal)
    assert {*SqlPeople(terminal.engine).find("root").roles} == {Role.ADMIN, Role.AUDITOR}


@pytest.mark.parametrize(
    ("roles", "policy", "disabled", "has_password", "is_ready"),
    [
        ((Role.ADMIN,), None, False, True, True), ((Role.ADMIN,), None, False, False, False), ((Role.AUDITOR,), None, False, True, False),
        ((Role.ADMIN,), POLICY, False, True, False), ((Role.ADMIN,), None, True, True, False),
    ],
)  # fmt: skip
def test_where_an_admin_of_all_can_sign_in_the_first_one_is_made_past_them_only(
    terminal: Terminal, roles: tuple[Role, ...], policy: str | None, disabled: bool, has_password: bool, is_ready: bool
) -> None:
    town = Town(terminal.engine, lambda: datetime.now(UTC))
    if disabled:
        town.person("other", Role.ADMIN)
    if has_password:
        town.person("ada", *roles, policy=policy)
    else:
        SqlPeople(terminal.engine).add("ada", roles=roles, policy=policy, by="system:test")
    if disabled:
        town.people.change("ada", disabled=True, by="system:test")
    if not is_ready and not disabled:
        first(terminal)
        return
    said = str(terminal.refused("people", "first", "root"))
    assert said.startswith("other can add people" if disabled else "ada can add people already (`ratchet people add`)")
    assert ("ada" in said) is not disabled
    first(terminal, GLASS)


# --- webhooks ------------------------------------------------------------------------------------------------------------------


def test_a_receiver_is_listed_turned_and_removed_here(terminal: Terminal) -> None:
    book = wiring.webhook_book(terminal.settings)
    hook = book.add(policy=POLICY, url="https://a.example/hook", secret=new_secret(), events=["release."], now=NOON)
    assert cells(terminal.said("webhooks", "list", GLASS), of=hook.id)[1:] == [POLICY, "https://a.example/hook", "release.", "1", "active"]
    assert terminal.broken() == [], "who looks is not written down"
    turned = terminal.said("webhooks", "rotate", hook.id, GLASS).strip()
    assert turned in book.find(hook.id).secrets
    assert cells(terminal.said("webhooks", "list", GLASS), of=hook.id)[4:] == ["2", "active"]
    assert terminal.said("webhooks", "remove", hook.id, GLASS) == "https://a.example/hook hears no more\n"
    assert cells(terminal.said("webhooks", "list", GLASS), of=hook.id)[5].startswith("removed 20")
    assert [(subject, act) for _, subject, act, _ in terminal.broken()] == [(hook.id, "webhooks rotate"), (hook.id, "webhooks remove")]


def test_a_receiver_of_a_policy_that_is_not_declared_is_none_and_has_no_deliveries(terminal: Terminal) -> None:
    assert isinstance(terminal.refused("webhooks", "add", "https://a.example", "--policy", "none", GLASS), UnknownPolicy)
    assert isinstance(terminal.refused("webhooks", "deliveries", "nobody", GLASS), NotFound)
    hook = wiring.webhook_book(terminal.settings).add(policy=None, url="https://a", secret=new_secret(), events=[], now=NOON)
    assert "last answer" in terminal.said("webhooks", "deliveries", hook.id, GLASS)


# --- dead letters, persons -------------------------------------------------------------------------------------------------------


def bury(terminal: Terminal, *reasons: str, replayed: datetime | None = None) -> None:
    now = datetime.now(UTC)
    rows = [
        {
            "topic": "t", "partition": 0, "offset": number, "headers": {}, "payload": b"\xff", "reason": reason, "attempts": 1,
            "first_seen_at": now, "last_seen_at": now, "replayed_at": replayed,
        }
        for number, reason in enumerate(reasons)
    ]  # fmt: skip
    with writing(terminal.engine) as connection:
        connection.execute(insert(dead_letters), rows)


def test_dead_letters_are_listed_here_those_that_wait_or_all_of_a_reason(terminal: Terminal) -> None:
    bury(terminal, "torn", "odd", "torn")
    with writing(terminal.engine) as connection:
        connection.execute(dead_letters.update().where(dead_letters.c.id == 3).values(replayed_at=datetime.now(UTC)))

    def ids(*words: str) -> list[str]:
        return [line.split("\t")[0] for line in terminal("dlq", "list", *words, GLASS).stdout.splitlines()]

    assert ids() == ["1", "2"]
    assert ids("--all") == ["1", "2", "3"]
    assert (ids("--reason", "torn"), ids("--reason", "torn", "--all"), ids("--limit", "1")) == (["1"], ["1", "3"], ["1"])
    assert terminal("dlq", "list", GLASS).stderr == "2 dead letters\n"


def test_a_letter_that_is_shown_or_tried_again_here_is_written_down(terminal: Terminal) -> None:
    bury(terminal, "torn", "odd", "torn")
    assert json.loads(terminal.said("dlq", "show", "2", GLASS))["payload"] == "\\xff"
    tried = terminal("dlq", "replay", "--reason", "torn", GLASS)
    assert tried.stdout == "0 replayed, 2 still make no sense\n"
    assert [line.split(":")[0] for line in tried.stderr.splitlines()] == ["1", "3"]
    assert terminal("dlq", "replay", "2", GLASS).stdout == "0 replayed, 1 still make no sense\n"
    assert terminal.broken() == [
        ("break_glass", "dead letter 2", "dlq show", ""), ("break_glass", "dead letters", "dlq replay", "torn"),
        ("break_glass", "dead letters", "dlq replay", ""),
    ]  # fmt: skip


@pytest.mark.parametrize(("words", "deleted"), [((), 0), (("--days", "29"), 1), (("--days", "0"), 1)])
def test_letters_are_deleted_here_so_long_after_their_replay(terminal: Terminal, words: tuple[str, ...], deleted: int) -> None:
    bury(terminal, "torn", replayed=datetime.now(UTC) - timedelta(days=29, hours=12))
    assert terminal.said("dlq", "purge", *words, GLASS) == f"{deleted} deleted\n"
    assert terminal.broken() == [("break_glass", "dead letters", "dlq purge", "")]


def test_a_person_is_forgotten_here_and_segments_that_nobody_knows_are_swept(terminal: Terminal) -> None:
    told = terminal.said("erase", "--actor", "ada", GLASS)
    pseudonym = told.partition(":")[0]
    assert (len(pseudonym), "removed 0 turns" in told) == (32, True)
    assert terminal.broken() == [("break_glass", pseudonym, "erase", "")]
    again = terminal.said("erase", "--pseudonym", pseudonym, GLASS)
    assert again.startswith(f"{pseudonym}: erased before; removed 0 turns")
    assert terminal.said("erase", "--sweep", GLASS) == "removed 0 segments that no row knew\n"
    assert terminal.broken()[-1] == ("break_glass", "segments", "erase sweep", "")


# --- releases and rules ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def room(terminal: Terminal) -> ReleaseRoom:
    return release_room(terminal.engine)


@pytest.mark.parametrize(
    ("act", "said"), [("reject", "is REJECTED: bad"), ("abort", "is ABORTED: bad"), ("rollback", "is ROLLED_BACK: bad")]
)
def test_a_release_is_stopped_here_by_whoever_the_system_says_they_are(terminal: Terminal, room: ReleaseRoom, act: str, said: str) -> None:
    release = room.champion("v2") if act == "rollback" else room.ready("v2")
    assert terminal.said("release", act, release.id, "--reason", "bad", GLASS) == f"tiny-v2 {said}\n"
    assert terminal.broken() == [("release.break_glass", release.id, act, "bad")]


def test_an_approval_here_needs_the_evidence_and_is_written_down(terminal: Terminal, room: ReleaseRoom) -> None:
    room.clock.now = utc_now()
    release = room.ready("v2")
    assert release.evidence_digest is not None
    assert release.evidence_digest in str(terminal.refused("release", "approve", release.id, GLASS))
    waiting = room.queued("v3")
    assert f"the release is {waiting.state}" in str(terminal.refused("release", "approve", waiting.id, GLASS))
    assert terminal.broken() == []
    evidence = ("--evidence", release.evidence_digest)
    assert isinstance(terminal.refused("release", "approve", release.id, "--evidence", "other", GLASS), RatchetError)
    done = terminal.said("release", "approve", release.id, *evidence, "--reason", "looked", GLASS)
    assert done.startswith("tiny-v2 is APPROVED: ")
    written = ("release.break_glass", release.id, "approve")
    assert terminal.broken() == [(*written, "none given"), (*written, "looked")], "before it is done"


@pytest.mark.parametrize(("needed", "refused"), [(None, False), (1, False), (2, True)])
def test_nobody_is_one_of_two_people_on_the_database(room: ReleaseRoom, needed: int | None, refused: bool) -> None:
    release = replace(room.queued("v2"), approvals_needed=needed)
    if not refused:
        require_one_person(release)
        return
    with pytest.raises(Refused, match=f"release {release.id} needs 2 people"):
        require_one_person(release)


def test_a_release_is_found_by_either_end_of_its_id_or_its_version_and_by_nothing_that_fits_two(
    terminal: Terminal, room: ReleaseRoom
) -> None:
    for number in range(2, 13):
        room.desk.abort(room.queued(f"v{number}").id, actor="user:ada", reason="next")
    named = {release.id: release.version_name for release in room.ledger.list(policy=POLICY, limit=100)}
    for text in ("release-2", "tiny-v2", "e-2", "2"):
        if sum(id_.startswith(text) or id_.endswith(text) or name == text for id_, name in named.items()) == 1:
            assert json.loads(terminal.said("release", "show", text))["version_name"] == named["release-2"]
    with pytest.raises(AssertionError):
        terminal.said("release", "show", "release-")
    assert "releases are called 'release-1'" in str(terminal.refused("release", "show", "release-1"))


def test_the_anchor_pins_and_plants_are_set_here_and_two_votes_are_not(terminal: Terminal, room: ReleaseRoom) -> None:
    room.champion("v2")
    wiring.version_book(terminal.settings).add(version("v2"))
    assert terminal.said("release", "anchor", POLICY, GLASS) == f"the anchor of {POLICY} is v2\n"
    assert terminal.said("release", "pin", POLICY, "tiny-v2", "--reason", "kept", GLASS) == "v2 is kept until it is unpinned\n"
    unpinned = terminal.said("release", "unpin", POLICY, "v2", "--reason", "done", GLASS)
    assert unpinned == "v2 is kept only while something else needs it\n"
    assert isinstance(terminal.refused("release", "pin", POLICY, "w", "--reason", "r", GLASS), NotFound)
    assert [(subject, act, reason) for _, subject, act, reason in terminal.broken()] == [
        (POLICY, "anchor", "renewed by a person"), ("v2", "pin", "kept"), ("v2", "unpin", "done"),
    ]  # fmt: skip
    for words in (("unfreeze", POLICY), ("lift", POLICY, "v2", "--reason", "r")):
        assert isinstance(terminal.refused("release", *words, GLASS), Refused)
    refused = terminal.refused("release", "plant", POLICY, "v2", "--reason", "r")
    assert isinstance(refused, Refused)
    assert "say --break-glass" in str(refused)
    assert len(terminal.broken()) == 3


def test_rules_are_put_in_force_here_and_compared_by_file_policy_and_digest(terminal: Terminal, tmp_path: Path) -> None:
    file, other = tmp_path / "rules.toml", tmp_path / "other.toml"
    file.write_text(ONLY_RATING)
    other.write_text(ONLY_RATING.replace("1.0", "0.5"))
    assert "never activated: it is the one that this deployment starts with" in terminal.said("rules", "show", POLICY)
    said = terminal.said("rules", "activate", str(file), "--policy", POLICY, GLASS)
    digest = wiring.rule_book(terminal.settings, "").history(POLICY)[0].digest
    assert said == f"{digest[:12]} is in force for {POLICY}; running labellers score by it within seconds\n"
    assert terminal.broken() == [("break_glass", POLICY, "rules activate", "")]
    shown = terminal.said("rules", "show", POLICY)
    assert "never activated" not in shown
    assert f"{digest[:12]} only-rating activated by {os_user()}" in shown
    assert cells(shown, of="rating")[:2] == ["rating", "1"]
    assert terminal.said("rules", "show", POLICY, "--toml") == ONLY_RATING
    for one in (str(file), POLICY, digest):
        assert terminal.said("rules", "diff", one, str(file)) == "no difference\n"
        changed = terminal.said("rules", "diff", one, str(other)).splitlines()
        assert [line for line in changed if line[:1] in "+-" and line[:3] not in ("+++", "---")] == ["-weight = 1.0", "+weight = 0.5"]
    assert isinstance(terminal.refused("rules", "diff", "nothing", str(file)), BadConfig)
    assert isinstance(terminal.refused("rules", "activate", str(file), "--policy", "none", GLASS), UnknownPolicy)


def test_a_rule_set_is_read_and_what_it_pays_is_told(terminal: Terminal, tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(ONLY_RATING)
    told = terminal.said("rules", "validate", str(file))
    assert "only-rating (" in told
    assert "is trained on" in told or "is not trained on" in told
    file.write_text('name = "mine"\ntrain_without_signal = true\ndefault_reward = 0.25\n' + ONLY_RATING.partition("\n")[2])
    assert terminal.said("rules", "validate", str(file)).endswith("a turn without any signal gets 0.25 and is trained on\n")
    file.write_text(file.read_text().replace("true", "false"))
    assert terminal.said("rules", "validate", str(file)).endswith("a turn without any signal gets 0.25 and is not trained on\n")
    file.write_text(ONLY_RATING.replace('"rating"', '"vibes"'))
    assert isinstance(terminal.refused("rules", "validate", str(file)), BadInput | BadConfig)
