"""`make bench-engine`: the embedded engine's decoder beside transformers' `generate`, on SmolLM2, one process, same dtype and threads.

    speed       64 tokens of prompt, 32 new ones, temperature 1, with log-probabilities, at batch 1, 8 and 32: tokens per second and per
                CPU-second, turn and turn about; the ratios are medians over the rounds. Ours takes as many of the threads as are fastest,
                as it does when it serves (`app.serving.threads`)
    exactness   log-probabilities alone, in company, scored in one pass and drafted: bits that differ, seeded answers that are the same
    lookup      edits (the old text in the prompt, the new one as the answer) and plain chat, with drafts and without, one at a time

The edits' answers are forced: SmolLM2 does not write them by itself, and what is measured is what drafting saves where a model does.
vLLM takes part where `.cache/vllm-venv` has it, in a process of its own on as many threads.

    python -m tests.bench.engine --quick      fewer rounds, no vLLM
    GOMP_SPINCOUNT=5000 python -m tests.bench.engine
                                              threads wait as `ratchet up` lets them: faster by the wall, dearer by processor time
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor, nn

from app.domain.telemetry.turns import SamplingParams
from app.policy.decoding.invariance import invariance
from app.policy.decoding.sampling import DRAFT_ROWS, Decoder
from app.policy.model import Policy, load_model, load_policy
from app.serving.threads import Threads

MODEL = Path(".cache/models/smollm2-135m-instruct")
VLLM = Path(".cache/vllm-venv/bin/python")
BATCHES = (1, 8, 32)
BOUNDS = {1: 1.8, 8: 1.6, 32: 1.6}
PROMPT, NEW = 64, 32
SOURCES = (
    "app/policy/distribution.py",
    "app/policy/storage/prune.py",
    "app/policy/chat.py",
    "app/serving/refusals.py",
    "app/domain/release/assignment.py",
)
CHATS = (
    "Write a letter to a friend about the sea.", "Why is the sky blue? Explain it to a child.", "Give me three ideas for dinner.",
    "What makes a good teacher?", "Tell me a short story about a fox.", "How do I learn to play the piano?",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What one run cost."""

    tokens: int
    wall_s: float
    cpu_s: float


def spent(tokens: int, act: Callable[[], object]) -> Spent:
    started, cpu = time.perf_counter(), time.process_time()
    act()
    return Spent(tokens=tokens, wall_s=time.perf_counter() - started, cpu_s=time.process_time() - cpu)


def prompts(batch: int) -> list[list[int]]:
    random = torch.Generator().manual_seed(batch)
    return [torch.randint(100, 40_000, (PROMPT,), generator=random).tolist() for _ in range(batch)]


def ours(policy: Policy, asked: Sequence[Sequence[int]], threads: Threads) -> None:
    decoder = Decoder(policy, max_rows=len(asked))
    answers = [decoder.submit(prompt, SamplingParams(max_tokens=NEW, seed=index)) for index, prompt in enumerate(asked)]

    def step() -> int:
        prompted, rows = decoder.prompted, len(decoder.step())
        return rows if decoder.prompted == prompted else 0

    threads.begin()
    while decoder.busy:
        threads.round(step)
    decoder.close()
    assert all(len(answer.logprobs) == NEW for answer in answers)


def theirs(model: Any, asked: Sequence[Sequence[int]]) -> None:
    tokens = torch.tensor(asked)
    with torch.inference_mode():
        made = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=True, temperature=1.0, top_k=0, top_p=1.0, min_new_tokens=NEW,
            max_new_tokens=NEW, return_dict_in_generate=True, output_scores=True, pad_token_id=0,
        )  # fmt: skip
        model.compute_transition_scores(made.sequences, made.scores, normalize_logits=True)


