"""`make bench-cycle`: cycles of a real deployment with the tiny model and simulated people, and what a cycle costs besides computing.

Everything is the production path: slots elected in the database, Ray, MLflow, the offline gate through the engine, canaries, approvals over
REST. Overhead of a cycle = its wall time − the trainer's compute − the offline suites' answering and grading, as the loop's log gives them:
opening the release, waiting for an engine to hold the candidate, the other gates, statistics and records all count as overhead.
`overhead_with_suites_s_p50` subtracts the trainer's compute only. Exit code 1 where there are too few cycles or the overhead is above 2 s.
"""

import argparse
import contextlib
import json
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from app import wiring
from app.domain.errors import Refused
from app.domain.ids import utc_now
from app.domain.learning.cycles import Cycle, CycleStatus
from app.domain.release.releases import ReleaseState
from pipelines.commands.demonstration.operator import Operator
from pipelines.commands.demonstration.profiles import PROFILES, write_config
from pipelines.commands.demonstration.sight import look
from pipelines.commands.running.deployment import Deployment, check, plan, prepare_apart
from pipelines.supervisor import Program, Supervisor, owning

POLICY = "composer"
BOUND_S = 2.0
"""Of the median overhead of a cycle."""
ANSWERED = re.compile(r"event=suites_answered versions=\w+,(\w+) .*\bseconds=([\d.]+)")


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
            answering = suite_seconds((deployment.logs / "loop.log").read_text())
            costs = [_costs(deployment, cycle, answering) for cycle in done]
    found = summary(costs)
    for sentence in missed(found, wanted):
        print(f"# missed: {sentence}", flush=True)
    print(json.dumps(found))
    return 1 if missed(found, wanted) else 0


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Where a cycle's seconds went."""

    wall_s: float
    compute_s: float
    """The trainer's."""
    suites_s: float
    """Answering and grading."""
    stages_s: Mapping[str, float]


def suite_seconds(log: str) -> Mapping[str, float]:
    """What answering and grading took, by candidate."""
    found: defaultdict[str, float] = defaultdict(float)
    for candidate, seconds in ANSWERED.findall(log):
        found[candidate] += float(seconds)
    return found


def missed(found: dict[str, Any], wanted: int) -> list[str]:
    """The bounds that do not hold, a sentence each."""
    sentences = [f"{found['cycles']} cycles of {wanted}"] if found["cycles"] < wanted else []
    overhead = found["overhead_s_p50"]
    return sentences + ([] if overhead is not None and overhead <= BOUND_S else [f"overhead_s_p50 is {overhead}, above {BOUND_S}"])


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
                    with contextlib.suppress(Refused):  # the release moved on, or the service was away: asked again in a second
                        operator.approve(release)
            finished = [c for c in sight.cycles if c.status is CycleStatus.DONE and c.finished_at is not None]
            if len(finished) > len(done):
                print(f"{len(finished)} of {wanted} cycles", file=sys.stderr)
            done = finished
        return done
    finally:
        operator.close()
        supervisor.stop()


def _costs(deployment: Deployment, cycle: Cycle, answering: Mapping[str, float]) -> Costs:
    run = wiring.run_store(deployment.settings).get(cycle.run_id or "")
    assert run is not None
    assert cycle.finished_at is not None
    return Costs(
        wall_s=(cycle.finished_at - cycle.started_at).total_seconds(), compute_s=float(run.metrics["compute_s"]),
        suites_s=answering[run.candidate or ""], stages_s=cycle.timings,
    )  # fmt: skip


def summary(costs: Sequence[Costs]) -> dict[str, Any]:
    """The line of JSON."""
    if not costs:
        return {"cycles": 0, "cycle_s_p50": None, "cycle_s_p95": None, "overhead_s_p50": None, "overhead_with_suites_s_p50": None}
    stages: dict[str, list[float]] = defaultdict(list)
    for cost in costs:
        for stage, seconds in cost.stages_s.items():
            stages[stage].append(seconds)
    walls = sorted(cost.wall_s for cost in costs)
    besides = [cost.wall_s - cost.compute_s for cost in costs]
    return {
        "cycles": len(costs), "cycle_s_p50": round(statistics.median(walls), 2),
        "cycle_s_p95": round(walls[round(0.95 * (len(walls) - 1))], 2),
        "overhead_s_p50": round(statistics.median(rest - cost.suites_s for rest, cost in zip(besides, costs, strict=True)), 2),
        "overhead_with_suites_s_p50": round(statistics.median(besides), 2),
        "stages_s": {stage: round(statistics.median(seconds), 2) for stage, seconds in stages.items()},
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
