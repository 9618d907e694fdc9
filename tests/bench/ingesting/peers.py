"""What others do with the same events: MLflow's assessments, and Karapace where one is running. Part of `make bench-ingest`."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.bench.common.driving import Load, drive, wait_for
from tests.broker import free_port


@dataclass(frozen=True, kw_only=True)
class MlflowFigures:
    """MLflow's server under the load that the door gets."""

    single: Load
    alone: Load
    """One connection."""


def mlflow_assessments(seconds: float, *, connections: int) -> MlflowFigures:
    """Feedback on one trace over MLflow's own server (SQLite, one worker), with the requests its client sends and without the client."""
    with tempfile.TemporaryDirectory() as name, _mlflow(Path(name)) as (processes, port):
        trace = subprocess.run(
            [sys.executable, "-c", _TRACE, str(port)], capture_output=True, text=True, check=True
        ).stdout.strip().splitlines()[-1]  # fmt: skip
        path = f"/api/3.0/mlflow/traces/{trace}/assessments"
        drive(processes, port, path, batch=1, connections=4, seconds=1.0, form="mlflow")  # warm up
        alone = drive(processes, port, path, batch=1, connections=1, seconds=min(seconds, 3.0), form="mlflow")
        return MlflowFigures(
            alone=alone, single=drive(processes, port, path, batch=1, connections=connections, seconds=seconds, form="mlflow")
        )


@contextmanager
def _mlflow(folder: Path) -> Iterator[tuple[list[psutil.Process], int]]:
    port = free_port()
    command = [
        sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination",
        str(folder), "--port", str(port), "--workers", "1",
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for(f"http://127.0.0.1:{port}/health", folder / "log", timeout_s=180)
        yield [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)], port
    finally:
        for process in [*psutil.Process(server.pid).children(recursive=True), psutil.Process(server.pid)]:
            process.kill()
        server.wait()


_TRACE = """
import sys, mlflow
mlflow.set_tracking_uri(f"http://127.0.0.1:{sys.argv[1]}")
mlflow.set_experiment("bench")
with mlflow.start_span("turn") as span:
    pass
mlflow.flush_trace_async_logging()
print(span.trace_id)
"""


def karapace(seconds: float, *, connections: int) -> tuple[float, float] | None:
    """Single and batched events per CPU-second of Karapace's REST proxy at KARAPACE_REST (127.0.0.1:PORT), process KARAPACE_PID."""
    address, pid = os.environ.get("KARAPACE_REST", ""), os.environ.get("KARAPACE_PID", "")
    if not address or not pid:
        print("# no Karapace: it is not on PyPI; KARAPACE_REST=127.0.0.1:PORT and KARAPACE_PID name a running one", flush=True)
        return None
    processes, port = [psutil.Process(int(pid))], int(address.rpartition(":")[2])
    single = drive(processes, port, "/topics/ingest", batch=1, connections=connections, seconds=seconds, form="karapace")
    batch = drive(processes, port, "/topics/ingest", batch=100, connections=16, seconds=seconds, form="karapace")
    return single.rate.per_cpu_s, batch.rate.per_cpu_s
