"""`make bench-memory`: resident memory of a whole deployment with the real model: at rest, while people use it, while an update runs.

Memory is the proportional set size (what processes share is counted once) of every process of the deployment, Ray's own included.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from app import wiring
from app.domain.learning.cycles import CycleStatus
from pipelines.commands.demonstration.operator import Operator
from pipelines.commands.demonstration.profiles import PROFILES, write_config
from pipelines.commands.running.deployment import Deployment, check, plan, prepare_apart
from pipelines.supervisor import Program, Supervisor, owning

POLICY = "composer"
LOOK_EVERY_S = 2.0


def main() -> int:
    """Run the bench; the last line is JSON, in MB (10⁶ bytes)."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="the tiny model")
    options.add_argument("--minutes", type=float, default=6.0, help="give up after this long")
    given = options.parse_args()
    profile = "tiny" if given.quick else "smollm2"
    with tempfile.TemporaryDirectory(prefix="ratchet-bench-memory-") as folder:
        deployment = plan(data=Path(folder), config=write_config(PROFILES[profile], Path(folder), slot_s=30), port=None)
        check(deployment.settings)
        with owning(deployment.settings.data):
            prepare_apart(deployment)
            found = _measure(deployment, profile, deadline=time.monotonic() + given.minutes * 60)
    print(json.dumps(found))
    return 0 if found["update_peak_mb"] is not None else 1


def _measure(deployment: Deployment, profile: str, *, deadline: float) -> dict[str, object]:
    supervisor = Supervisor(deployment.programs(), logs=deployment.logs)
    operator, operations = Operator(deployment.url), wiring.open_operations(deployment.settings)
    how = PROFILES[profile]
    people = (
        sys.executable, "-m", "pipelines.simulation", "--url", deployment.url, "--policy", POLICY, "--max-tokens", str(how.max_tokens),
        "--horizons", how.horizons, "--concurrency", "32",
    )  # fmt: skip
    supervisor.add(Program(name="people", command=people, environment=deployment.environment))

    def cycles(status: CycleStatus) -> bool:
        return any(cycle.batch_id is not None and cycle.status is status for cycle in operations.cycles(POLICY))

    try:
        for program in deployment.programs():
            supervisor.start(program.name)
        _until(lambda: all(" ready " in _log(deployment, program.name) for program in deployment.programs()), deadline)
        rest = _total(_by_process(supervisor))
        supervisor.start("people")
        serving, updating = {}, {}
        while not cycles(CycleStatus.DONE) and time.monotonic() < deadline:
            now = _by_process(supervisor)
            if cycles(CycleStatus.RUNNING):
                updating = max(updating, now, key=_total)
            else:
                serving = max(serving, now, key=_total)
            time.sleep(LOOK_EVERY_S)
        return {
            "rest_mb": rest, "serving_peak_mb": _total(serving), "update_peak_mb": _total(updating) if updating else None,
            "at_that_peak_mb": dict(sorted(updating.items(), key=lambda item: -item[1])),
        }  # fmt: skip
    finally:
        operator.close()
        supervisor.stop()


def _until(claim: Callable[[], bool], deadline: float) -> None:
    while not claim() and time.monotonic() < deadline:
        time.sleep(0.5)


def _log(deployment: Deployment, name: str) -> str:
    path = deployment.logs / f"{name}.log"
    return path.read_text(errors="replace") if path.exists() else ""


def _by_process(supervisor: Supervisor) -> dict[str, int]:
    """MB by supervised process, each with its descendants; the training workers and the rest of Ray apart."""
    found: dict[str, int] = {}
    for name in supervisor.processes:
        pid = supervisor.pid(name)
        if pid is None or name == "people":
            continue
        try:
            family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
        for process in family:
            part = _part(name, process, pid)
            found[part] = found.get(part, 0) + _megabytes(process)
    return found


def _part(name: str, process: psutil.Process, pid: int) -> str:
    if process.pid == pid:
        return name
    try:
        return "training worker" if "TrainingWorker" in " ".join(process.cmdline()) else f"{name}'s helpers"
    except psutil.Error:
        return f"{name}'s helpers"


def _megabytes(process: psutil.Process) -> int:
    try:
        return round(process.memory_full_info().pss / 1e6)
    except psutil.Error:  # it ended this moment
        return 0


def _total(parts: Mapping[str, int]) -> int:
    return sum(parts.values())


if __name__ == "__main__":
    sys.exit(main())
