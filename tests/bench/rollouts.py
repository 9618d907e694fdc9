"""`make bench-rollouts`: boxes, rollouts and their grades against bounds, beside plain `subprocess` and the sandboxes that install here.

    python -m tests.bench.rollouts --quick      within 55 s on two idle cores; smaller numbers of everything

Everything real but the model: boxes, gateway, book, grades; answers come from a script. Excluded: an engine's own time, and Ray's sandbox,
which needs a newer mkfs.erofs than Debian has. Peers that are not installed are named. The last line is JSON; exit code 1 where a bound is
broken.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from app.domain.learning.boxes import BoxSpec, Limits
from app.sandbox import control_groups
from app.sandbox.bubblewrap import USERS_FROM, BubblewrapBoxes
from app.sandbox.runtime import shared_folder
from pipelines.rollouts.grading import Grader, Verdict
from pipelines.rollouts.tasksets.feature_deletion import FeatureDeletion
from pipelines.rollouts.tasksets.small_functions import SmallFunctions
from tests.architecture.sources import ROOT
from tests.bench.rollouts_driving import killed, live, paced, straggling

BOUNDS: dict[str, tuple[str, float]] = {
    "exec_p99_ms": ("<=", 25.0), "open_p50_ms": ("<=", 60.0), "rollouts_per_s": (">=", 5.0), "mib_per_box": ("<=", 4.0),
    "leaked_after_kill": ("<=", 0.0), "doubled": ("<=", 0.0), "lost": ("<=", 0.0), "hack_paid": ("<=", 0.0), "gold_refused": ("<=", 0.0),
    "straggler_cost": ("<=", 0.05), "live_ttft_ratio": ("<=", 1.05), "permits_zero_s": ("<=", 2.0), "stale_share": ("<=", 0.01),
}  # fmt: skip
LIMITS = Limits(cpu_s=60, memory_bytes=256 << 20, file_bytes=8 << 20)


def quantiles(work: Callable[[], object], count: int) -> tuple[float, float]:
    """p50 and p99 of so many, in milliseconds."""
    took: list[float] = []
    for _ in range(count):
        began = time.perf_counter()
        work()
        took.append((time.perf_counter() - began) * 1000)
    took.sort()
    return round(statistics.median(took), 2), round(took[min(len(took) - 1, int(0.99 * len(took)))], 2)


def weight_mib() -> float:
    """Memory of all processes of users of boxes; what is shared counts in shares."""
    total = 0
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and folder.stat().st_uid >= 1 << 30:
                total += sum(int(line.split()[1]) for line in (folder / "smaps_rollup").read_text().splitlines() if line.startswith("Pss:"))
        except OSError:
            continue
    return total / 1024


PEERS = {
    "unshare": ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--net", "/bin/true"],
    "firejail": ["firejail", "--quiet", "--noprofile", "--private", "--net=none", "/bin/true"],
}
"""A program in a sandbox of other make, each time a new one: what their users do."""


def peers(count: int) -> dict[str, float]:
    """The same program under each of them."""
    found: dict[str, float] = {}
    for name, command in PEERS.items():
        if shutil.which(name) is None or subprocess.run(command, capture_output=True, check=False).returncode != 0:
            print(f"{name}: does not run here (apt-get install {name}); left out")
            continue
        run = partial(subprocess.run, command, check=True, capture_output=True)
        found |= {f"{name}_{p}_ms": value for p, value in zip(("p50", "p99"), quantiles(run, count), strict=True)}
    return found


def boxes_alone(folder: Path, *, quick: bool) -> dict[str, float]:
    """Programs, boxes and their weight."""
    boxes = BubblewrapBoxes()
    spec = BoxSpec(limits=LIMITS, workspace=folder)
    box = boxes.open(spec)
    count = 200 if quick else 1000
    one = boxes.open(BoxSpec(limits=LIMITS))
    figures = {
        "exec": quantiles(lambda: box.exec(["/bin/true"], deadline_s=20, most_output_bytes=100), count),
        "subprocess": quantiles(lambda: subprocess.run(["/bin/true"], check=True), count),
        "namespace_each": quantiles(lambda: one.exec(["/bin/true"], deadline_s=20, most_output_bytes=100), count // 5),
        "open": quantiles(lambda: boxes.open(spec).stop(), 20 if quick else 100),
    }
    before = weight_mib()
    opened = [boxes.open(spec) for _ in range(8)]
    each = (weight_mib() - before) / len(opened)
    for held in [*opened, box, one]:
        held.stop()
    found = {f"{name}_{p}_ms": value for name, pair in figures.items() for p, value in zip(("p50", "p99"), pair, strict=True)}
    return found | {"mib_per_box": round(each, 2)} | peers(count // 10)


def grades(*, quick: bool) -> dict[str, float]:
    """What is paid that must not be, and refused that must be paid."""
    grader = Grader(boxes=BubblewrapBoxes())
    small = list(SmallFunctions().load())
    deleted = list(FeatureDeletion(sources=ROOT / ".cache" / "tasksets").load())
    tasks = small[::6] + deleted[::60] if quick else small + deleted[::5]
    tried = [(task, hack) for task in tasks for hack in task.hacks]
    with ThreadPoolExecutor(2) as pool:
        golds = pool.map(lambda task: grader.grade(task, task.gold, seed=1).verdict, tasks)
        hacks = pool.map(lambda one: grader.grade(one[0], one[0].hacks[one[1]], seed=2).verdict, tried)
        refused = [task.key for task, verdict in zip(tasks, golds, strict=True) if verdict is not Verdict.PASSED]
        paid = [(task.key, hack) for (task, hack), verdict in zip(tried, hacks, strict=True) if verdict is Verdict.PASSED]
    for what in (*refused, *paid):
        print("wrongly graded:", what)
    return {"hack_paid": len(paid), "gold_refused": len(refused), "hacks_tried": len(tried), "gold_tried": len(tasks)}


def left_over() -> int:
    """Processes, mounts, groups and folders of dispatchers that are gone, after the next one's sweep."""
    BubblewrapBoxes().sweep()
    groups = control_groups.find()
    folders = [folder for parent in (groups.parents if groups else ()) for folder in parent.glob(f"{control_groups.NAME}-*")]
    folders += list(shared_folder().glob("work-*"))
    orphans = {folder.name for folder in folders if not control_groups.owner_lives(folder.name)}
    mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if "ratchet-boxes" in line]
    return len(orphans) + len(mounts) + sum(not Path(f"/proc/{owner}").exists() for owner in owners_of_boxes())


