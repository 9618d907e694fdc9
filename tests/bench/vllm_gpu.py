"""`python -m tests.bench.vllm_gpu --vllm PYTHON`: two real vLLM servers on one GPU take up release after release while people ask.

    a random Llama ─▶ one real AdamW step on the GPU ─▶ its delta: size, GB/s, every bit
                  └─▶ released again and again:   the candidate's server loads it ─▶ promoted ─▶ the champion's server loads it
                      streams of answers, always from the champion, through the gateway's own adapter ─▶ scored anew on the GPU

What keeps the servers on their versions is what a deployment runs (`app.serving.servers.residency.InPlace`, one per server), and so is
what asks them (`ServerEngines`). Each release scales the norms, so that log-probabilities tell which version sampled a token.

| figure | what it is |
|---|---|
| pause_ms | for how long a server samples nothing for a swap: median and longest |
| swap_s | from a version being wanted on a server to its being seen to answer there, of which 1.5 s are waited for gateways to know |
| request_p99_ratio | 99th percentile of seconds per answer while releases happen, over that without |
| errors, mixed_weight_answers | answers that failed; answers not wholly of the version they claim |
| mixed_and_said | answers across two versions that say so |
| mismatch_kl | nats per token between what vLLM logged and what transformers says in fp32 |

Needs `infra/vllm` beside vLLM, and a tokenizer of any model. `--size tiny --device cpu` tries it where there is no GPU.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType] - its PathLike has no parameter
from torch import Tensor
from transformers import PreTrainedModel

from app.domain.learning.training import AdamParams, Datum, LossSpec
from app.domain.ports import EngineState, Holder
from app.policy.model import load_model
from app.policy.scoring.fixed_probe import Expected, divergence, probe_tokens, write_expected
from app.policy.scoring.forward import token_logprobs
from app.policy.storage.delta import apply_delta, encode_delta
from app.policy.storage.snapshot import WEIGHTS, write_snapshot
from app.policy.storage.store import LocalWeights
from app.policy.storage.weights import digest_of
from app.serving.servers.engines import ServerEngines
from app.serving.servers.residency import InPlace, KeptServer, keep_versions
from app.serving.servers.vllm import SCHEME, Vllm
from app.serving.servers.vllm_control import Pause, VllmControl
from pipelines.training.trainer import LocalTrainer, TrainerSetup
from tests.bench.common.asking import Load
from tests.bench.llamas import SHAPES, VOCABULARY, random_llama

CONTEXT = 2048
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SHARP = 3.0
SCORED = 48
Made = TypeVar("Made")
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip


class Ledger:
    """The ledger of engines in memory, as one server sees it; what the servers report is shared."""

    def __init__(self, address: str, shared: dict[tuple[str, str], EngineState], by_role: dict[str, list[str]]) -> None:
        self._address, self._shared, self._by_role = address, shared, by_role

    def wanted(self) -> set[tuple[str, str]]:
        return {("composer", digest) for digests in list(self._by_role.values()) for digest in digests}

    def report(self, policy: str, digest: str, state: EngineState, detail: str | None = None) -> None:
        self._shared[self._address, digest] = state
        if state is EngineState.FAILED:
            print(f"{self._address} did not take {digest[:12]}: {detail}", flush=True)  # whoever waits for it gives up

    def addresses(self, digest: str) -> list[str]:
        return [address for (address, held), state in list(self._shared.items()) if held == digest and state is EngineState.READY]

    def holders(self, digest: str) -> dict[str, Holder]:
        return dict.fromkeys(self.addresses(digest), Holder())

    def roles(self, policy: str) -> Mapping[str, Sequence[str]]:
        return dict(self._by_role)

    def forget(self) -> None:
        """Nothing outlives the bench."""


class TimedControl(VllmControl):
    """Notes for how long the server was told to pause."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.pauses_ms: list[float] = []
        self._since = 0.0

    def _pause(self, pause: Pause) -> None:
        self._since = time.monotonic()
        super()._pause(pause)

    def _go_on(self) -> None:
        super()._go_on()
        self.pauses_ms.append(1e3 * (time.monotonic() - self._since))


