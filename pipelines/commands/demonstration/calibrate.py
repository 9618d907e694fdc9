"""Measures this machine on the demo's own model, in seconds: answers decoded together, and the gradient of a few turns.

A process of its own (`python -m pipelines.commands.demonstration.calibrate FOLDER ROWS`), so that the demo itself never loads torch, and so
that it can run while the database is being prepared. Prints one line of JSON; `planning` plans from it.
"""

import json
import sys
import time
from pathlib import Path

import torch

from app.domain.turns import SamplingParams
from app.machine import usable_cores
from app.policy.forward import token_logprobs
from app.policy.model import load_model, load_policy
from app.policy.sampling import Decoder
from pipelines.training.precision import resolve_dtype

PROMPT_TOKENS, ANSWER_TOKENS = 100, 48
"""Of a usual turn of the demo."""
STEPS = 6
"""Decoding steps that are timed: the first ones of a process are slower than all others."""


def main(folder: Path, rows: int) -> dict[str, float]:
    """`answers_per_s` with `rows` people asking at once, `turn_s` for one turn's forward and backward pass, `cores` that may be used."""
    torch.set_num_threads(usable_cores())
    answers = _answers_per_s(folder, rows)
    return {"cores": usable_cores(), "answers_per_s": round(answers, 3), "turn_s": round(_turn_s(folder), 3)}


def _answers_per_s(folder: Path, rows: int) -> float:
    decoder = Decoder(load_policy(folder), max_rows=rows)
    prompt = [1 + i % 200 for i in range(PROMPT_TOKENS)]  # the same for all, so that it is fed once
    for _ in range(rows):
        decoder.submit(prompt, SamplingParams(temperature=1.0, max_tokens=ANSWER_TOKENS))
    while decoder.load == rows and len(decoder.step()) < rows:
        pass  # until everybody has begun
    tokens, started = 0, time.perf_counter()
    for _ in range(STEPS):
        tokens += len(decoder.step())
    lasted = time.perf_counter() - started
    decoder.close()
    return max(1, tokens) / lasted / ANSWER_TOKENS


def _turn_s(folder: Path) -> float:
    """A forward and a backward pass as an update makes them: float32 weights, products in what this processor does faster."""
    model = load_model(folder, dtype=torch.float32).train()
    prompt, answer = list(range(5, 5 + PROMPT_TOKENS)), list(range(300, 300 + ANSWER_TOKENS))
    dtype = resolve_dtype("auto")
    lasted: list[float] = []
    for _ in range(2):
        started = time.perf_counter()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
            loss = -token_logprobs(model, prompt, answer).mean()
        loss.backward()  # pyright: ignore[reportUnknownMemberType] - torch leaves its signature open
        lasted.append(time.perf_counter() - started)
    return min(lasted)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))) + "\n")
