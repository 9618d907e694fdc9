"""`ratchet doctor` asks what a deployment leans on as a stranger would.

`0.0.0.0` is this machine by a name that says nothing of loopback.
"""

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from sqlalchemy import create_engine, text

from app import wiring
from app.domain.errors import Unavailable
from app.listening.barrier import Barrier
from app.policy.storage.store import LocalWeights
from app.settings import Settings, from_environment
from pipelines.commands.examination import doors
from pipelines.commands.examination.findings import Finding
from pipelines.commands.running.engine_ports import engine_key
from tests.broker import free_port
from tests.integration.serving.running import engine as running_engine
from tests.integration.serving.running import request
from tests.postgres import OPTIONS, running_postgres
from tests.secured_broker import Guard, guarded_broker

PASSWORD, KEY = "a password", "a key of the test"


@pytest.fixture
def settings(tmp_path: Path, migrated: Callable[[Settings], None]) -> Settings:
    made = from_environment({"RATCHET_DATA": str(tmp_path / "data")})
    made.data.mkdir()
    migrated(made)
    return replace(made, engines=())


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """PostgreSQL by TCP: asks everybody for a password but the user `anybody`."""
    port = free_port()
    with tempfile.NamedTemporaryFile("w", prefix="ratchet-hba-") as rules:
        rules.write("local all all trust\nhost all anybody all trust\nhost all all all scram-sha-256\n")
        rules.flush()
        Path(rules.name).chmod(0o644)  # the server runs as somebody else
        with running_postgres(OPTIONS | {"listen_addresses": "127.0.0.1", "port": str(port), "hba_file": rules.name}) as url:
            engine = create_engine(f"{url.format('postgres')}&port={port}")
            with engine.begin() as connection:
                for user in ("somebody", "anybody"):
                    connection.execute(text(f"CREATE USER {user} PASSWORD '{PASSWORD}'"))
            engine.dispose()
            yield f"postgresql+psycopg://{{}}:{PASSWORD}@0.0.0.0:{port}/postgres"


def states(found: Iterator[Finding]) -> list[str]:
    return [finding.state.value for finding in found]


def test_a_deployment_on_one_machine_has_no_door_to_ask_at(settings: Settings) -> None:
    (found,) = doors.doors(settings)
    assert (found.state.value, found.says) == ("ok", "everything that this deployment leans on is on this machine alone")


def test_an_engine_with_a_key_answers_nobody_without_it(settings: Settings, tiny_model: Path, tmp_path: Path) -> None:
    store = LocalWeights(tmp_path / "weights")
    digest = store.publish(tiny_model)
    named = Barrier(hosts=frozenset({"0.0.0.0"}))
    with running_engine(store, digest, barrier=named, key=KEY) as shut, running_engine(store, digest, barrier=named) as opened:
        urls = tuple(one.url.replace("127.0.0.1", "0.0.0.0") for one in (shut, opened))
        found = list(doors.engines(replace(settings, engines=urls)))
        body = {"content": b"{}", "headers": {"content-type": "application/json"}}
        refused = [httpx.post(f"{shut.url}/{path}", **body) for path in ("generate", "count", "score")]  # type: ignore[arg-type]
        refused += [httpx.get(f"{shut.url}/versions", headers={"authorization": said}) for said in ("", "Bearer another", KEY)]
        probes = [httpx.get(f"{shut.url}/{path}").status_code for path in ("health", "ready", "metrics")]
    assert [(one.state.value, one.says) for one in found] == [
        ("ok", f"the engine at {urls[0]} asks who comes"), ("fail", f"the engine at {urls[1]} lets anybody in who reaches it"),
    ]  # fmt: skip
    assert "RATCHET_ENGINE_KEY" in found[1].cure
    assert {answer.status_code for answer in refused} == {401}
    assert all("RATCHET_ENGINE_KEY" in answer.json()["error"]["message"] for answer in refused)
    assert probes == [200, 200, 200]


