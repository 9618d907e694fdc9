"""The processes: a control plane beside the bridge, and in each region's namespace a gateway, an engine and people.

bridge 10.77.N.1 ── PostgreSQL, moto's S3, broker, relay, ingest
   ├── veth, tbf 20 Mbit/s each way ── namespace eu: api, engine, asker
   └── veth, tbf 20 Mbit/s each way ── namespace us: api, engine, asker
"""

import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from pipelines.commands.running.deployment import QUIET
from tests.bench.fleet.network import Network
from tests.broker import free_port, wait_for_port

ROOT = Path(__file__).resolve().parents[3]
SECRETS = ("RATCHET_ACTOR_SALT", "RATCHET_SESSION_SECRETS", "RATCHET_WEBHOOK_KEYS", "RATCHET_ENGINE_KEY")
GATEWAY, ENGINE = 8400, 8401
START_S = 240.0
"""Two slow cores import torch for every engine, beside whatever else runs."""
CONFIG = '[policies.composer]\nmodel = "{model}"\nbase_name = "tiny"\nbase_model = "ratchet/tiny"\n'


@dataclass(kw_only=True)
class Region:
    """One region, and what its people wrote down."""

    name: str
    address: str
    folder: Path
    answers: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    healths: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    people: "subprocess.Popen[bytes] | None" = None

    def first_of(self, version: str, since: float) -> float | None:
        """When an answer of this version was first asked for since then."""
        return next((said["at"] for said in list(self.answers) if said.get("version") == version and said["at"] >= since), None)

    def good(self, since: float, until: float) -> list[dict[str, Any]]:
        """Answers that were asked for in that time."""
        return [said for said in list(self.answers) if said["status"] == 200 and since <= said["at"] < until]


