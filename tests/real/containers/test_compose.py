"""infra/compose.yaml with its standby, brought up as a whole, used, and robbed of its database. What is replaced: `composed.py` says."""

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import yaml

from pipelines.commands.demonstration.profiles import PROFILES, write_config
from tests.bench.fleet.people import People
from tests.real.containers.composed import FILES, INFRA, ONCE, Composed, until
from tests.real.containers.podman import logs, podman
from tests.real.parts import ROOT

pytestmark = [pytest.mark.real, pytest.mark.machine, pytest.mark.timeout(1800)]
START_S, LEARNT_S = 300.0, 420.0
TURNS = 300
MODEL = "/models/smollm2-135m-instruct"
WRITES_S = 30.0
LIST = """
import pyarrow.fs as fs
files, bucket = fs.FileSystem.from_uri("s3://ratchet")
print(*(file.path for file in files.get_file_info(fs.FileSelector(bucket, recursive=True))))
"""


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Composed]:
    """Laid out and taken down."""
    folder = tmp_path_factory.mktemp("composed")
    profile = replace(PROFILES["tiny"], model=MODEL, min_turns=64, max_turns=96)
    shipped = (INFRA / "ratchet.toml").read_text()
    config = write_config(profile, folder, slot_s=20).read_text() + "\n" + shipped[shipped.index("[kafka]") :]
    asked = [line for line in config.splitlines() if line.partition(" ")[0] not in ("security", "sasl_mechanism", "username")]
    config = "\n".join(asked).replace("[kafka]", "[kafka]\npartitions = 4")  # as many as the broker in Kafka's place gives a topic
    made = Composed(folder=folder / "infra")
    made.lay_out(config)
    for path in (folder, made.folder, *made.folder.rglob("*")):  # whoever is in a container is not this user
        path.chmod(0o755 if path.is_dir() or path.suffix == ".sh" else 0o644)
    try:
        yield made
    finally:
        made.down()


@pytest.fixture(scope="module")
def key(composed: Composed) -> str:
    """The first start as infra/README.md tells it; a key that may do everything."""
    composed.begin()
    ops, prometheus = (
        composed.compose("run", "--rm", "--no-deps", "api", "keys", "create", "--break-glass", "--name", name, "--scope", scope).stdout
        for name, scope in (("ops", "admin"), ("prometheus", "read"))
    )
    composed.keep_secret(METRICS_KEY=key_in(prometheus))
    composed.compose("up", "-d", "--no-deps", "prometheus")
    return key_in(ops)


def key_in(said: str) -> str:
    """The key among what was printed."""
    return next(word for word in said.split() if word.startswith("rk_"))


@pytest.fixture(scope="module")
def client(composed: Composed, key: str) -> Iterator[httpx.Client]:
    """The service, when everything that it leans on is well."""
    with httpx.Client(
        base_url=f"http://127.0.0.1:{composed.port}", headers={"Authorization": f"Bearer {key}"}, timeout=60.0, trust_env=False
    ) as opened:

        def well() -> bool:
            try:
                return opened.get("/health").status_code == 200
            except httpx.TransportError:
                return False

        try:
            until("a healthy service", START_S, well)
        except AssertionError:
            raise AssertionError(f"{composed.states()}\n{logs(composed.container('api'))[-2000:]}") from None
        yield opened


def test_every_service_of_both_files_runs(composed: Composed, client: httpx.Client) -> None:
    named = {name for file in FILES for name in yaml.safe_load((INFRA / file).read_text())["services"]}
    states = composed.states()
    assert states.keys() == named
    assert {name for name, state in states.items() if state == "exited"} == set(ONCE)
    assert {state for name, state in states.items() if name not in ONCE} == {"running"}, states
    before = composed.restarts()
    time.sleep(15)
    assert composed.restarts() == before, "somebody starts again and again"


