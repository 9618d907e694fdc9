"""Bad input and bad days: one sentence that names the cure, exit code 2, nothing half-started."""

import socket
import sqlite3
from pathlib import Path

import pytest

from pipelines.commands.demonstration.profiles import PROFILES, write_config
from tests.e2e.running import ratchet

pytestmark = pytest.mark.e2e


def refused(*arguments: str, environment: dict[str, str] | None = None) -> str:
    """The one sentence of a refusal."""
    done = ratchet(*arguments, environment=environment)
    assert done.returncode == 2, done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("ratchet: ")
    return lines[0]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(PROFILES["tiny"], tmp_path / "data", slot_s=10)


def up(config: Path, *more: str) -> tuple[str, ...]:
    return ("up", "--data", str(config.parent), "--config", str(config), *more)


def test_a_missing_model_is_refused_with_the_command_that_makes_it(config: Path) -> None:
    config.write_text(config.read_text().replace("/tiny", "/absent"))
    assert "make model" in refused(*up(config))
    assert not (config.parent / "ratchet.db").exists()


def test_an_unreadable_configuration_is_refused(tmp_path: Path, config: Path) -> None:
    assert "cannot read" in refused("up", "--data", str(tmp_path), "--config", str(tmp_path / "absent.toml"))
    config.write_text("policies = [")
    assert "not TOML" in refused(*up(config))
    config.write_text("[nonsense]\na = 1\n")
    assert "nonsense" in refused(*up(config))


def test_a_configuration_without_a_policy_is_refused(config: Path) -> None:
    config.write_text("[schedule]\nslot_s = 60\n")
    assert "[policies.NAME]" in refused(*up(config))


def test_an_unknown_policy_is_refused_with_those_there_are(config: Path) -> None:
    environment = {"RATCHET_DATA": str(config.parent), "RATCHET_CONFIG": str(config)}
    assert ratchet("db", "upgrade", environment=environment).returncode == 0
    assert "composer" in refused("cycle", "list", "nobody", environment=environment)


def test_a_port_that_somebody_named_and_that_is_taken_is_refused(config: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert f"port {port}" in refused(*up(config, "--port", str(port)))


def test_a_database_that_a_newer_version_wrote_is_refused(config: Path) -> None:
    with sqlite3.connect(config.parent / "ratchet.db") as database:
        database.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")
        database.execute("INSERT INTO alembic_version VALUES ('2099_from_the_future')")
    assert "2099_from_the_future" in refused(*up(config))


def test_a_process_on_an_old_database_says_how_to_upgrade(config: Path) -> None:
    (config.parent / "ratchet.db").touch()
    assert "ratchet db upgrade" in refused("label", environment={"RATCHET_DATA": str(config.parent), "RATCHET_CONFIG": str(config)})


def test_a_data_folder_that_cannot_be_written_is_refused(tmp_path: Path, config: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot write" in refused("up", "--data", str(tmp_path / "file" / "data"), "--config", str(config))