@dataclass
class World:
    """Versions on disk, and what runs on them."""

    folder: Path
    device: torch.device
    store: LocalWeights
    base: str = ""
    versions: list[str] = field(default_factory=list[str])
    by_role: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    states: dict[tuple[str, str], EngineState] = field(default_factory=dict[tuple[str, str], EngineState])

    def make(self, size: str, tokenizer: Path, releases: int) -> None:
        """The base, and a version for each release."""
        draft = self.folder / "base"
        draft.mkdir()
        for name in TOKENIZER:
            shutil.copyfile(tokenizer / name, draft / name)
        random_llama(draft, size, device=self.device, context=CONTEXT, sharp=SHARP)
        self.base = self.publish(draft)
        tensors = load_file(draft / WEIGHTS)
        for number in range(releases):
            factor = 0.85 - 0.01 * number if number % 2 else 1.25 + 0.01 * number
            tensors_of = {name: t * factor if "norm" in name and t.dim() == 1 else t for name, t in tensors.items()}
            write_snapshot(self.folder / f"release{number}", tensors_of, like=draft)
            self.versions.append(self.publish(self.folder / f"release{number}"))

    def publish(self, draft: Path) -> str:
        """Into the store, with what it says of the fixed text."""
        tokens = probe_tokens(draft)
        with torch.inference_mode():
            said = token_logprobs(self.model(draft), tokens[:1], tokens[1:]).tolist()
        write_expected(draft, Expected(tokens=tokens, logprobs=tuple(said)))
        return self.store.publish(draft)

    def model(self, folder: Path) -> PreTrainedModel:
        """In fp32, to say what a version says."""
        return load_model(folder, dtype=torch.float32).to(self.device)  # pyright: ignore[reportArgumentType] - transformers' own `to`

    def ledger(self, url: str) -> Ledger:
        return Ledger(f"{SCHEME}{url}", self.states, self.by_role)


def step_and_delta(world: World) -> dict[str, Any]:
    """One real AdamW step from the base, and what its delta costs."""
    base = world.store.path(world.base)
    trainer = LocalTrainer(TrainerSetup(snapshot=base, scratch=world.folder, dtype="bfloat16", share_prefixes=False))
    generator = torch.Generator().manual_seed(0)
    data = [
        Datum(
            tokens=tuple(torch.randint(VOCABULARY, (512,), generator=generator).tolist()), first_scored=256, logprobs=(-10.8,) * 256,
            advantages=(1.0 if number % 2 else -1.0,) * 256,
        )
        for number in range(8)
    ]  # fmt: skip
    trainer.forward_backward(data, LossSpec(normaliser=1e4))
    trainer.optim_step(AdamParams(learning_rate=3e-6))
    draft = world.folder / "stepped"
    trainer.save_weights_for_sampler(draft, like=base)
    trainer.close()
    del trainer
    before, after = load_file(base / WEIGHTS), load_file(draft / WEIGHTS)
    size, digests = sum(t.nbytes for t in after.values()), (world.base, digest_of(after))
    encoded, delta = _fastest(lambda: encode_delta(before, after, digests=digests))
    changed = sum(int((before[name].view(torch.int16) != after[name].view(torch.int16)).sum()) for name in after)
    decoded, new = _fastest(lambda: apply_delta(before, delta, base_digest=world.base))
    same = all(torch.equal(new[name].view(torch.int16), after[name].view(torch.int16)) for name in after)
    return {
        "weights_gb": round(size / 1e9, 2), "density": round(changed / (size / 2), 4), "ratio": round(size / len(delta)),
        "bits_per_changed": round(8 * len(delta) / max(1, changed), 2), "encode_gb_s": round(size / 1e9 / encoded, 2),
        "apply_and_digest_gb_s": round(size / 1e9 / decoded, 2), "bit_exact": same,
    }  # fmt: skip


def _fastest(work: Callable[[], Made]) -> tuple[float, Made]:
    def once() -> tuple[float, Made]:
        started = time.monotonic()
        made = work()
        return time.monotonic() - started, made

    return min((once() for _ in range(3)), key=lambda timed: timed[0])