def speed(policy: Policy, model: Any, *, rounds: int) -> dict[str, Any]:
    """Turn and turn about."""
    endless, most = replace(policy, end_tokens=frozenset()), torch.get_num_threads()
    found: dict[str, Any] = {}
    for batch in BATCHES:
        asked, pairs, threads = prompts(batch), list[tuple[Spent, Spent]](), Threads(most)
        ours(endless, asked, threads)
        for _ in range(rounds):
            our = spent(batch * NEW, lambda asked=asked, threads=threads: ours(endless, asked, threads))
            torch.set_num_threads(most)
            pairs.append((our, spent(batch * NEW, lambda asked=asked: theirs(model, asked))))
        found[str(batch)] = {
            "tokens_per_cpu_s": round(median(a.tokens / a.cpu_s for a, _ in pairs), 1),
            "tokens_per_s": round(median(a.tokens / a.wall_s for a, _ in pairs), 1),
            "generate_tokens_per_cpu_s": round(median(b.tokens / b.cpu_s for _, b in pairs), 1),
            "generate_tokens_per_s": round(median(b.tokens / b.wall_s for _, b in pairs), 1),
            "cpu_ratio": round(median(b.cpu_s / a.cpu_s for a, b in pairs), 2),
            "wall_ratio": round(median(b.wall_s / a.wall_s for a, b in pairs), 2),
            "threads": threads.count,
        }  # fmt: skip
        print(json.dumps({batch: found[str(batch)]}), flush=True)
    return found


