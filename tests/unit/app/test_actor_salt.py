"""The salt under which people are stored: the database knows it again, and whoever has another one is refused before anybody is hashed."""

import sqlite3
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from app import wiring
from app.db.engine import reading, writing
from app.db.operations.facts import NOBODY, SALT, read_fact, stored_under
from app.db.tables import deployment_facts
from app.domain.errors import BadConfig, BadInput, Unavailable
from app.domain.ids import hash_actor, salt_fingerprint
from app.domain.telemetry.streams import EffectBatch, JoinRules
from app.settings import Settings, from_environment
from pipelines.commands.maintenance.recover import recover
from pipelines.commands.operating import os_user
from tests.fakes.served import applied, at, turn


def given(folder: Path, **more: str) -> Settings:
    return from_environment({"RATCHET_DATA": str(folder)} | {f"RATCHET_{name}": value for name, value in more.items()})


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A deployment that was prepared, with a salt of its own."""
    made = given(tmp_path)
    wiring.upgrade_schema(made)
    return made


def accept(settings: Settings, *arguments: str, **more: str) -> Result:
    environment = {"RATCHET_DATA": str(settings.data)} | {f"RATCHET_{name}": value for name, value in more.items()}
    return CliRunner().invoke(recover, ["salt", *arguments], env=environment, catch_exceptions=False)


def test_the_database_knows_the_salt_again_without_being_told_it(settings: Settings) -> None:
    salt = wiring.actor_salt(settings)
    assert stored_under(settings.database_url).fingerprint == salt_fingerprint(salt)
    assert salt.encode() not in (settings.data / "ratchet.db").read_bytes()
    assert salt_fingerprint(salt) != hash_actor("the salt itself", salt=salt)


def test_a_database_that_came_back_without_its_secrets_gets_no_fresh_salt(settings: Settings) -> None:
    path = settings.secrets / wiring.ACTOR_SALT
    salt = path.read_text()
    path.unlink()
    for ask in (wiring.actor_salt, wiring.keep_salt, wiring.upgrade_schema, wiring.refuse_weak_secrets):
        with pytest.raises(BadConfig, match=r"actor_salt is missing: .*docs/backup\.md.*`ratchet recover salt`"):
            ask(settings)
        assert not path.exists()
    with pytest.raises(BadConfig):
        wiring.pseudonym_of(settings, actor="ada")
    path.write_text(salt)
    assert wiring.actor_salt(settings) == salt.strip()


@pytest.mark.parametrize("people", [True, False])
def test_one_whose_salt_nobody_noted_gets_a_fresh_one_where_it_holds_nobody(settings: Settings, people: bool) -> None:
    with wiring.opened_state(settings) as state, writing(state) as connection:
        connection.execute(deployment_facts.delete())
    if people:
        stored = EffectBatch(events=(applied(turn("a", actor="ada")),))
        wiring.effect_store(settings, rules=JoinRules(policies={})).apply(stored, now=at(10))
    wiring.upgrade_schema(settings)
    salt = wiring.actor_salt(settings)
    assert stored_under(settings.database_url).fingerprint == salt_fingerprint(salt)
    with wiring.opened_state(settings) as state, writing(state) as connection:
        connection.execute(deployment_facts.delete())
    (settings.secrets / wiring.ACTOR_SALT).unlink()
    if people:
        with pytest.raises(BadConfig, match="is missing"):
            wiring.upgrade_schema(settings)
    else:
        wiring.upgrade_schema(settings)
        assert wiring.actor_salt(settings) not in (salt, wiring.PUBLIC_SALT)


def test_another_salt_is_refused_wherever_it_stands(settings: Settings) -> None:
    with pytest.raises(BadConfig, match=r"^RATCHET_ACTOR_SALT is another salt than the one under which"):
        wiring.actor_salt(given(settings.data, ACTOR_SALT="y" * 64))
    (settings.secrets / wiring.ACTOR_SALT).write_text("z" * 64)
    with pytest.raises(BadConfig, match=r"secrets/actor_salt is another salt"):
        wiring.upgrade_schema(settings)


def test_a_lost_salt_is_given_up_by_a_person_and_that_is_in_the_audit(settings: Settings) -> None:
    lost = wiring.actor_salt(settings)
    (settings.secrets / wiring.ACTOR_SALT).unlink()
    assert accept(settings).exit_code == 1, "nobody said yes"
    with pytest.raises(BadConfig):
        wiring.actor_salt(settings)
    assert "start the api's processes again" in accept(settings, "--yes").output
    assert wiring.actor_salt(settings) != lost
    with sqlite3.connect(settings.data / "ratchet.db") as database:
        (entry,) = database.execute("SELECT actor, action FROM audit WHERE action LIKE 'actor_salt%'")
    database.close()
    assert entry == (os_user(), "actor_salt.changed")
    named = {"ACTOR_SALT": "n" * 64}
    assert accept(settings, "--yes", **named).exit_code == 0
    assert wiring.actor_salt(given(settings.data, **named)) == "n" * 64
    with pytest.raises(BadConfig, match="another salt"):
        wiring.actor_salt(settings)


def test_a_database_that_is_away_holds_up_who_has_the_salt_and_makes_no_fresh_one(
    settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    named = given(tmp_path / "there", DATABASE_URL="postgresql+psycopg://nobody@127.0.0.1:1/none", ACTOR_SALT="s" * 64)
    assert wiring.actor_salt(named) == "s" * 64
    assert "actor salt unchecked" in caplog.text
    (settings.data / "ratchet.db").write_bytes(b"")
    (settings.data / "ratchet.db").unlink()
    (settings.data / "ratchet.db").mkdir()
    assert wiring.actor_salt(settings)
    (settings.secrets / wiring.ACTOR_SALT).unlink()
    with pytest.raises(Unavailable):
        wiring.actor_salt(settings)
    assert not (settings.secrets / wiring.ACTOR_SALT).exists()


def test_no_database_is_made_by_whoever_asks_for_the_salt(tmp_path: Path) -> None:
    settings = given(tmp_path)
    assert stored_under(settings.database_url) == NOBODY
    assert wiring.actor_salt(settings) == wiring.actor_salt(settings)
    assert not (tmp_path / "ratchet.db").exists()


def test_whoever_comes_second_with_another_salt_is_refused_and_changes_nothing(settings: Settings) -> None:
    salt = wiring.actor_salt(settings)
    with pytest.raises(BadConfig, match="another salt"):
        wiring.note_salt(given(settings.data, ACTOR_SALT="y" * 64))
    with wiring.opened_state(settings) as state, reading(state) as connection:
        fact = read_fact(connection, SALT)
    assert fact is not None
    assert fact.value == {"fingerprint": salt_fingerprint(salt)}


def test_a_file_that_lost_its_secret_is_one_sentence(settings: Settings) -> None:
    (settings.secrets / wiring.ACTOR_SALT).write_text("\n")
    with pytest.raises(BadInput, match="is empty: put the secret back"):
        wiring.actor_salt(settings)