def start(world: World, python: str, share: float, *, graphs: bool, more: Sequence[str]) -> tuple[str, "subprocess.Popen[bytes]", Path]:
    """A vLLM server on the base; its address, process and log."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    log = world.folder / f"vllm-{port}.log"
    compiled = ["--compilation-config", '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}'] if graphs else ["--enforce-eager"]
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(world.store.path(world.base)), "--served-model-name", world.base,
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "1024", "--max-num-seqs", "32",
        "--gpu-memory-utilization", str(share), "--logprobs-mode", "processed_logprobs", "--enable-scale-out",
        "--weight-transfer-config", '{"backend": "ratchet"}', *compiled, *more,
    ]  # fmt: skip
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | ENVIRONMENT, cwd=world.folder, start_new_session=True
        )
    return f"http://127.0.0.1:{port}", process, log


def wait(url: str, process: "subprocess.Popen[bytes]", log: Path, within_s: float) -> None:
    """Until it answers. Raises `SystemExit` with the end of its log."""
    until = time.monotonic() + within_s
    while time.monotonic() < until and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=2.0, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.3)
    raise SystemExit(f"vLLM did not start within {within_s:.0f} s:\n" + log.read_text(errors="replace")[-5000:])


async def drive(world: World, urls: Sequence[str], arguments: argparse.Namespace) -> tuple[Load, list[float]]:
    """The two phases; the load, and seconds for each swap as the ledger saw it."""
    ledger, took = world.ledger(urls[0]), list[float]()

    async def until_held(digest: str, url: str) -> None:
        began = time.monotonic()
        while f"{SCHEME}{url}" not in ledger.addresses(digest):
            if time.monotonic() - began > arguments.patience:
                raise SystemExit(f"{url} does not hold {digest[:12]} after {arguments.patience:.0f} s: {world.states}")
            await asyncio.sleep(0.02)
        took.append(time.monotonic() - began)

    async with ServerEngines(Vllm(), list(urls), holders=ledger.holders) as engines:
        load, stop = Load(engines, world.base, tokens=arguments.tokens), asyncio.Event()
        streams = [asyncio.ensure_future(load.stream(index, stop)) for index in range(arguments.streams)]
        await asyncio.sleep(arguments.calm)
        load.phase, champion = "swapping", world.base
        for release in world.versions:
            world.by_role["candidate"] = [release]
            await until_held(release, urls[1])
            world.by_role.update(champion=[release], previous=[champion], candidate=[])
            load.current = release
            await until_held(release, urls[0])
            await until_held(champion, urls[1])
            champion = release
        stop.set()
        await asyncio.gather(*streams)
    return load, took


def judged(world: World, load: Load) -> dict[str, Any]:
    """Whose tokens the answers are, by the weights themselves."""
    chosen = random.Random(5).sample(load.answers, min(SCORED, len(load.answers)))
    digests = [world.base, *world.versions]
    gaps: dict[int, dict[str, Tensor]] = {index: {} for index in range(len(chosen))}
    logged_all, scored_all = list[float](), list[float]()
    for digest in digests:
        model = world.model(world.store.path(digest))
        for index, (claimed, chunks) in enumerate(chosen):
            tokens, logged = [t for c in chunks for t in c.tokens], [v for c in chunks for v in c.logprobs]
            with torch.inference_mode():
                said = token_logprobs(model, chunks[-1].prompt_tokens or [], tokens).cpu()
            gaps[index][digest] = (said - torch.tensor(logged)).abs()
            if claimed == digest and not chunks[-1].mixed_versions:
                logged_all += logged
                scored_all += said.tolist()
        del model
    unsaid = [(claimed, gaps[index]) for index, (claimed, chunks) in enumerate(chosen) if not chunks[-1].mixed_versions]
    wrong = sum(any(float(gap.mean()) < float(found[claimed].mean()) for gap in found.values()) for claimed, found in unsaid)
    kl, gap = divergence(logged_all, scored_all)
    return {"mixed_weight_answers": wrong, "answers_scored": len(chosen), "mismatch_kl": float(f"{kl:.2g}"), "largest_gap": round(gap, 3)}


def served(world: World, arguments: argparse.Namespace, stack: ExitStack) -> list[TimedControl]:
    """Two servers on the base and what keeps them on their versions, the champion's first; `stack` ends them."""
    graphs = arguments.device == "cuda" and not arguments.no_graphs
    servers = [start(world, arguments.vllm, arguments.share, graphs=graphs, more=arguments.more.split()) for _ in range(2)]
    for _, process, _ in servers:
        stack.callback(process.terminate)
    for url, process, log in servers:
        wait(url, process, log, arguments.patience)
    world.by_role["champion"] = [world.base]
    controls, stop = [TimedControl(url) for url, _, _ in servers], threading.Event()
    for control, role in zip(controls, ("champion", "candidate"), strict=True):
        resident = InPlace(KeptServer(control, world.store), world.ledger(control.url), policy="composer", role=role)
        resident.turn()
        keeper = threading.Thread(target=keep_versions, args=(resident,), kwargs={"stop": stop}, daemon=True)
        keeper.start()
        stack.callback(keeper.join)
    stack.callback(stop.set)
    return controls


