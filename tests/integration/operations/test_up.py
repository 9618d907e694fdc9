"""`ratchet up` on this machine: what its processes are told, what is refused before any of them exists, and who tells of a crash."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from app import wiring
from app.domain.errors import AlreadyRunning, BadConfig
from app.settings import from_environment
from pipelines.__main__ import ratchet
from pipelines.commands.demo import set_up
from pipelines.commands.demonstration.profiles import PROFILES, write_config
from pipelines.commands.demonstration.screen import Screen
from pipelines.commands.running.deployment import QUICKSTART, Deployment, environment, plan, with_own_metrics
from pipelines.commands.running.up import supervise
from pipelines.supervisor import Program, owning

ROOT = Path(__file__).resolve().parents[3]

CONFIG = '[policies.composer]\nmodel = "model"\nbase_name = "tiny"\nbase_model = "ratchet/tiny"\n'


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No setting of whoever runs the tests; SIGINT and SIGTERM as they were afterwards."""
    for name in [name for name in os.environ if name.startswith("RATCHET_")]:
        monkeypatch.delenv(name)
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.fixture
def planned(tmp_path: Path) -> Iterator[Callable[[], Deployment]]:
    """Plans a deployment, and another one beside it."""
    (tmp_path / "ratchet.toml").write_text(CONFIG)
    with ExitStack() as claims:
        yield lambda: claims.enter_context(closing(plan(data=tmp_path / "data", config=tmp_path / "ratchet.toml", port=None)))


def command_of(deployment: Deployment, name: str) -> str:
    return next(" ".join(program.command) for program in deployment.programs() if program.name == name)


def test_the_quickstart_names_the_model_that_make_model_brings() -> None:
    given = environment()
    assert given["RATCHET_CONFIG"] == str(QUICKSTART)
    assert wiring.load_policies(from_environment(given))["composer"].model == str(
        (ROOT / ".cache" / "models" / "smollm2-135m-instruct").resolve()
    )


def test_every_process_gets_the_same_folder_ports_that_are_free_and_no_question_from_a_library(
    tmp_path: Path, planned: Callable[[], Deployment]
) -> None:
    deployment = planned()
    assert [program.name for program in deployment.programs()] == ["broker", "api", "engine", "relay", "ingest", "label", "loop", "watch"]
    assert {program.environment["RATCHET_DATA"] for program in deployment.programs()} == {str(tmp_path / "data")}
    assert command_of(deployment, "engine") == f"{sys.executable} -m pipelines engine --port {deployment.engine_port} --rows 64"
    assert deployment.settings.engines == (f"http://127.0.0.1:{deployment.engine_port}",)
    assert deployment.url == f"http://127.0.0.1:{deployment.settings.port}"
    assert deployment.environment["MLFLOW_DISABLE_TELEMETRY"] == "true"
    beside = planned()
    assert {beside.settings.port, beside.engine_port}.isdisjoint({deployment.settings.port, deployment.engine_port})


