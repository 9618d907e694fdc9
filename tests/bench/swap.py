"""`make bench-swap`: three engines of SmolLM2 under load take up a new version every ten seconds, from deltas.

    publisher ─▶ folder of deltas ─▶ three engine processes (the real ones: worker, residency, HTTP) ◀─ streams of answers, always from the
    newest version that all of them hold

First without swaps, then with them. Each version moves every weight of the norms, so that an answer's log-probabilities tell which version
sampled it; answers are scored afterwards with the version they claim, token by token, and a token that another version would have given
makes a mixed answer.

| figure | what it is |
|---|---|
| pause_ms_p99 | for how long the sampling thread stood still for a swap, over swaps and engines |
| request_p99_ratio | 99th percentile of seconds per request with swaps, over that without |
| errors, mixed_weight_answers | answers that failed; answers that are not wholly of the version they claim |
| bit_for_bit | of those that were scored, answers with no log-probability but their version's own, to the last bit |
| time_to_all_replicas_ms | median from the version being wanted to all three reporting it ready |
| peak_memory_ratio | largest private memory of an engine with swaps, over its largest without them and one more version |

People read an answer before they ask the next one, so that about half of two cores is busy, as a service is sized; what was busy is told.

    python -m tests.bench.swap --quick      the tiny model and half a minute; bounds of time are told and not judged
    python -m tests.bench.swap --saturated  nobody reads: every core is busy all the time, and a new version has to wait for its turn
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType] - its PathLike has no parameter
from torch import Tensor

from app.domain.ports import EngineState, Holder, Way
from app.domain.telemetry.serving import GenerationChunk
from app.policy.decoding.sampling import Decoder
from app.policy.model import Policy, load_policy
from app.policy.patching import LiveWeights, follow, places_of
from app.policy.scoring.fixed_probe import probe_tokens
from app.policy.scoring.forward import token_logprobs
from app.policy.storage.delta import encode_delta
from app.policy.storage.remote import DELTA, RemoteWeights
from app.policy.storage.snapshot import PARENT, PROBE, READY, WEIGHTS
from app.policy.storage.weights import digest_of
from app.serving.client import HttpEngines
from app.serving.process import serve_engine
from app.stopping import until_told
from tests.bench.common.asking import Load

SMOLLM2, TINY = Path(".cache/models/smollm2-135m-instruct"), Path(".cache/models/tiny")
REPLICAS, STREAMS, TOKENS = 3, 6, 12
READING_S = 3.0
"""Between two answers of a stream, on average."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long, with what."""

    model: Path
    calm_s: float
    swapping_s: float
    every_s: float
    reading_s: float
    judged: bool
    """Whether the bounds of time and memory decide the exit code."""


FULL = Plan(model=SMOLLM2, calm_s=120, swapping_s=300, every_s=10, reading_s=READING_S, judged=True)
QUICK = Plan(model=TINY, calm_s=6, swapping_s=18, every_s=3, reading_s=0.0, judged=False)


class FolderLedger:
    """The ledger of engines as small files: one says what is wanted, each engine writes what it holds."""

    def __init__(self, folder: Path, name: str = "", address: str = "") -> None:
        self._folder, self._name, self._address = folder, name, address
        self._states: dict[str, str] = {}

    def want(self, *digests: str) -> None:
        """Ask all engines for these versions."""
        _replace(self._folder / "wanted.json", list(digests))

    def wanted(self) -> set[tuple[str, str]]:
        return {("composer", digest) for digest in json.loads((self._folder / "wanted.json").read_text())}

    def report(self, policy: str, digest: str, state: EngineState, detail: str | None = None) -> None:
        self._states[digest] = state.value
        _replace(self._folder / f"{self._name}.engine", {"address": self._address, "states": self._states, "detail": detail})

    def addresses(self, digest: str) -> list[str]:
        said = [json.loads(file.read_text()) for file in self._folder.glob("*.engine")]
        return [entry["address"] for entry in said if entry["states"].get(digest) == EngineState.READY.value]

    def holders(self, digest: str) -> dict[str, Holder]:
        return dict.fromkeys(self.addresses(digest), Holder())

    def roles(self, policy: str) -> dict[str, Sequence[str]]:
        return {}

    def forget(self) -> None:
        (self._folder / f"{self._name}.engine").unlink(missing_ok=True)


