"""`ratchet prepare`, as production runs it before its processes: on both databases, and twice."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import psycopg
from sqlalchemy import create_engine, inspect, text

from app import wiring
from app.policy.tiny import write_tiny
from app.settings import from_environment
from pipelines.commands.running import deployment

CONFIG = """
[policies.composer]
model = "model"
base_name = "tiny"
base_model = "ratchet/tiny"
"""


def test_a_deployment_is_prepared_once_and_repeating_it_changes_nothing(database_url: str, tmp_path: Path) -> None:
    write_tiny(tmp_path / "model", seed=0)
    (tmp_path / "ratchet.toml").write_text(CONFIG)
    environment = os.environ | {
        "RATCHET_DATA": str(tmp_path / "data"), "RATCHET_CONFIG": str(tmp_path / "ratchet.toml"), "RATCHET_DATABASE_URL": database_url,
    }  # fmt: skip
    pointers = [(prepare(environment), pointer(database_url))[1] for _ in range(2)]
    assert pointers[0] == pointers[1]
    assert pointers[0][0] == "composer"


def asked(environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    """The command in a process of its own."""
    return subprocess.run([sys.executable, "-m", "pipelines", "prepare"], env=environment, capture_output=True, text=True, check=False)


def prepare(environment: dict[str, str]) -> None:
    """Runs the command, and it prepares."""
    done = asked(environment)
    assert (done.returncode, done.stdout) == (0, "ready: start the processes\n"), done.stderr


def refusal(environment: dict[str, str]) -> str:
    """Runs the command, and it refuses in one sentence."""
    done = asked(environment)
    (sentence,) = done.stderr.strip().splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    return sentence


def pointer(database_url: str) -> tuple[str, str, int]:
    """Policy, digest and generation of the one thing that is live."""
    engine = create_engine(database_url)
    with engine.connect() as connection:
        policy, digest, generation = connection.execute(text("SELECT policy, digest, generation FROM deployment_pointer")).one()
    engine.dispose()
    return policy, str(digest), generation


def test_another_base_model_in_the_configuration_is_no_version_until_somebody_releases_it(sqlite_url: str, tmp_path: Path) -> None:
    write_tiny(tmp_path / "model", seed=0)
    write_tiny(tmp_path / "other", seed=1)
    settings = from_environment({
        "RATCHET_DATA": str(tmp_path / "data"), "RATCHET_CONFIG": str(tmp_path / "ratchet.toml"), "RATCHET_DATABASE_URL": sqlite_url,
    })  # fmt: skip
    for config in (CONFIG, CONFIG.replace('"model"', '"other"')):
        (tmp_path / "ratchet.toml").write_text(config)
        deployment.prepare(settings)
    assert [version.digest for version in wiring.version_book(settings).of_policy("composer")] == [pointer(sqlite_url)[1]]


def test_a_deployment_that_runs_can_be_prepared_for_its_next_version(sqlite_url: str, tmp_path: Path) -> None:
    write_tiny(tmp_path / "model", seed=0)
    (tmp_path / "ratchet.toml").write_text(CONFIG)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as api:
        api.bind(("127.0.0.1", 0))
        api.listen()
        environment = os.environ | {
            "RATCHET_DATA": str(tmp_path / "data"), "RATCHET_CONFIG": str(tmp_path / "ratchet.toml"), "RATCHET_DATABASE_URL": sqlite_url,
            "RATCHET_PORT": str(api.getsockname()[1]),
        }  # fmt: skip
        prepare(environment)
    assert pointer(sqlite_url)[0] == "composer"


def test_a_second_deployment_on_the_places_of_the_first_is_refused_before_anything_is_live_there(tmp_path: Path) -> None:
    write_tiny(tmp_path / "model", seed=0)
    (tmp_path / "ratchet.toml").write_text(CONFIG)
    shared = {"RATCHET_CONFIG": str(tmp_path / "ratchet.toml")}
    shared |= {f"RATCHET_{name.upper()}": str(tmp_path / "bucket" / name) for name in ("segments", "weights")}
    first, second = (os.environ | shared | {"RATCHET_DATA": str(tmp_path / name)} for name in ("first", "second"))
    prepare(first)
    assert "belongs to another deployment" in refusal(second)
    engine = create_engine(f"sqlite:///{tmp_path / 'second' / 'ratchet.db'}")
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM deployment_pointer")).scalar() == 0
    engine.dispose()
    prepare(first)


def test_where_a_standby_is_required_and_missing_an_empty_database_stays_empty(postgres_server: str, tmp_path: Path) -> None:
    write_tiny(tmp_path / "model", seed=0)
    (tmp_path / "ratchet.toml").write_text(CONFIG)
    server = postgres_server.format("postgres").replace("+psycopg", "")
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute("CREATE DATABASE without_standby")
    url = postgres_server.format("without_standby")
    environment = os.environ | {
        "RATCHET_DATA": str(tmp_path / "data"), "RATCHET_CONFIG": str(tmp_path / "ratchet.toml"), "RATCHET_DATABASE_URL": url,
        "RATCHET_ACTOR_SALT": "s" * 40, "RATCHET_SESSION_SECRETS": "t" * 40, "RATCHET_STANDBY": "required",
    }  # fmt: skip
    assert "a commit waits for no standby" in refusal(environment)
    engine = create_engine(url)
    assert inspect(engine).get_table_names() == []
    engine.dispose()
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute("DROP DATABASE without_standby WITH (FORCE)")