def felt(load: Load, took: Sequence[float], controls: Sequence[TimedControl]) -> dict[str, Any]:
    """What releases cost those who ask."""
    calm, releasing = (float(np.percentile(load.seconds[phase], 99)) for phase in ("calm", "swapping"))
    pauses = [pause for control in controls for pause in control.pauses_ms]
    return {
        "swaps": len(pauses), "pause_ms": {"median": round(float(np.median(pauses))), "longest": round(max(pauses))},
        "swap_s": round(float(np.median(took)), 2), "request_p99_ratio": round(releasing / calm, 2),
        "request_p99_s": {"calm": round(calm, 2), "releasing": round(releasing, 2)}, "answers": len(load.answers),
        "tokens": sum(len(chunk.tokens) for _, chunks in load.answers for chunk in chunks), "errors": len(load.errors),
        "first_errors": load.errors[:3], "mixed_and_said": sum(bool(chunks[-1].mixed_versions) for _, chunks in load.answers),
    }  # fmt: skip


def main() -> None:
    """Measure; the last line is JSON. Exits with 1 for an answer that failed or is of other weights than it says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=os.path.abspath, default=sys.executable, help="Python of vLLM's environment, with infra/vllm in it")
    parser.add_argument("--size", choices=list(SHAPES), default="1.5b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokenizer", type=Path, default=Path(".cache/models/smollm2-135m-instruct"))
    parser.add_argument("--share", type=float, default=0.25, help="of the GPU's memory, for each server")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer at most")
    parser.add_argument("--releases", type=int, default=3)
    parser.add_argument("--calm", type=float, default=15.0, help="seconds without releases")
    parser.add_argument("--patience", type=float, default=90.0, help="seconds for a server to start, or to take up a version")
    parser.add_argument("--more", default="", help="further arguments for vLLM, in one string")
    parser.add_argument("--no-graphs", action="store_true", help="serve without CUDA graphs")
    arguments = parser.parse_args()
    began = time.monotonic()

    def said(what: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {what}", flush=True)

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        world = World(Path(folder), torch.device(arguments.device), LocalWeights(Path(folder) / "store"))
        world.make(arguments.size, arguments.tokenizer, arguments.releases)
        said(f"made {1 + arguments.releases} versions")
        delta = step_and_delta(world)
        said(f"delta {delta}")
        torch.cuda.empty_cache()
        controls = served(world, arguments, stack)
        said("both servers answer")
        load, took = asyncio.run(drive(world, [control.url for control in controls], arguments))
        said(f"{len(took)} swaps, {len(load.answers)} answers")
        figures = {
            "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
            "size": arguments.size, "delta": delta, **felt(load, took, controls), **judged(world, load),
        }  # fmt: skip
    print(json.dumps(figures))
    raise SystemExit(bool(figures["errors"] or figures["mixed_weight_answers"] or not delta["bit_exact"]))


if __name__ == "__main__":
    main()
