"""A whole deployment on this machine: checked, prepared, then its processes as programs for the supervisor. Shared by `up` and `demo`.

Everything that can be refused is refused in `prepare`, before the first process exists.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from app import wiring
from app.domain.ids import utc_now
from app.settings import Settings, from_environment, models_folder, owner_of, read_toml
from pipelines.bootstrap import bootstrap
from pipelines.config import loop_config
from pipelines.evaluation.config import terms_of
from pipelines.preflight import ClaimedPort, choose_port, require_policies, require_space, require_writable
from pipelines.supervisor import Program

QUICKSTART = Path(__file__).parent / "quickstart.toml"
PROCESSES = ("broker", "api", "engine", "relay", "ingest", "label", "loop", "watch")
MAIN_PORT, ENGINE_PORT = 8400, 8401
BRINGING = {
    "smollm2-135m-instruct": ("fetch", "fetching the model SmolLM2-135M-Instruct, about 140 MB"),
    "tiny": ("tiny", "making the tiny random model"),
}
"""The models that `ratchet model` brings: its subcommand, and what that does."""
ENGINE_ROWS = "64"
"""Answers decoded together: more cost memory, fewer cost throughput (64 rows gave 1.4 times the tokens a second of 32)."""
QUIET = {
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "GOMP_SPINCOUNT": "5000",  # threads wait some microseconds for the next product, then sleep: engine and trainer share the cores
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's 15 starves an update beside a busy engine on the same cores
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """What is about to run."""

    settings: Settings
    environment: Mapping[str, str]
    """Of every process."""
    engine_port: int
    ports: tuple[ClaimedPort, ...] = ()
    """Kept from other deployments until this one is closed."""

    @property
    def url(self) -> str:
        """Address of the API and, under /console, of the pages."""
        return f"http://{self.settings.host}:{self.settings.port}"

    @property
    def logs(self) -> Path:
        """One file per process."""
        return self.settings.data / "logs"

    def close(self) -> None:
        """Give the ports back."""
        for port in self.ports:
            port.claim.close()

    def programs(self) -> list[Program]:
        """Every process, in the order of starting; no broker where a real cluster is named."""
        names = [name for name in PROCESSES if name != "broker" or self.settings.kafka_bootstrap is None]
        options = {"engine": ("--port", str(self.engine_port), "--rows", ENGINE_ROWS)}
        return [
            Program(name=name, command=ratchet(name, *options.get(name, ())), environment=with_own_metrics(self.environment, place))
            for place, name in enumerate(names)
        ]


def ratchet(*arguments: str) -> tuple[str, ...]:
    """The command line of a `ratchet` subcommand under this Python."""
    return (sys.executable, "-m", "pipelines", *arguments)


def plan(*, data: Path | None, config: Path | None, port: int | None) -> Deployment:
    """Settings from the environment and the options, with free ports for what nobody named; to be closed. Raises `BadConfig`."""
    given = environment(data=data, config=config)
    host = given.get("RATCHET_HOST") or "127.0.0.1"
    named = port or (int(given["RATCHET_PORT"]) if given.get("RATCHET_PORT", "").isdigit() else None)
    with ExitStack() as claims:
        main = choose_port(host, named or MAIN_PORT, insisted=named is not None)
        claims.callback(main.claim.close)
        engine = choose_port("127.0.0.1", ENGINE_PORT, insisted=False)
        claims.callback(engine.claim.close)
        given["RATCHET_PORT"] = str(main.number)
        given["RATCHET_ENGINES"] = given.get("RATCHET_ENGINES") or f"http://127.0.0.1:{engine.number}"
        deployment = Deployment(settings=from_environment(given), environment=given, engine_port=engine.number, ports=(main, engine))
        claims.pop_all()
    return deployment


def with_own_metrics(environment: Mapping[str, str], place: int) -> Mapping[str, str]:
    """The environment of one process among several of this machine: each shows its metrics at a port of its own."""
    host, _, port = environment.get("RATCHET_METRICS", "").rpartition(":")
    return {**environment, "RATCHET_METRICS": f"{host}:{int(port) + place}"} if host and port.isdigit() else environment


def environment(*, data: Path | None = None, config: Path | None = None) -> dict[str, str]:
    """What the processes of a deployment are told; the quickstart's configuration where none is named."""
    given = {**os.environ, **QUIET}
    if data is not None:
        given["RATCHET_DATA"] = str(data.resolve())
    if config is not None:
        given["RATCHET_CONFIG"] = str(config.resolve())
    elif not given.get("RATCHET_CONFIG"):
        given["RATCHET_CONFIG"] = str(QUICKSTART)
    return given


def check(settings: Settings) -> None:
    """Refuse what cannot work, in one sentence, before anything is made or started."""
    declared = wiring.load_policies(settings)
    loop_config(read_toml(settings.config))
    wiring.require_broker(settings)
    require_policies(declared, config=settings.config)
    require_space(settings.data)
    require_writable(settings.data)


def bring_models(deployment: Deployment, *, say: Callable[[str], None]) -> None:
    """Fetch or make the models that configurations name `ratchet:…` and that are not there yet, each in a process of its own."""
    wiring.require_broker(deployment.settings)  # what cannot run needs no model
    for policy in wiring.load_policies(deployment.settings).values():
        folder = Path(policy.model)
        if folder.parent == models_folder().resolve() and folder.name in BRINGING and not (folder / "READY").is_file():
            command, what = BRINGING[folder.name]
            say(f"{what} ({folder})")
            done = subprocess.run(ratchet("model", command, "--out", str(folder)), env=dict(deployment.environment), check=False)
            if done.returncode != 0:
                raise SystemExit(done.returncode)  # it has said why


def prepare_apart(deployment: Deployment) -> None:
    """`ratchet prepare` in a process of its own: what it imports (torch) would stay in the supervisor's memory for good."""
    deployment.logs.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(ratchet("prepare"), env=dict(deployment.environment), stdout=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise SystemExit(done.returncode)  # it has said why


def prepare(settings: Settings) -> None:
    """Make the database and the store ready: schema at this code's revision, every policy with a version that is live."""
    config = loop_config(read_toml(settings.config))
    wiring.refuse_one_machine(settings)
    wiring.upgrade_schema(settings)
    wiring.claim_places(settings)
    bootstrap(
        wiring.load_policies(settings), weights=wiring.open_weights(settings), versions=wiring.version_book(settings),
        releases=wiring.release_desk(settings, terms=terms_of(config.gates, owner=owner_of(settings.config))), clock=utc_now,
    )  # fmt: skip
