"""MLflow's server as infra/compose.yaml starts it, over PostgreSQL: our registry gets in, a stranger does not."""

import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from sqlalchemy import create_engine, text

from app.domain.errors import Unavailable
from app.registry.mlflow_registry import MlflowRegistry
from app.settings import Settings, from_environment
from pipelines.commands.examination import doors
from tests.broker import free_port
from tests.integration.release.test_registry import run, version
from tests.postgres import OPTIONS, running_postgres
from tests.real.parts import ROOT

pytestmark = pytest.mark.real
START_S = 240.0
COMPOSE = yaml.safe_load((ROOT / "infra" / "compose.yaml").read_text())


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    """An empty database for the server, in PostgreSQL on a TCP port; its URL as compose writes it."""
    port = free_port()
    with running_postgres(OPTIONS | {"listen_addresses": "127.0.0.1", "port": str(port)}) as url:
        engine = create_engine(f"{url.format('postgres')}&port={port}", isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text("CREATE DATABASE mlflow"))
            connection.execute(text("CREATE USER ratchet SUPERUSER"))
        engine.dispose()
        yield f"127.0.0.1:{port}/mlflow"


@contextmanager
def serving(folder: Path, database: str, known: Mapping[str, str], *, asks: bool = True) -> Iterator[str]:
    """The service `mlflow`, with its own words, environment and configuration; only places are this machine's."""
    service, port = COMPOSE["services"]["mlflow"], free_port()

    def here(said: str) -> str:
        for name, value in known.items():
            said = said.replace(f"${{{name}:?}}", value)
        return re.sub(r"@postgres/mlflow", f"@{database}", said)

    auth = folder / "mlflow_auth.ini"
    auth.write_text(here(COMPOSE["configs"]["mlflow_auth"]["content"]))
    own = {name: here(value) for name, value in service["environment"].items()} | {"MLFLOW_AUTH_CONFIG_PATH": str(auth)}
    places = {"--host": "127.0.0.1", "--port": str(port), "--artifacts-destination": str(folder / "artifacts"),
              "--allowed-hosts": f"127.0.0.1:{port},0.0.0.0:{port}"}  # fmt: skip
    words = [f"{name}={places.get(name, value)}" for name, _, value in (word.partition("=") for word in service["command"])]
    words = [word for word in words if asks or not word.startswith("--app-name")]
    log = folder / "log"
    with log.open("wb") as out:
        program = [sys.executable, str(Path(sys.executable).with_name("mlflow")), *service["entrypoint"][1:], *words]
        process = subprocess.Popen(program, env={**os.environ, **own}, cwd=folder, stdout=out, stderr=out, start_new_session=True)
    try:
        ends = time.monotonic() + START_S
        while not is_up(f"http://127.0.0.1:{port}/health"):
            if process.poll() is not None or time.monotonic() > ends:
                pytest.fail(f"the server did not come: {log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.5)
        yield f"http://0.0.0.0:{port}"
    finally:
        process.terminate()
        process.wait(timeout=30)


def is_up(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5.0).status_code == 200
    except httpx.TransportError:
        return False


def told(settings: Settings, uri: str) -> list[tuple[str, str]]:
    return [(found.state.value, found.says) for found in doors.tracking(replace(settings, mlflow_uri=uri))]


def test_the_server_of_compose_lets_our_registry_in_and_nobody_without_the_password(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"POSTGRES_PASSWORD": secrets.token_hex(12), "MLFLOW_PASSWORD": secrets.token_hex(12)}
    settings = from_environment({"RATCHET_DATA": str(tmp_path)})
    given: dict[str, Any] = COMPOSE["x-ratchet"]["environment"]
    with serving(tmp_path, database, known) as uri:
        assert told(settings, uri) == [("ok", f"MLflow at {uri} asks who comes")]
        with pytest.raises(Unavailable):
            MlflowRegistry(uri).register(version(1, "shut"), folder=tmp_path, run=None, card="")
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", given["MLFLOW_TRACKING_USERNAME"])
        monkeypatch.setenv(
            "MLFLOW_TRACKING_PASSWORD", given["MLFLOW_TRACKING_PASSWORD"].replace("${MLFLOW_PASSWORD:?}", known["MLFLOW_PASSWORD"])
        )
        registry = MlflowRegistry(uri, weights="s3://ratchet/weights")
        registry.register(version(1, "opened"), folder=tmp_path, run=run(1, "opened"), card="# card")
        assert registry.reconcile("opened", {"champion": version(1, "opened").digest})
        assert str(registry.client.get_registered_model("opened").aliases["champion"]) == "1"


def test_a_server_that_asks_nobody_is_told(database: str, tmp_path: Path) -> None:
    with serving(tmp_path, database, {"POSTGRES_PASSWORD": "x", "MLFLOW_PASSWORD": "y"}, asks=False) as uri:
        assert told(from_environment({"RATCHET_DATA": str(tmp_path)}), uri) == [("fail", f"MLflow at {uri} lets anybody in who reaches it")]
