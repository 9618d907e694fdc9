"""`make bench-cycle`: cycles of a real deployment with the tiny model and simulated people, and what a cycle costs besides computing.

Everything is the production path: slots elected in the database, Ray, MLflow, the offline gate through the engine, canaries, approvals over
REST. Overhead of a cycle = its wall time − the trainer's compute − the offline suites (sampling and grading).
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from app import wiring
from app.domain.cycles import Cycle, CycleStatus
from app.domain.ids import utc_now
from app.domain.releases import ReleaseState
from pipelines.commands.demonstration.operator import Operator
from pipelines.commands.demonstration.profiles import PROFILES, write_config
from pipelines.commands.demonstration.sight import look
from pipelines.commands.deployment import Deployment, check, plan, prepare_apart
from pipelines.supervisor import Program, Supervisor, owning

POLICY = "composer"


def main() -> int:
    """Run the bench; the last line is JSON."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--cycles", type=int, default=10)
    options.add_argument("--quick", action="store_true", help="two cycles")
    options.add_argument("--minutes", type=float, default=15.0, help="give up after this long")
    given = options.parse_args()
    wanted = 2 if given.quick else given.cycles
    with tempfile.TemporaryDirectory(prefix="ratchet-bench-cycle-") as folder:
        deployment = _prepared(Path(folder))
        with owning(deployment.settings.data):
            done = _run(deployment, wanted, deadline=time.monotonic() + given.minutes * 60)
            compute = {c.run_id: _compute_s(deployment, c) for c in done}
    print(json.dumps(_summary(done, compute)))
    return 0 if len(done) >= wanted else 1


def _prepared(folder: Path) -> Deployment:
    profile = replace(PROFILES["tiny"], min_turns=64)
    deployment = plan(data=folder, config=write_config(profile, folder, slot_s=10), port=None)
    check(deployment.settings)
    prepare_apart(deployment)
    return deployment


def _run(deployment: Deployment, wanted: int, *, deadline: float) -> list[Cycle]:
    """Keep the deployment busy until enough cycles are done, approving what is READY."""
    profile = PROFILES["tiny"]
    supervisor = Supervisor(deployment.programs(), logs=deployment.logs)
    operator = Operator(deployment.url)
    operations = wiring.open_operations(deployment.settings)
    people = (
        sys.executable, "-m", "pipelines.simulation", "--url", deployment.url, "--policy", POLICY, "--max-tokens", str(profile.max_tokens),
        "--horizons", profile.horizons, "--concurrency", str(profile.concurrency),
    )  # fmt: skip
    supervisor.add(Program(name="people", command=people, environment=deployment.environment))
    try:
        supervisor.start_all()
        done: list[Cycle] = []
        while len(done) < wanted and time.monotonic() < deadline:
            time.sleep(1.0)
            supervisor.check()
            if not operator.is_well():
                continue
            sight = look(operations, POLICY, utc_now())
            for release in sight.releases:
                if release.state is ReleaseState.READY:
                    operator.approve(release)
            finished = [c for c in sight.cycles if c.status is CycleStatus.DONE and c.finished_at is not None]
            if len(finished) > len(done):
                print(f"{len(finished)} of {wanted} cycles", file=sys.stderr)
            done = finished
        return done
    finally:
        operator.close()
        supervisor.stop()


def _compute_s(deployment: Deployment, cycle: Cycle) -> float:
    run = wiring.run_store(deployment.settings).get(cycle.run_id or "")
    return float(run.metrics.get("compute_s", 0.0)) if run is not None else 0.0


def _summary(done: list[Cycle], compute: dict[str | None, float]) -> dict[str, object]:
    stages: dict[str, list[float]] = defaultdict(list)
    walls: list[float] = []
    overheads: list[float] = []
    for cycle in done:
        assert cycle.finished_at is not None
        wall = (cycle.finished_at - cycle.started_at).total_seconds()
        walls.append(wall)
        overheads.append(wall - compute[cycle.run_id] - cycle.timings.get("judge", 0.0))
        for stage, seconds in cycle.timings.items():
            stages[stage].append(seconds)
    if not walls:
        return {"cycles": 0, "cycle_s_p50": None, "cycle_s_p95": None, "overhead_s_p50": None, "stages_s": {}}
    p95 = sorted(walls)[min(len(walls) - 1, round(0.95 * (len(walls) - 1)))]
    return {
        "cycles": len(done), "cycle_s_p50": round(statistics.median(walls), 2), "cycle_s_p95": round(p95, 2),
        "overhead_s_p50": round(statistics.median(overheads), 2),
        "stages_s": {stage: round(statistics.median(seconds), 2) for stage, seconds in stages.items()},
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
