"""Measures this machine on the demo's own model, in seconds: answers decoded together, and the gradient of a few turns.

A process of its own (`python -m pipelines.commands.demonstration.calibrate FOLDER ROWS`), so that the demo itself never loads torch. It
loads what it needs, waits for a line on its input (so that it loads beside other things and measures alone), and prints one line of JSON;
`planning` plans from it.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from app.domain.telemetry.turns import SamplingParams
from app.machine import usable_cores
from app.policy.decoding.sampling import Decoder
from app.policy.model import Policy, load_model, load_policy
from app.policy.scoring.forward import token_logprobs
from pipelines.training.numerics.precision import resolve_dtype

PROMPT_TOKENS, ANSWER_TOKENS = 100, 48
"""Of a usual turn of the demo."""
WORTH_IT = 1.1
"""How much faster all cores have to be than one: the demo's other processes want some of them as well."""
STEPS = 3
"""Decoding steps that are timed at a time, after one that is not."""
ROUNDS = 2
"""How often each number of threads is tried, turn and turn about: what disturbs a machine for a second must not choose for minutes."""


def main(folder: Path, rows: int, begin: Callable[[], object]) -> dict[str, float]:
    """What `planning.Speed` holds, with `rows` people asking at once; `begin` returns when the machine is ours.

    One thread and all of them are both tried: where other programs want the cores, threads wait for each other more than they help.
    """
    cores, counts = usable_cores(), sorted({1, usable_cores()})
    policy, model = load_policy(folder), load_model(folder, dtype=torch.float32).train()
    begin()
    answers, turns = _answers_per_s(policy, rows, counts), _turn_s(model, counts)
    fastest = max(counts, key=lambda count: answers[count] / (1.0 if count == 1 else WORTH_IT))
    quickest = min(counts, key=lambda count: turns[count] * (1.0 if count == 1 else WORTH_IT))
    return {
        "cores": cores, "answers_per_s": round(answers[fastest], 3), "engine_threads": fastest, "turn_s": round(turns[quickest], 3),
        "training_threads": quickest,
    }  # fmt: skip


def _answers_per_s(policy: Policy, rows: int, counts: Sequence[int]) -> dict[int, float]:
    """By the number of threads."""
    decoder = Decoder(policy, max_rows=rows)
    prompt = [1 + i % 200 for i in range(PROMPT_TOKENS)]  # the same for all, so that it is fed once
    for _ in range(rows):
        decoder.submit(prompt, SamplingParams(temperature=1.0, max_tokens=ANSWER_TOKENS))
    while decoder.load == rows and len(decoder.step()) < rows:
        pass  # until everybody has begun

    def steps() -> float:
        decoder.step()
        return statistics.median(_lasts(decoder.step) for _ in range(STEPS))

    found = {count: rows / seconds / ANSWER_TOKENS for count, seconds in _least(steps, counts).items()}
    decoder.close()
    return found


def _turn_s(model: PreTrainedModel, counts: Sequence[int]) -> dict[int, float]:
    """A forward and a backward pass as an update makes them: float32 weights, products in what this processor does faster."""
    prompt, answer = list(range(5, 5 + PROMPT_TOKENS)), list(range(300, 300 + ANSWER_TOKENS))
    dtype = resolve_dtype("auto")

    def turn() -> None:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
            loss = -token_logprobs(model, prompt, answer).mean()
        loss.backward()  # pyright: ignore[reportUnknownMemberType] - torch leaves its signature open

    turn()
    return _least(lambda: _lasts(turn), counts)


def _least(seconds: Callable[[], float], counts: Sequence[int]) -> dict[int, float]:
    """The least of some rounds, by the number of threads."""
    found: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(ROUNDS):
        for count in counts:
            torch.set_num_threads(count)
            found[count].append(seconds())
    return {count: min(tried) for count, tried in found.items()}


def _lasts(act: Callable[[], object]) -> float:
    """Seconds."""
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), sys.stdin.readline)) + "\n")