def test_a_gateway_that_holds_the_key_samples_and_one_that_does_not_is_told_the_cure(
    settings: Settings, tiny_model: Path, tmp_path: Path
) -> None:
    store = LocalWeights(tmp_path / "weights")
    digest = store.publish(tiny_model)

    async def answered(key: str | None) -> object:
        async with wiring.open_engines(replace(settings, engines=(running.url,), engine_key=key)) as engines:
            return [chunk async for chunk in engines.generate(request(digest))][-1].finish_reason

    with running_engine(store, digest, key=KEY) as running:
        assert asyncio.run(answered(KEY)) is not None
        for key in ("another", None):
            with pytest.raises(Unavailable, match="asks for a key: set RATCHET_ENGINE_KEY"):
                asyncio.run(answered(key))


@pytest.mark.parametrize(
    ("host", "needs"), [("127.0.0.1", False), ("localhost", False), ("::1", False), ("0.0.0.0", True), ("engine", True)]
)
def test_an_engine_that_other_machines_reach_without_a_key_says_so(
    settings: Settings, host: str, needs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert engine_key(replace(settings, engine_key=KEY), host) == KEY
    assert caplog.text == ""
    assert engine_key(settings, host) is None
    assert ("set RATCHET_ENGINE_KEY" in caplog.text) is needs


def test_what_does_not_answer_is_told_and_is_neither_open_nor_shut(settings: Settings) -> None:
    gone = f"http://0.0.0.0:{free_port()}"
    both = replace(settings, engines=(gone, f"vllm+{gone}"), mlflow_uri=gone)
    assert states(doors.doors(both)) == ["warn", "warn", "warn"]
    assert all(gone in found.says and "could not be asked" in found.says for found in doors.doors(both))


@pytest.mark.parametrize(("user", "state"), [("somebody", "ok"), ("anybody", "fail")])
def test_a_database_that_lets_our_user_in_with_any_password_is_told(settings: Settings, server: str, user: str, state: str) -> None:
    url = server.format(user)
    assert states(doors.database(replace(settings, database_url=url, inbox_url=url))) == [state], "one server, one line"
    assert states(doors.database(replace(settings, inbox_url=url))) == [state]
    (found,) = doors.database(replace(settings, inbox_url=url.replace(PASSWORD, "wrong").replace("anybody", "somebody")))
    assert (found.state.value, PASSWORD in found.says) == ("warn", False)


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("sqlite:////data/ratchet.db", []), ("postgresql://u:p@/ratchet?host=/run/postgresql", []), ("postgresql://u:p@db/ratchet", ["db"]),
        ("postgresql://u:p@/ratchet?host=one:5432&host=two:5433", ["one", "two"]), ("postgresql://u:p@db:6000/ratchet", ["db"]),
    ],
)  # fmt: skip
def test_where_a_database_is_stands_in_its_address(url: str, hosts: list[str]) -> None:
    assert wiring.database_hosts(url) == hosts


def test_a_broker_that_takes_us_as_we_are_takes_everybody(settings: Settings, tmp_path: Path) -> None:
    with guarded_broker(Guard()) as address:
        elsewhere = f"0.0.0.0:{address.rpartition(':')[2]}"
        (found,) = doors.broker(replace(settings, kafka_bootstrap=elsewhere))
        assert states(doors.broker(replace(settings, kafka_bootstrap=address))) == []
    assert (found.state.value, found.says) == ("fail", f"the broker at {elsewhere} lets anybody in who reaches it")
    config = tmp_path / "ratchet.toml"
    config.write_text('[kafka]\nsecurity = "SASL_PLAINTEXT"\nsasl_mechanism = "PLAIN"\nusername = "ratchet"\n')
    asked = replace(settings, kafka_bootstrap=elsewhere, config=config, kafka_password=PASSWORD)
    assert states(doors.broker(asked)) == ["ok"]


@pytest.mark.parametrize(
    ("address", "mode", "found"),
    [
        ("", "", []), ("127.0.0.1:6379", "", []), ("head:6379", "", ["fail"]), ("ray://head:10001", "", ["fail"]),
        ("head:6379", "token", ["ok"]), ("head:6379", "disabled", ["fail"]),
    ],
)  # fmt: skip
def test_a_ray_cluster_that_is_joined_without_a_token_is_told(address: str, mode: str, found: list[str]) -> None:
    assert states(doors.ray({"RAY_ADDRESS": address, "RAY_AUTH_MODE": mode})) == found