class Forced(nn.Module):
    """A head that lets the next token of a known answer come with certainty, by how far the decoder is; as dear as the real one."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head
        self.answer: list[int] = []
        self.at: Callable[[], int] = lambda: 0

    def forward(self, hidden_ND: Tensor) -> Tensor:
        logits_NV, at = self.head(hidden_ND), self.at()
        for row in range(len(logits_NV)):
            if at + row < len(self.answer):
                logits_NV[row, self.answer[at + row]] = 1e4
        return logits_NV


def edits() -> list[tuple[str, str]]:
    """Functions of this project and what an edit makes of them: a name changed, a line put in, a number changed."""
    found: list[tuple[str, str]] = []
    for source in SOURCES:
        for index, text in enumerate(Path(source).read_text().split("\ndef ")[1:4]):
            old = "def " + text.split("\nclass ")[0].strip()[:900]
            lines = old.splitlines()
            if index == 0:
                new = "\n".join([lines[0].replace("(", "_of(", 1), *lines[1:]])
            elif index == 1:
                new = "\n".join([*lines[: len(lines) // 2], "    # looked at once more", *lines[len(lines) // 2 :]])
            else:
                new = old.replace("0", "1").replace("self", "this")
            found.append((old, new))
    return found


def one_by_one(policy: Policy, asked: list[tuple[list[int], list[int] | None]], *, draft_rows: int, tokens: int) -> tuple[Spent, Decoder]:
    """Answers one after the other; with a forced answer where there is one."""
    decoder, head, total = Decoder(policy, max_rows=1, draft_rows=draft_rows), policy.model.get_output_embeddings(), 0

    def work() -> None:
        nonlocal total
        for prompt, forced in asked:
            answer = decoder.submit(prompt, SamplingParams(max_tokens=len(forced) if forced else tokens, seed=len(prompt)))
            if isinstance(head, Forced):
                head.answer, head.at = forced or [], lambda answer=answer: len(answer.tokens)
            while decoder.busy:
                decoder.step()
            total += len(answer.tokens)

    cost = spent(0, work)
    decoder.close()
    return replace(cost, tokens=total), decoder


def lookup(policy: Policy, *, few: bool) -> dict[str, Any]:
    """What drafts save."""
    chat = policy.chat
    suite: list[tuple[list[int], list[int] | None]] = [
        (chat.prompt([{"role": "user", "content": f"Edit this function as I asked:\n{old}"}]), chat.encode(new)[:256])
        for old, new in edits()
    ]
    suite = suite[:4] if few else suite
    talk: list[tuple[list[int], list[int] | None]] = [
        (chat.prompt([{"role": "user", "content": text}]), None) for text in CHATS[: 3 if few else 6]
    ]
    head = policy.model.get_output_embeddings()
    found: dict[str, Any] = {}
    for name, asked in (("edits", suite), ("chat", talk)):
        if name == "edits":
            policy.model.set_output_embeddings(Forced(cast("torch.nn.Module", head)))
        ratios, walls, share = list[float](), list[float](), 0.0
        for _ in range(1 if few else 3):
            plain, _ = one_by_one(policy, asked, draft_rows=0, tokens=48)
            drafted, decoder = one_by_one(policy, asked, draft_rows=DRAFT_ROWS, tokens=48)
            assert plain.tokens == drafted.tokens, "drafts changed an answer"
            ratios.append(plain.cpu_s / drafted.cpu_s)
            walls.append(plain.wall_s / drafted.wall_s)
            share = decoder.accepted / max(1, decoder.drafted)
        policy.model.set_output_embeddings(head)
        found[name] = {"cpu_speedup": round(median(ratios), 2), "wall_speedup": round(median(walls), 2), "acceptance": round(share, 2)}
        print(json.dumps({name: found[name]}), flush=True)
    return found


VLLM_SCRIPT = """
import json, os, sys, time
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", OMP_NUM_THREADS=sys.argv[2], VLLM_CPU_KVCACHE_SPACE="1")
from vllm import LLM, SamplingParams
import torch
def main():
    torch.set_num_threads(int(sys.argv[2]))
    llm = LLM(sys.argv[1], dtype=sys.argv[5], enforce_eager=True, max_model_len=256, max_num_seqs=32)
    asked = json.loads(sys.argv[3])
    params = SamplingParams(max_tokens=32, min_tokens=32, ignore_eos=True, temperature=1.0, logprobs=0)
    for batch in (1, 8, 32):
        best = []
        for _ in range(int(sys.argv[4])):
            a, c = time.perf_counter(), time.process_time()
            llm.generate([{"prompt_token_ids": p} for p in asked[:batch]], params, use_tqdm=False)
            best.append((32 * batch / (time.process_time() - c), 32 * batch / (time.perf_counter() - a)))
        cpu, wall = sorted(best)[len(best) // 2]
        print("VLLM", json.dumps({str(batch): {"tokens_per_cpu_s": round(cpu, 1), "tokens_per_s": round(wall, 1)}}), flush=True)
main()
"""


def vllm(threads: int, dtype: str, *, rounds: int) -> dict[str, Any] | str:
    """vLLM's figures, or why there are none."""
    if not VLLM.is_file():
        return f"not there: {VLLM} (make test-real installs it)"
    command = [str(VLLM), "-c", VLLM_SCRIPT, str(MODEL.resolve()), str(threads), json.dumps(prompts(32)), str(rounds), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    lines = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("VLLM ")]
    return {key: value for line in lines for key, value in line.items()} or f"it did not run: {done.stderr.strip()[-300:]}"


def missed(found: dict[str, Any]) -> list[str]:
    """Bounds that did not hold."""
    faults = [
        f"batch {batch}: {found['speed'][str(batch)]['cpu_ratio']} times generate, {bound} is the bound"
        for batch, bound in BOUNDS.items()
        if found["speed"][str(batch)]["cpu_ratio"] < bound
    ]
    if found["lookup"]["edits"]["cpu_speedup"] < 2.0:
        faults.append(f"edits: {found['lookup']['edits']['cpu_speedup']} times, 2 is the bound")
    if found["lookup"]["chat"]["cpu_speedup"] < 0.97:
        faults.append(f"chat: {found['lookup']['chat']['cpu_speedup']} times, .97 is the bound")
    if found["differing_bits"] or found["seeded_equal"] < 1:
        faults.append(f"{found['differing_bits']} of {found['compared']} log-probabilities differ, {found['seeded_equal']} answers equal")
    return faults


def main(arguments: list[str] | None = None) -> int:
    """Run as a program; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.engine")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="of both; default: what engines serve in here")
    options = parser.parse_args(arguments)
    if os.environ.get("OMP_WAIT_POLICY") != "PASSIVE" and "GOMP_SPINCOUNT" not in os.environ:
        # waiting threads that spin cost tenfold on shared cores, and the policy is read when the libraries load
        os.execvpe(sys.executable, [sys.executable, "-m", "tests.bench.engine", *sys.argv[1:]], os.environ | {"OMP_WAIT_POLICY": "PASSIVE"})
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    policy, model = load_policy(MODEL, dtype=dtype), load_model(MODEL, dtype=dtype).eval()
    exact = invariance(policy, tokens=4 if options.quick else 24)
    found: dict[str, Any] = {
        "threads": options.threads, "spins": os.environ.get("GOMP_SPINCOUNT", "0"),
        "dtype": str(policy.model.dtype), "differing_bits": exact.differing_bits, "compared": exact.compared,
        "seeded_equal": exact.seeded_equal, "lookup": lookup(policy, few=options.quick),
        "speed": speed(policy, model, rounds=1 if options.quick else 5),
        "vllm": None if options.quick else vllm(options.threads, str(policy.model.dtype).removeprefix("torch."), rounds=5),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }  # fmt: skip
    found["missed"] = missed(found)
    print(json.dumps(found))
    return 1 if found["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