def _replace(file: Path, content: object) -> None:
    new = file.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps(content))
    new.rename(file)


def run_engine(folder: Path, index: int, port: int) -> None:
    """An engine process."""
    stop = until_told()
    ledger = FolderLedger(folder, f"engine{index}", f"http://127.0.0.1:{port}")
    weights = RemoteWeights(f"local://{folder}/remote", cache=folder / f"cache{index}")
    serve_engine(ledger, weights, host="127.0.0.1", port=port, only=None, rows=8, threads=1, stop=stop)


@dataclass
class Publisher:
    """Makes versions and puts them where the engines look; keeps them, to score answers with."""

    folder: Path
    policies: dict[str, Policy] = field(default_factory=dict[str, Policy])
    state: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    digest: str = ""

    def begin(self, model: Path) -> str:
        """The first version, as a snapshot."""
        policy = load_policy(model)
        RemoteWeights(f"local://{self.folder}/remote", cache=self.folder / "publisher").publish(model)
        self.state, self.digest = dict(load_file(model / WEIGHTS)), policy.digest
        self.policies[policy.digest] = policy
        return policy.digest

    def next(self, model: Path) -> str:
        """One version on, as a delta: norms scaled so that answers tell, and one weight in a hundred elsewhere moved by one place."""
        made = len(self.policies)
        factor = 1.25 if made % 2 else 0.8
        chosen = np.random.default_rng(made)
        new: dict[str, Tensor] = {}
        for name, tensor in self.state.items():
            bits = tensor.clone().view(-1).view(torch.int16)
            places = torch.from_numpy(chosen.integers(0, bits.numel(), max(1, bits.numel() // 100)))
            bits[places] ^= 1
            new[name] = bits.view(tensor.dtype).view(tensor.shape)
            if name.endswith("norm.weight") and tensor.dim() == 1:
                new[name] = (tensor.float() * factor).to(tensor.dtype)
        digest = digest_of(new)
        delta = encode_delta(self.state, new, digests=(self.digest, digest))
        policy = follow(self.policies[self.digest], Way(base=self.digest, deltas=(delta,)), digest=digest)
        tokens = probe_tokens(model)
        with torch.inference_mode():
            logprobs = token_logprobs(policy.model, tokens[:1], tokens[1:]).tolist()
        place = self.folder / "remote" / digest
        place.mkdir(parents=True)
        (place / DELTA).write_bytes(delta)
        (place / PARENT).write_text(self.digest + "\n")
        (place / PROBE).write_text(json.dumps({"tokens": list(tokens), "logprobs": logprobs}))
        (place / READY).write_text(digest + "\n")
        self.policies[digest], self.state, self.digest = policy, new, digest
        return digest


class Watch(threading.Thread):
    """Largest private memory of the engines, and which share of all cores was busy, by phase."""

    def __init__(self, processes: Sequence[BaseProcess]) -> None:
        super().__init__(daemon=True)
        self._watched = [psutil.Process(process.pid) for process in processes]
        self.phase = "calm"
        self.peak = {"calm": 0.0, "swapping": 0.0}
        self._shares: dict[str, list[float]] = {"calm": [], "swapping": []}
        self.stop = threading.Event()

    def run(self) -> None:
        psutil.cpu_percent()
        while not self.stop.wait(0.5):
            self._shares[self.phase].append(psutil.cpu_percent() / 100)
            for process in self._watched:
                self.peak[self.phase] = max(self.peak[self.phase], float(process.memory_full_info().uss))

    @property
    def busy(self) -> dict[str, float]:
        """On average."""
        return {phase: sum(shares) / max(1, len(shares)) for phase, shares in self._shares.items()}


def mixed(answers: Sequence[tuple[str, list[GenerationChunk]]], policies: dict[str, Policy], *, most: int) -> tuple[int, int, int]:
    """Answers with tokens whose log-probabilities are further from their own version's than from the version's before or after; those that
    are bit for bit their version's, as they are where a machine computes the same whatever is beside it; and how many were looked at."""
    order, decoders = list(policies), {digest: Decoder(policy) for digest, policy in policies.items()}
    chosen = random.Random(5).sample(list(answers), min(most, len(answers)))
    wrong = exact = 0
    for digest, chunks in chosen:
        prompt, tokens = chunks[-1].prompt_tokens or [], [token for chunk in chunks for token in chunk.tokens]
        logged = torch.tensor([value for chunk in chunks for value in chunk.logprobs])
        at = order.index(digest)
        near = (digest, *order[max(0, at - 1) : at], *order[at + 1 : at + 2])
        own, *gaps = [(torch.tensor(decoders[name].score(prompt, tokens, temperature=1.0, top_p=1.0)) - logged).abs() for name in near]
        wrong += is_mixed(own, torch.stack(gaps).min(0).values if gaps else torch.full_like(own, torch.inf))
        exact += not own.any()
    return wrong, exact, len(chosen)


def is_mixed(own_T: Tensor, others_T: Tensor) -> bool:
    """By how far each token's log-probability is from its own version's, and from the nearest of its neighbours'.

    bfloat16 blurs a token by a few tenths, and an answer by .4 on average where norms are 1.25 times as large; its neighbours are 1 to 3
    away. Three tokens in a row of another version are no blur, nor is an answer a third as far from its own version as from another.
    """
    foreign = ((own_T > 0.3) & (others_T < own_T / 4)).int().tolist()
    own, other = float(own_T.mean()), float(others_T.mean())
    return any(sum(foreign[i : i + 3]) == 3 for i in range(len(foreign))) or (own > 0.2 and own > other / 3)


async def waited(holds: Callable[[], bool], within_s: float) -> bool:
    until = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > until:
            return False
        await asyncio.sleep(0.01)
    return True


async def pauses(urls: Sequence[str]) -> list[dict[str, Any]]:
    async with httpx.AsyncClient() as client:
        return [(await client.get(f"{url}/health")).json()["last_swap"] for url in urls]


async def driven(
    plan: Plan, folder: Path, first: str, made: Sequence[str], urls: Sequence[str], watch: Watch
) -> tuple[Load, list[float], list[dict[str, Any]]]:
    """The two phases: the first version alone, then those that were made after it, one after the other."""
    ledger = FolderLedger(folder)
    if not await waited(lambda: len(ledger.addresses(first)) == REPLICAS, 180):
        raise SystemExit("the engines did not start within 180 s")
    async with HttpEngines(urls, holders=ledger.holders) as engines:
        load, stop = Load(engines, first, tokens=TOKENS, reading_s=plan.reading_s), asyncio.Event()
        streams = [asyncio.ensure_future(load.stream(index, stop)) for index in range(STREAMS)]
        await asyncio.sleep(plan.calm_s)
        load.phase = watch.phase = "swapping"
        took, swaps = list[float](), list[dict[str, Any]]()
        for digest in made:
            began = wanted = time.monotonic()
            ledger.want(load.current, digest)
            if not await waited(lambda digest=digest: len(ledger.addresses(digest)) == REPLICAS, 60):
                load.errors.append(f"{digest[:12]} was not taken up by all within 60 s")
                break
            took.append(1e3 * (time.monotonic() - wanted))
            swaps += await pauses(urls)
            load.current = digest
            ledger.want(digest)
            await asyncio.sleep(max(0.0, plan.every_s - (time.monotonic() - began)))
        stop.set()
        await asyncio.gather(*streams)
    return load, took, swaps


def figures(load: Load, took: list[float], swaps: list[dict[str, Any]], watch: Watch, publisher: Publisher, *, most: int) -> dict[str, Any]:
    """The line."""
    calm, swapping = (np.percentile(load.seconds[phase], 99) for phase in ("calm", "swapping"))
    version = sum(tensor.nbytes for tensor in LiveWeights(places_of(publisher.policies[publisher.digest].model)).values())
    wrong, exact, looked = mixed(load.answers, publisher.policies, most=most)
    return {
        "pause_ms_p99": round(float(np.percentile([swap["pause_ms"] for swap in swaps], 99)), 2),
        "request_p99_ratio": round(float(swapping / calm), 2), "errors": len(load.errors), "mixed_weight_answers": wrong,
        "time_to_all_replicas_ms": round(float(np.median(took))),
        "peak_memory_ratio": round(watch.peak["swapping"] / (watch.peak["calm"] + version), 2),
        "memory_mb": {name: round(size / 1e6) for name, size in (watch.peak | {"version": version}).items()},
        "busy": {phase: round(share, 2) for phase, share in watch.busy.items()},
        "swaps": len(took), "patched": sum(swap["way"] == "patch" for swap in swaps),
        "answers": len(load.answers), "answers_scored": looked, "bit_for_bit": exact,
        "versions_answering": len({digest for digest, _ in load.answers}), "first_errors": load.errors[:3],
    }  # fmt: skip


BOUNDS = {"pause_ms_p99": 50.0, "request_p99_ratio": 1.3, "time_to_all_replicas_ms": 3000.0, "peak_memory_ratio": 1.3}


def missed(found: dict[str, Any], *, judged: bool) -> list[str]:
    """Bounds that did not hold."""
    faults = [f"{key} is {found[key]}, 0 is the bound" for key in ("errors", "mixed_weight_answers") if found[key]]
    if found["patched"] < REPLICAS * found["swaps"] or found["versions_answering"] < 2:
        faults.append(
            f"{found['patched']} of {REPLICAS * found['swaps']} swaps were patches, {found['versions_answering']} versions answered"
        )
    return faults + [f"{key} is {found[key]}, {bound} is the bound" for key, bound in BOUNDS.items() if judged and found[key] > bound]


def main(arguments: list[str] | None = None) -> int:
    """Run as a program; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.swap")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=float, help="of swapping, instead of the usual")
    parser.add_argument("--saturated", action="store_true")
    options = parser.parse_args(arguments)
    plan = QUICK if options.quick else FULL
    if options.seconds:
        plan = replace(plan, swapping_s=options.seconds)
    if options.saturated:
        plan = replace(plan, reading_s=0.0)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        ports = _free_ports()
        # forked before torch has threads: each would import for seconds otherwise
        fork = multiprocessing.get_context("fork")
        processes = [fork.Process(target=run_engine, args=(folder, index, port), daemon=True) for index, port in enumerate(ports)]
        FolderLedger(folder).want()
        for process in processes:
            process.start()
        torch.set_num_threads(1)
        watch, publisher = Watch(processes), Publisher(folder)
        try:
            first = publisher.begin(plan.model)
            FolderLedger(folder).want(first)
            made = [publisher.next(plan.model) for _ in range(round(plan.swapping_s / plan.every_s))]  # where nobody is served
            watch.start()
            load, took, swaps = asyncio.run(driven(plan, folder, first, made, [f"http://127.0.0.1:{port}" for port in ports], watch))
        finally:
            watch.stop.set()
            for process in processes:
                process.terminate()
            for process in processes:
                process.join(timeout=10)
        found = figures(load, took, swaps, watch, publisher, most=40 if options.quick else 200)
    faults = missed(found, judged=plan.judged)
    print(json.dumps(found | {"missed": faults}))
    return 1 if faults else 0


def _free_ports() -> list[int]:
    listeners = [socket.socket() for _ in range(REPLICAS)]
    for listener in listeners:
        listener.bind(("127.0.0.1", 0))
    ports = [int(listener.getsockname()[1]) for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


if __name__ == "__main__":
    sys.exit(main())
