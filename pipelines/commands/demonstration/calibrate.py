"""Measures this machine on the demo's own model, in seconds: answers decoded together, and the gradient of a few turns.

A process of its own (`python -m pipelines.commands.demonstration.calibrate FOLDER ROWS`), so that the demo itself never loads torch. It
loads what it needs, waits for a line on its input (so that it loads beside other things and measures alone), and prints one line of JSON;
`planning` plans from it.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
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
STEPS = 5
"""Decoding steps that are timed, after one that is not."""
ROUNDS = 2
"""Turns that are timed: what disturbs a machine for a second must not choose for minutes."""


def main(folder: Path, rows: int, begin: Callable[[], object]) -> dict[str, float]:
    """What `planning.Speed` holds, with `rows` people asking at once; `begin` returns when the machine is ours.

    Answers with one thread and with all of them: the engine finds out as it goes. The update gets half of the cores, because people go on
    asking: beside them two threads on two cores took as long a turn as one, or longer, though alone they take 0.6 of it.
    """
    cores = usable_cores()
    half = max(1, cores // 2)
    policy, model = load_policy(folder), load_model(folder, dtype=torch.float32).train()
    begin()
    answers, turn = max(_answers_per_s(policy, rows, count) for count in sorted({1, cores})), _turn_s(model, half)
    return {"cores": cores, "answers_per_s": round(answers, 3), "turn_s": round(turn, 3), "training_threads": half}


def _answers_per_s(policy: Policy, rows: int, threads: int) -> float:
    torch.set_num_threads(threads)
    decoder = Decoder(policy, max_rows=rows)
    prompt = [1 + i % 200 for i in range(PROMPT_TOKENS)]  # the same for all, so that it is fed once
    for _ in range(rows):
        decoder.submit(prompt, SamplingParams(temperature=1.0, max_tokens=ANSWER_TOKENS))
    while decoder.load == rows and len(decoder.step()) < rows:
        pass  # until everybody has begun
    decoder.step()
    seconds = statistics.median(_lasts(decoder.step) for _ in range(STEPS))
    decoder.close()
    return rows / seconds / ANSWER_TOKENS


def _turn_s(model: PreTrainedModel, threads: int) -> float:
    """A forward and a backward pass as an update makes them: float32 weights, products in what this processor does faster."""
    torch.set_num_threads(threads)
    prompt, answer = list(range(5, 5 + PROMPT_TOKENS)), list(range(300, 300 + ANSWER_TOKENS))
    dtype = resolve_dtype("auto")

    def turn() -> None:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
            loss = -token_logprobs(model, prompt, answer).mean()
        loss.backward()  # pyright: ignore[reportUnknownMemberType] - torch leaves its signature open

    turn()
    return min(_lasts(turn) for _ in range(ROUNDS))


def _lasts(act: Callable[[], object]) -> float:
    """Seconds."""
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), sys.stdin.readline)) + "\n")
