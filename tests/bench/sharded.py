"""`make bench-sharded`: the peak memory of one update's workers, alone and as two and four that share the model (gloo on this machine).

Each worker is a process of its own that loads a snapshot of random weights, takes two steps, and writes state and snapshot, as an update
does. Peaks are VmHWM of the process; `libraries_mb` is that of a process that only imports what they do, and `ratio` is of what a worker
takes beyond it, because that part grows with the model. Bounds: the largest worker of two at most 0.6, of four at most 0.35 of one alone.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from app.domain.learning.training import AdamParams, Datum, LossSpec
from app.policy.model import load_model
from pipelines.training.numerics.sharding import Shards
from pipelines.training.trainer import LocalTrainer, TrainerSetup
from tests.fakes.learning import small_snapshot

BOUNDS = {2: 0.6, 4: 0.35}
SIZES: dict[str, dict[str, Any]] = {
    "full": {"hidden": 1024, "layers": 24, "vocabulary": 24_000},
    "quick": {"hidden": 512, "layers": 16, "vocabulary": 8_000},
}
STEPS, TURNS, TOKENS = 2, 4, 64


def main() -> int:
    """Run the bench; the last line is JSON."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="a smaller model")
    options.add_argument("--worker", nargs=4, metavar=("RANK", "COUNT", "FOLDER", "SNAPSHOT"), help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.worker:
        rank, count, folder, snapshot = given.worker
        print(json.dumps(work(int(rank), int(count), Path(folder), Path(snapshot))))
        return 0
    with tempfile.TemporaryDirectory(prefix="ratchet-sharded-") as folder:
        found = measure(Path(folder), SIZES["quick" if given.quick else "full"])
    print(json.dumps(found))
    broken = [count for count, bound in BOUNDS.items() if found["ratio"][str(count)] > bound]
    return 1 if broken or not found["same_weights"] else 0


def measure(folder: Path, size: dict[str, Any]) -> dict[str, Any]:
    """Peaks by number of workers."""
    snapshot = folder / "snapshot"
    small_snapshot(snapshot, **size)
    parameters = sum(parameter.numel() for parameter in load_model(snapshot, dtype=torch.float32).parameters())
    peaks = {count: _peaks(count, folder, snapshot) for count in (1, *BOUNDS)}
    libraries = _libraries_mb()
    beyond = {count: max(peak["peak_mb"] for peak in found) - libraries for count, found in peaks.items()}
    digests = {peak["digest"] for found in peaks.values() for peak in found if peak["digest"]}
    return {
        "parameters": parameters, "peak_mb": {str(count): [round(p["peak_mb"]) for p in found] for count, found in peaks.items()},
        "libraries_mb": round(libraries), "ratio": {str(count): round(mb / beyond[1], 3) for count, mb in beyond.items()},
        "same_weights": len(digests) == 1,
    }  # fmt: skip


def work(rank: int, count: int, folder: Path, snapshot: Path) -> dict[str, Any]:
    """One worker of `count`: its peak, and the digest of what it wrote."""
    torch.set_num_threads(1)
    shards = Shards.join(rank=rank, count=count, address=f"file://{folder}/meet-{count}") if count > 1 else Shards.alone()
    scratch = folder / f"scratch-{count}"
    trainer = LocalTrainer(TrainerSetup(snapshot=snapshot, scratch=scratch, dtype="float32", threads=1), shards=shards)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        rows = [tuple(torch.randint(1000, (TOKENS,), generator=generator).tolist()) for _ in range(TURNS)]
        for tokens in rows[rank::count]:
            turn = Datum(tokens=tokens, first_scored=TOKENS // 2, logprobs=(-3.0,) * (TOKENS // 2), advantages=(1.0,) * (TOKENS // 2))
            trainer.forward_backward([turn], LossSpec(normaliser=100.0))
        trainer.optim_step(AdamParams(learning_rate=1e-5))
    trainer.save_state(folder / f"state-{count}")
    digest = trainer.save_weights_for_sampler(folder / f"made-{count}", snapshot)
    return {"peak_mb": _peak_mb(), "digest": digest}


def _peaks(count: int, folder: Path, snapshot: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.bench.sharded", "--worker"]
    workers = [
        subprocess.Popen([*command, str(rank), str(count), str(folder), str(snapshot)], stdout=subprocess.PIPE, text=True)
        for rank in range(count)
    ]
    said = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise RuntimeError(f"a worker of {count} failed: its error is above")
    return [json.loads(lines.strip().splitlines()[-1]) for lines in said]


def _libraries_mb() -> float:
    code = "from tests.bench.sharded import _peak_mb; print(_peak_mb())"
    return float(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout)


def _peak_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


if __name__ == "__main__":
    sys.exit(main())