def test_mlflow_lets_in_whoever_has_the_password_and_nobody_else(composed: Composed, client: httpx.Client) -> None:
    asking = "import httpx, os; print(httpx.get('http://mlflow:5000/api/2.0/mlflow/experiments/search?max_results=1'{}).status_code)"
    known = asking.format(", auth=('ratchet', os.environ['MLFLOW_TRACKING_PASSWORD'])")
    until("MLflow", 120.0, lambda: inside(composed, known, check=False) == "200\n")
    assert inside(composed, asking.format("")) == "401\n"


def test_the_demos_product_is_learned_from_over_postgresql_kafka_s3_and_mlflow(composed: Composed, client: httpx.Client, key: str) -> None:
    told = subprocess.run(
        [sys.executable, "-m", "pipelines.simulation", "--url", str(client.base_url), "--api-key", key, "--turns", str(TURNS),
         "--concurrency", "12", "--max-tokens", "24", "--horizons", "0,0.7"], cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr[-2000:]
    assert "refused" not in told.stderr, told.stderr[-2000:]

    def learnt() -> list[str]:
        found = client.get("/v1/versions", params={"policy": "composer"}).raise_for_status().json()["data"]
        return [version["digest"] for version in found if version["parent"] is not None]

    (digest, *_) = until("a candidate", LEARNT_S, learnt)
    kept = inside(composed, LIST)
    assert any(digest in path for path in kept.split())
    assert any(path.startswith("ratchet/segments/") for path in kept.split())
    tracked = "import mlflow; print(*(v.tags for v in mlflow.MlflowClient('http://mlflow:5000').search_model_versions()))"
    until("the candidate in MLflow", 120.0, lambda: digest in inside(composed, tracked))


def inside(composed: Composed, code: str, *, check: bool = True) -> str:
    """What Python says in the container of the loop."""
    return podman("exec", composed.container("loop"), "python", "-c", code, check=check).stdout


def test_prometheus_reads_every_process(composed: Composed, client: httpx.Client) -> None:
    def up() -> bool:
        told = httpx.get(f"http://127.0.0.1:{composed.prometheus_port}/api/v1/targets", timeout=10.0, trust_env=False).json()
        health = {target["labels"]["job"]: (target["health"], target["lastError"]) for target in told["data"]["activeTargets"]}
        return len(health) == 7 and {state for state, _ in health.values()} == {"up"}

    until("every target", 60.0, up)


def test_the_standby_takes_over_and_nothing_that_was_acknowledged_is_lost(
    composed: Composed, client: httpx.Client, key: str, tmp_path: Path
) -> None:
    """By hand, as the overlay says: the primary is gone, the standby is promoted and, being alone now, told to wait for nobody."""
    people = People(key=key, people=3, retries=0, keeps_s=90.0)
    people.add(str(client.base_url).rstrip("/"))
    people.start()
    time.sleep(5)
    people.phase, began = "failover", time.monotonic()
    podman("rm", "--force", "--time", "0", composed.container("postgres"))  # nothing starts it again: its machine is gone
    for statement in ("SELECT pg_promote()", "ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()"):
        podman("exec", composed.container("standby"), "psql", "-h", "/tmp", "-U", "ratchet", "-d", "postgres", "-qc", statement)
    until("a write", 3 * WRITES_S, lambda: any(at > began + 1 for at in list(people.book.accepted)))
    took = min(at for at in people.book.accepted if at > began + 1) - began
    time.sleep(3)
    people.stop()
    assert people.book.failed == []
    assert took <= WRITES_S
    ids = "\n".join([*people.book.answers, *people.book.said])
    command = "cat > /tmp/ids && until ratchet recover acknowledged /tmp/ids; do sleep 1; n=$((n+1)); [ $n -lt 60 ] || exit 1; done"
    checked = subprocess.run(
        ["podman", "exec", "-i", composed.container("loop"), "sh", "-c", command], input=ids, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout[-1000:] + checked.stderr[-1000:]
    assert f"0 of {len(people.book.answers) + len(people.book.said)} acknowledged" in checked.stderr