@dataclass(kw_only=True)
class Deployment:
    """All of it; `stop` ends what was started."""

    folder: Path
    network: Network
    database: str
    packages: Mapping[str, Path]
    """Folders with moto and s3fs."""
    regions: dict[str, Region] = field(default_factory=dict[str, Region])
    _started: "list[subprocess.Popen[bytes]]" = field(default_factory=list["subprocess.Popen[bytes]"])
    _environment: dict[str, str] = field(default_factory=dict[str, str])
    _key: str = ""

    def prepare(self, model: Path) -> None:
        """Object storage, configuration, schema and the first version."""
        (self.folder / "logs").mkdir(parents=True)
        (self.folder / "ratchet.toml").write_text(CONFIG.format(model=model))
        url = self._object_storage()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RATCHET_", "AWS_"))}
        self._environment = {
            **kept, **QUIET, **{name: secrets.token_hex(24) for name in SECRETS}, "OMP_NUM_THREADS": "1", "RUST_LOG": "error",
            "RATCHET_CONFIG": str(self.folder / "ratchet.toml"), "RATCHET_DATABASE_URL": self.database,
            "RATCHET_WEIGHTS": "s3://ratchet/weights", "RATCHET_SEGMENTS": "s3://ratchet/segments", "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "ratchet", "AWS_SECRET_ACCESS_KEY": secrets.token_hex(16), "AWS_DEFAULT_REGION": "us-east-1",
            "PYTHONPATH": f"{ROOT}:{self.packages['s3']}", "RATCHET_DATA": str(self.folder / "control"),
        }  # fmt: skip
        self._command("prepare")
        self._key = self._command("keys", "create", "--name", "bench", "--scope", "admin", "--break-glass").split()[0]

    @property
    def environment(self) -> Mapping[str, str]:
        """Of whoever acts in the control plane."""
        return self._environment

    def start_control_plane(self) -> None:
        """Broker, relay and ingest."""
        port = free_port()
        self._start("broker", [], "broker", "--port", str(port))
        wait_for_port(port)
        for process in ("relay", "ingest"):
            self._start(process, [], process)

    def join(self, name: str, *, rate: str) -> Region:
        """A namespace with a narrow line."""
        address = self.network.join(name)
        self.network.narrow(name, rate)
        self.regions[name] = region = Region(name=name, address=address, folder=self.folder / name)
        return region

    def start_engine(self, region: Region) -> None:
        """The region's engine; who waits for it looks into the ledger."""
        self._in(region, "engine", "engine", "--host", region.address, "--port", str(ENGINE), "--rows", "8", "--threads", "1")

    def start_gateway(self, region: Region) -> None:
        """The region's gateway, ready."""
        self._in(region, "api", "api")
        self._until(lambda: self._reached(region, f"http://{region.address}:{GATEWAY}/status"), f"the gateway of {region.name}")

    def start_people(self, region: Region) -> None:
        """They ask from now on."""
        inside = self.network.inside(region.name)
        command = [*inside, sys.executable, "-m", "tests.bench.regional.asker", f"http://{region.address}:{GATEWAY}"]
        region.people = subprocess.Popen(
            command, cwd=ROOT, env={**self._environment, "RATCHET_KEY": self._key}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._started.append(region.people)
        threading.Thread(target=self._write_down, args=(region,), daemon=True).start()

    def look_at_engine(self, region: Region) -> dict[str, Any]:
        """`/health` of a region's engine, asked from inside."""
        return json.loads(self._inside(region, f"http://{region.address}:{ENGINE}/health") or "{}")

    def stop_people(self) -> None:
        """They finish what they are at."""
        for region in self.regions.values():
            if region.people is not None and region.people.stdin is not None:
                region.people.stdin.close()
                region.people.wait(60)

    def stop(self) -> None:
        """Kill what is left."""
        for process in reversed(self._started):
            if process.poll() is None:
                process.kill()
                process.wait()

    def ends_of_logs(self) -> str:
        """For whoever looks for a fault."""
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-1200:]}" for log in sorted((self.folder / "logs").iterdir()))

    def lines_of(self, name: str, word: str) -> list[str]:
        """Lines of a log with a word in them."""
        return [line for line in (self.folder / "logs" / f"{name}.log").read_text(errors="replace").splitlines() if word in line]

    def _write_down(self, region: Region) -> None:
        assert region.people is not None
        assert region.people.stdout is not None
        for line in region.people.stdout:
            said = json.loads(line)
            (region.healths if "health" in said else region.answers).append(said)

    def _object_storage(self) -> str:
        port = free_port()
        command = [sys.executable, "-m", "tests.bench.training_cluster.bucket", self.network.outside, str(port)]
        with (self.folder / "logs" / "moto.log").open("ab") as log:
            path = f"{ROOT}:{self.packages['moto']}"
            self._started.append(subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": path}))
        wait_for_port(port, host=self.network.outside)
        url = f"http://{self.network.outside}:{port}"
        httpx.put(f"{url}/ratchet", trust_env=False).raise_for_status()
        return url

    def _in(self, region: Region, process: str, *arguments: str) -> None:
        own = {
            "RATCHET_REGION": region.name, "RATCHET_DATA": str(region.folder), "RATCHET_HOST": region.address,
            "RATCHET_PORT": str(GATEWAY), "RATCHET_ENGINES": f"http://{region.address}:{ENGINE}",
        }  # fmt: skip
        self._start(f"{region.name}-{process}", self.network.inside(region.name), *arguments, **own)

    def _start(self, name: str, inside: Sequence[str], *arguments: str, **own: str) -> None:
        with (self.folder / "logs" / f"{name}.log").open("ab") as log:
            self._started.append(subprocess.Popen(
                [*inside, sys.executable, "-m", "pipelines", *arguments], cwd=ROOT, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                env={**self._environment, **own},
            ))  # fmt: skip

    def _command(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "pipelines", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=self._environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"ratchet {' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()[-1500:]}")
        return done.stdout

    def _reached(self, region: Region, url: str) -> bool:
        try:
            return httpx.get(url, timeout=2.0, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def _inside(self, region: Region, url: str) -> str:
        ask = "import sys, urllib.request; sys.stdout.write(urllib.request.urlopen(sys.argv[1], timeout=10).read().decode())"
        command = [*self.network.inside(region.name), sys.executable, "-c", ask, url]
        return subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": os.environ["PATH"]}).stdout

    def _until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_S
        while not holds():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} is not ready after {START_S:g} s:\n{self.ends_of_logs()}")
            time.sleep(0.1)