def owners_of_boxes() -> list[int]:
    """The process that made it, for each process of a box: its user says so."""
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        try:
            user = folder.stat().st_uid if folder.name.isdigit() else 0
        except OSError:
            continue
        if user >= USERS_FROM:
            found.append((user - USERS_FROM) // 256)
    return found


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick: bool = parser.parse_args().quick
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="ratchet-bench-") as scratch:
        folder = Path(scratch) / "base"
        folder.mkdir()
        for number in range(100 if quick else 1210):
            (folder / f"file{number}.py").write_text(f"N = {number}\n" * 20)
        for part in (
            lambda: boxes_alone(folder, quick=quick), lambda: paced(Path(scratch), 16 if quick else 64), lambda: grades(quick=quick),
            lambda: straggling(Path(scratch), 6.0 if quick else 60.0), lambda: live(Path(scratch), 16.0 if quick else 60.0),
            lambda: killed(Path(scratch), 8.0 if quick else 30.0),
        ):  # fmt: skip
            began = time.monotonic()
            found = part()
            figures |= found
            print(json.dumps(found), f"({time.monotonic() - began:.1f} s)", flush=True)
        time.sleep(1.0 if quick else 5.0)
        figures["leaked_after_kill"] = left_over()
    broken = [
        f"{name} is {figures[name]:g}, bound {sign} {bound:g}"
        for name, (sign, bound) in BOUNDS.items()
        if (figures[name] > bound if sign == "<=" else figures[name] < bound)
    ]
    for line in broken:
        print("broken:", line)
    print(json.dumps(figures))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
