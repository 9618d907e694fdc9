"""`make bench-sharded`: the peak memory of one update's workers, alone and as two and four that share the model (gloo on this machine).

Each worker is a process of its own that loads a snapshot of random weights, takes two steps, and writes state and snapshot, as an update
does. Peaks are VmHWM of the process; `libraries_mb` is that of a process that only imports what they do, and `ratio` is of what a worker
takes beyond it, because that part grows with the model. Bounds: the largest worker of two at most 0.6, of four at most 0.35 of one alone,
with either kind of communication, at full size: of `--quick`'s smaller model what does not grow with it (about 80 MB a worker) is a seventh
of all that one takes, so there the bounds are printed against and not judged.

In float32 all must write the same weights (`same_weights`). In bfloat16, the default, gradients are rounded on their way, so that Adam's
first steps, which are the rate times a sign, go the other way where a gradient is smaller than its rounding: `served_apart` is the share
of the served weights that are not those of one worker alone.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from app.domain.learning.training import AdamParams, Datum, LossSpec
from app.policy.model import load_model
from app.policy.storage.snapshot import WEIGHTS
from pipelines.training.numerics.sharding import Shards
from pipelines.training.trainer import LocalTrainer, TrainerSetup
from tests.fakes.learning import small_snapshot

BOUNDS = {2: 0.6, 4: 0.35}
SIZES: dict[str, dict[str, Any]] = {
    "full": {"hidden": 1024, "layers": 24, "vocabulary": 24_000},
    "quick": {"hidden": 512, "layers": 16, "vocabulary": 8_000},
}
JUDGED_FROM = 200_000_000
"""Parameters."""
STEPS, TURNS, TOKENS = 2, 4, 64


def main() -> int:
    """Run the bench; the last line is JSON."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="a smaller model")
    options.add_argument("--worker", nargs=5, metavar=("RANK", "COUNT", "FOLDER", "SNAPSHOT", "COMMUNICATION"), help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.worker:
        rank, count, folder, snapshot, communication = given.worker
        print(json.dumps(work(int(rank), int(count), Path(folder), Path(snapshot), communication)))
        return 0
    found = measure("quick" if given.quick else "full")
    for sentence in missed(found):
        print(f"# missed: {sentence}", flush=True)
    print(json.dumps(found))
    return 1 if is_judged(found) and missed(found) else 0


def measure(size: str) -> dict[str, Any]:
    """Peaks by communication and number of workers."""
    with tempfile.TemporaryDirectory(prefix="ratchet-sharded-") as name:
        folder = Path(name)
        small_snapshot(folder / "snapshot", **SIZES[size])
        model = load_model(folder / "snapshot", dtype=torch.float32)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        del model
        alone = _peaks(1, folder, "float32")
        several = {kind: {count: _peaks(count, folder, kind) for count in BOUNDS} for kind in ("bfloat16", "float32")}
        libraries = _libraries_mb()
        beyond = alone[0]["peak_mb"] - libraries
        digests = {worker["digest"] for workers in (alone, *several["float32"].values()) for worker in workers if worker["digest"]}
        return {
            "parameters": parameters, "libraries_mb": round(libraries), "alone_mb": round(alone[0]["peak_mb"]),
            "peak_mb": {kind: {str(n): [round(w["peak_mb"]) for w in found] for n, found in of.items()} for kind, of in several.items()},
            "ratio": {
                kind: {str(n): round((max(w["peak_mb"] for w in workers) - libraries) / beyond, 3) for n, workers in of.items()}
                for kind, of in several.items()
            },
            "same_weights": len(digests) == 1,
            "served_apart": round(_apart(folder / "made-1-float32", folder / "made-2-bfloat16"), 4),
        }  # fmt: skip


def is_judged(found: dict[str, Any]) -> bool:
    """Whether the bounds on memory are meant for a model of this size; of the same weights nobody is excused."""
    return found["parameters"] >= JUDGED_FROM or not found["same_weights"]


def missed(found: dict[str, Any]) -> list[str]:
    """The bounds that do not hold, a sentence each."""
    sentences = [
        f"the largest of {count} workers takes {of[str(count)]} of one alone with {kind} communication, above {bound}"
        for kind, of in found["ratio"].items() for count, bound in BOUNDS.items() if of[str(count)] > bound
    ]  # fmt: skip
    return sentences if found["same_weights"] else [*sentences, "float32 workers write other weights than one alone"]


def work(rank: int, count: int, folder: Path, snapshot: Path, communication: Any) -> dict[str, Any]:
    """One worker of `count`: its peak, and the digest of what it wrote."""
    torch.set_num_threads(1)
    name = f"{count}-{communication}"
    shards = Shards.join(rank=rank, count=count, address=f"file://{folder}/meet-{name}") if count > 1 else Shards.alone()
    setup = TrainerSetup(snapshot=snapshot, scratch=folder / f"scratch-{name}", dtype="float32", threads=1, communication=communication)
    trainer = LocalTrainer(setup, shards=shards)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        rows = [tuple(torch.randint(1000, (TOKENS,), generator=generator).tolist()) for _ in range(TURNS)]
        for tokens in rows[rank::count]:
            turn = Datum(tokens=tokens, first_scored=TOKENS // 2, logprobs=(-3.0,) * (TOKENS // 2), advantages=(1.0,) * (TOKENS // 2))
            trainer.forward_backward([turn], LossSpec(normaliser=100.0))
        trainer.optim_step(AdamParams(learning_rate=1e-5))
    trainer.save_state(folder / f"state-{name}")
    digest = trainer.save_weights_for_sampler(folder / f"made-{name}", snapshot)
    return {"peak_mb": _peak_mb(), "digest": digest}


def _peaks(count: int, folder: Path, communication: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.bench.sharded", "--worker"]
    workers = [
        subprocess.Popen(
            [*command, str(rank), str(count), str(folder), str(folder / "snapshot"), communication], stdout=subprocess.PIPE, text=True
        )
        for rank in range(count)
    ]
    said = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise RuntimeError(f"a worker of {count} failed: its error is above")
    return [json.loads(lines.strip().splitlines()[-1]) for lines in said]


def _apart(one: Path, other: Path) -> float:
    weights = [load_file(folder / WEIGHTS) for folder in (one, other)]
    return sum(int((tensor != weights[1][name]).sum()) for name, tensor in weights[0].items()) / sum(t.numel() for t in weights[0].values())


def _libraries_mb() -> float:
    code = "from tests.bench.sharded import _peak_mb; print(_peak_mb())"
    return float(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout)


def _peak_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


if __name__ == "__main__":
    sys.exit(main())