def test_a_port_in_the_environment_is_insisted_on_and_engines_of_another_place_stay(
    planned: Callable[[], Deployment], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = planned()
    monkeypatch.setenv("RATCHET_ENGINES", "http://gpu-1:8401")
    monkeypatch.setenv("RATCHET_PORT", str(taken.settings.port))
    with pytest.raises(BadConfig, match="choose another with --port"):
        planned()
    monkeypatch.setenv("RATCHET_PORT", "0x")
    assert planned().settings.engines == ("http://gpu-1:8401",)


def test_no_broker_is_started_beside_a_cluster_and_metrics_have_a_port_each(
    planned: Callable[[], Deployment], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_KAFKA_BOOTSTRAP", "kafka:9092")
    monkeypatch.setenv("RATCHET_METRICS", "0.0.0.0:9100")
    programs = planned().programs()
    assert [(program.name, program.environment["RATCHET_METRICS"]) for program in programs[:3]] == [
        ("api", "0.0.0.0:9100"), ("engine", "0.0.0.0:9101"), ("relay", "0.0.0.0:9102")
    ]  # fmt: skip
    assert with_own_metrics({"RATCHET_METRICS": ""}, 3) == {"RATCHET_METRICS": ""}


def test_a_model_that_is_not_there_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "ratchet.toml").write_text(CONFIG)
    refused = CliRunner().invoke(ratchet, ["up", "--data", str(tmp_path / "data"), "--config", str(tmp_path / "ratchet.toml")])
    assert isinstance(refused.exception, BadConfig)
    assert "run `make model`" in str(refused.exception)
    assert not (tmp_path / "data").exists()


def test_a_folder_that_somebody_else_runs_on_is_refused_with_their_process(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "model").symlink_to(tiny_model)
    (tmp_path / "ratchet.toml").write_text(CONFIG)
    up = ["up", "--data", str(tmp_path / "data"), "--config", str(tmp_path / "ratchet.toml")]
    with owning(tmp_path / "data"):
        refused = CliRunner().invoke(ratchet, up)
    assert isinstance(refused.exception, AlreadyRunning)
    assert f"process {os.getpid()} already runs on" in str(refused.exception)


def test_a_preparation_that_fails_ends_up_with_its_exit_code_and_no_process(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "model").symlink_to(tiny_model)
    (tmp_path / "ratchet.toml").write_text(CONFIG)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "ratchet.db").write_text("no database at all, and long enough to be taken for one by nobody" * 20)
    ended = CliRunner().invoke(ratchet, ["up", "--data", str(tmp_path / "data"), "--config", str(tmp_path / "ratchet.toml")])
    assert isinstance(ended.exception, SystemExit), "it has said why itself"
    assert ended.exit_code in (1, 2)
    assert "API and console" not in ended.output
    assert list((tmp_path / "data" / "logs").iterdir()) == []


@dataclass(frozen=True, kw_only=True)
class Played(Deployment):
    """Two processes: one that stays, one that ends at once."""

    def programs(self) -> list[Program]:
        """By name."""
        commands = {"api": "exec sleep 600", "relay": "echo started; exit 3"}
        return [Program(name=name, command=("/bin/sh", "-c", text), environment=self.environment) for name, text in commands.items()]


def test_a_crash_is_told_with_its_log_and_ctrl_c_ends_everything(
    planned: Callable[[], Deployment], capsys: pytest.CaptureFixture[str]
) -> None:
    deployment = planned()
    deployment.logs.mkdir(parents=True)

    def ctrl_c_after_the_second_start() -> None:
        while not (deployment.logs / "relay.log").exists() or (deployment.logs / "relay.log").read_text().count("started") < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=ctrl_c_after_the_second_start, daemon=True).start()
    supervise(Played(settings=deployment.settings, environment=deployment.environment, engine_port=1))
    told = capsys.readouterr().err.splitlines()
    assert told[0] == f"ratchet: relay ended (exit code 3); it is started again in 0.5 s (log: {deployment.logs}/relay.log)"
    assert not [child for child in psutil.Process().children() if "sleep" in child.cmdline()]


# --- the demo, until its processes start -----------------------------------------------------------------------------------


def test_the_demo_measures_prepares_and_fits_its_configuration_to_what_it_found(tmp_path: Path, tiny_model: Path) -> None:
    screen = Screen(title="t", url="")
    profile = replace(PROFILES["tiny"], model=str(tiny_model))
    config = write_config(profile, tmp_path, slot_s=20)
    with closing(plan(data=tmp_path, config=config, port=None)) as deployment:
        stage = set_up(profile, deployment, slot_s=20, screen=screen)
    settings = stage.deployment.settings
    assert wiring.release_ledger(settings).pointer("composer").generation == 1
    assert screen.url == stage.deployment.url
    written = (tmp_path / "ratchet.toml").read_text()
    assert f"min_turns = {stage.plan.profile.min_turns}\n" in written
    assert f"threads = {stage.speed.training_threads} " in written.replace("\n", " ")
    assert "slot_s = 20\n" in written


@pytest.mark.parametrize(("slot", "said"), [("soon", "--slot is 'soon'"), ("1s", "give at least 5s")])
def test_a_slot_of_the_demo_that_is_none_is_refused_before_anything_starts(tmp_path: Path, slot: str, said: str) -> None:
    refused = CliRunner().invoke(ratchet, ["demo", "--model", "tiny", "--data", str(tmp_path / "data"), "--slot", slot])
    assert isinstance(refused.exception, BadConfig)
    assert said in str(refused.exception)
    assert not (tmp_path / "data" / "ratchet.db").exists()
