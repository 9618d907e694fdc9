"""`make bench-demo`: the whole demo as a newcomer starts it, on five machines that this one can be, once per population of people.

    quiet       as it is
    one-core    pinned to one processor (taskset -c)
    busy        ten processes that compute for ever beside it, niced as `nice` does (load 10)
    no-bf16     AVX2 only: neither torch nor oneDNN may use what the processor has beyond it
    4-gb        in a control group of 4 GiB: ends well, or refuses within ten seconds with what is missing

Each run prints its own summary. Bounds: every run ends with exit code 0 (`4-gb`: or is refused in time); the quiet one within 240 s, its
first promotion within 120 s. A row that this machine cannot make (no taskset, no control groups) says why and counts as failed.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
BUSY = 10
REFUSED_WITHIN_S = 10.0
WALL_S, FIRST_PROMOTION_S = 240.0, 120.0
"""Of the quiet row."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a row puts around the demo."""

    prefix: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    join: Callable[[], None] | None = None
    """Run in the child before the demo: joins a control group."""


@contextmanager
def quiet() -> Generator[Surroundings]:
    yield Surroundings()


@contextmanager
def one_core() -> Generator[Surroundings]:
    if shutil.which("taskset") is None:
        raise RuntimeError("taskset (util-linux) is not installed")
    yield Surroundings(prefix=("taskset", "-c", str(min(os.sched_getaffinity(0)))))


@contextmanager
def busy() -> Generator[Surroundings]:
    loads = [subprocess.Popen(["nice", sys.executable, "-c", "while True: pass"]) for _ in range(BUSY)]
    try:
        yield Surroundings()
    finally:
        for load in loads:
            load.kill()
            load.wait()


@contextmanager
def no_bf16() -> Generator[Surroundings]:
    yield Surroundings(environment={"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"})


@contextmanager
def four_gib() -> Generator[Surroundings]:
    folder, limit = _control_group()
    try:
        folder.mkdir()
        (folder / limit).write_text(str(4 * GIB))
    except OSError as error:
        raise RuntimeError(f"no control group can be made here: {error}") from error

    def join() -> None:
        (folder / "cgroup.procs").write_text(str(os.getpid()))

    try:
        yield Surroundings(join=join)
    finally:
        deadline = time.monotonic() + 10
        while folder.exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # a process of the demo is still going
                folder.rmdir()
            time.sleep(0.2)


def _control_group() -> tuple[Path, str]:
    """Folder of a new group below this process's own, and the name of its limit."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/") / f"ratchet-{os.getpid()}", "memory.limit_in_bytes"
    return Path("/sys/fs/cgroup") / f"ratchet-{os.getpid()}", "memory.max"


ROWS: dict[str, Callable[[], contextlib.AbstractContextManager[Surroundings]]] = {
    "quiet": quiet, "one-core": one_core, "busy": busy, "no-bf16": no_bf16, "4-gb": four_gib,
}  # fmt: skip


def main() -> int:
    """Run the bench; the last line is JSON."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", default="1,2,3", help="populations, separated by commas")
    options.add_argument("--rows", default=",".join(ROWS), help="which of them, separated by commas")
    options.add_argument("--model", default="smollm2")
    options.add_argument("--picture", help="write the last view of each run to this file (SVG); the last run's stays")
    options.add_argument("--quick", action="store_true", help="one population, the tiny model, the quiet row")
    given = options.parse_args()
    if given.quick:
        given.seeds, given.rows, given.model = "1", "quiet", "tiny"
    more = ["--picture", given.picture] if given.picture else []
    rows = [_row(name, int(seed), given.model, more) for name in given.rows.split(",") for seed in given.seeds.split(",")]
    print(json.dumps({"rows": rows}))
    return 0 if all(not row["out_of_bounds"] for row in rows) else 1


def _row(name: str, seed: int, model: str, more: list[str]) -> dict[str, Any]:
    print(f"=== {name}, population {seed}", flush=True)
    try:
        with ROWS[name]() as around:
            exit_code, lines, lasted = _run(around, seed, model, more)
    except RuntimeError as error:
        return {"row": name, "seed": seed, "exit": None, "out_of_bounds": [str(error)]}
    found: dict[str, Any] | None = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else None
    if found is None:
        late = [f"exit code {exit_code} after {lasted:.0f} s without a summary"]
        refused = name == "4-gb" and lasted <= REFUSED_WITHIN_S
        return {
            "row": name,
            "seed": seed,
            "exit": exit_code,
            "wall_s": round(lasted, 1),
            "said": lines[-1:],
            "out_of_bounds": [] if refused else late,
        }
    gain, harm = found["persistence"], found["harm"]
    return {
        "row": name, "seed": seed, "exit": exit_code, "wall_s": found["wall_s"], "planned_s": found["planned_s"],
        "first_promotion_s": found["first_promotion_s"], "promotions": len(found["promoted"]),
        "gain": gain and gain["difference"], "interval": gain and [gain["low"], gain["high"]],
        "persistence": gain and [gain["first"]["mean"], gain["second"]["mean"]], "detected_s": harm and round(harm["detect_s"], 1),
        "waited_s": found["waited_s"], "waited_while_training_s": found["waited_while_training_s"], "parts_s": found["parts_s"],
        "out_of_bounds": _bounds(name, found, exit_code),
    }  # fmt: skip


def _bounds(name: str, found: dict[str, Any], exit_code: int) -> list[str]:
    """What this run should have kept and did not."""
    broken: list[str] = list(found["failures"])
    if exit_code != 0 and not broken:
        broken.append(f"exit code {exit_code}")
    if name == "quiet" and found["wall_s"] > WALL_S:
        broken.append(f"{found['wall_s']} s, {WALL_S:.0f} are allowed on a quiet machine")
    if name == "quiet" and (found["first_promotion_s"] or 0.0) > FIRST_PROMOTION_S:
        broken.append(f"the first promotion after {found['first_promotion_s']} s, {FIRST_PROMOTION_S:.0f} are allowed")
    return broken


def _run(around: Surroundings, seed: int, model: str, more: list[str]) -> tuple[int, list[str], float]:
    """One demo; its output goes to the terminal, its last line is the summary."""
    command = [*around.prefix, sys.executable, "-m", "pipelines", "demo", "--model", model, "--seed", str(seed), "--json", *more]
    lines: list[str] = []
    began = time.monotonic()
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **around.environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=around.join,
    ) as demo:  # fmt: skip
        assert demo.stdout is not None
        for line in demo.stdout:
            lines.append(line.rstrip("\n"))
            sys.stdout.write(line)
            sys.stdout.flush()
    return demo.returncode, lines, time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main())
