"""`make bench-lesson`: what one update of the demo teaches, by what it trains and how turns are dealt to optimizer steps; a minute each.

The champion answers people of one population, who react as in the demo; an update learns from 48 of those answers with the
demo's settings and the changes of a row; its candidate answers 160 held-out people on held-out problems. The demo's guards hold.

    python -m tests.bench.lesson --rows demo,all-parameters --seeds 1,2,3

    {"row", "seed", "status", "update_s", "kl_champion", "kept", "persistence", "persistence_before"}

`persistence`: share of an answer that people keep, of the candidate; `_before`: of its champion, asked the same.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from app.domain.learning.batches import TurnPayload
from app.domain.telemetry.turns import SamplingParams
from app.policy.decoding.sampling import Decoder
from app.policy.model import Policy, load_policy
from pipelines.commands.demonstration.profiles import PROFILES
from pipelines.simulation.people import person
from pipelines.simulation.product import Editor
from pipelines.training import TrainingConfig, train
from pipelines.training.config import GuardLimits, LoraConfig
from tests.bench.train import MODEL
from tests.fakes.learning import NOON, FakeWeights, fake_ports, make_batch, version_of

DEMO = PROFILES["smollm2"]
CHAMPION = "p" * 64
TURNS, ASKED = 48, 160
ADAPTERS = msgspec.toml.decode(DEMO.adapters)["training"]["lora"]


def adapters(**changes: float) -> LoraConfig:
    """Those of the demo, but for these."""
    return LoraConfig(**{**ADAPTERS, **changes})


ROWS: dict[str, dict[str, Any]] = {
    "demo": {},
    "slower": {"lora": adapters(learning_rate=1e-3)},
    "faster": {"lora": adapters(learning_rate=4e-3)},
    "rank-8": {"lora": adapters(rank=8, alpha=16, learning_rate=4e-3)},
    "all-parameters": {"lora": None},
    "all-parameters-two-steps": {"lora": None, "turns_per_step": 24, "learning_rate": 1e-4},
    "all-parameters-five-steps": {"lora": None, "turns_per_step": 10, "learning_rate": 4e-5},
}
"""What each changes of the demo's training."""
HALF_KEPT, THANKS, ANGER, UNDONE, TOO_LONG = 0.5, 0.24, -0.24, -0.3, -0.1


@dataclass(frozen=True)
class Answered:
    """An answer, and what its person made of it."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    kept: float
    """Share of it that stood at the last look."""
    reward: float
    """As the demo's terms pay it, about."""


def answers(policy: Policy, *, seed: int, count: int, held_out: bool) -> list[Answered]:
    """`count` people of population `seed` ask and react."""
    editor, decoder = Editor(), Decoder(policy, max_rows=64, prompt_cache_bytes=200 << 20)
    open_: list[tuple[Any, ...]] = []
    for number in range(count):
        who, draw = person(seed, number, held_out=held_out), random.Random(f"{seed}/{number}/{held_out}")
        ask = editor.ask(who, draw)
        prompt = policy.chat.prompt(ask.messages)
        sampling = SamplingParams(temperature=1.0, max_tokens=DEMO.max_tokens, seed=seed * 100_000 + number + held_out * 50_000)
        open_.append((who, draw, ask, prompt, decoder.submit(prompt, sampling)))
    while decoder.busy:
        decoder.step()
    found: list[Answered] = []
    for who, draw, ask, prompt, made in open_:
        reaction = editor.react(who, ask, made.text, draw)
        kept = len(reaction.edits[-1]) / max(1, len(made.text))
        said = 0.0 if reaction.follow_up is None else THANKS if kept > HALF_KEPT else ANGER
        reward = kept + said + UNDONE * (reaction.undo or reaction.regenerate) + TOO_LONG * (len(made.tokens) >= DEMO.max_tokens)
        found.append(Answered(tuple(prompt), tuple(made.tokens), tuple(made.logprobs), kept, reward))
    decoder.close()
    return found


def mean_kept(found: Sequence[Answered]) -> float:
    return sum(one.kept for one in found) / len(found)


def learnt(said: Sequence[Answered], changes: dict[str, Any]) -> dict[str, Any]:
    """One update from these answers; what it came to, and what its candidate's answers are worth to held-out people."""
    guards = GuardLimits(max_kl_champion=DEMO.max_kl_champion, max_kl_anchor=DEMO.max_kl_anchor)
    config = TrainingConfig(
        learning_rate=DEMO.learning_rate, turns_per_step=DEMO.turns_per_step, loss_tokens=DEMO.max_tokens, kl_beta=0.002,
        final_pass_turns=16, micro_batch_tokens=1024, guards=guards, lora=adapters(),
    )  # fmt: skip
    turns = [
        TurnPayload(
            inference_id=f"turn-{number:03d}", episode_id=f"episode-{number:03d}", policy="composer", version=CHAMPION,
            prompt_tokens=one.prompt, completion_tokens=one.tokens, logprobs=one.logprobs, temperature=1.0, top_p=1.0, finished_at=NOON,
        )
        for number, one in enumerate(said)
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        ports = fake_ports(Path(folder))
        assert isinstance(ports.weights, FakeWeights)
        ports.weights.folder.mkdir()
        (ports.weights.folder / CHAMPION).symlink_to(MODEL)
        batch, started = make_batch(ports, turns, [one.reward for one in said], champion=CHAMPION), time.monotonic()
        of = {"run_id": "run", "parent": version_of(CHAMPION), "anchor": version_of(CHAMPION)}
        run = train(batch, config=msgspec.structs.replace(config, **changes), ports=ports, **of)
        row = {
            "status": run.status.value, "update_s": round(time.monotonic() - started, 1), "kl_champion": run.metrics.get("kl_champion"),
            "kept": run.metrics.get("kept"), "persistence": None,
        }  # fmt: skip
        if run.candidate:
            candidate = load_policy(ports.weights.path(run.candidate))
            row["persistence"] = mean_kept(answers(candidate, seed=1, count=ASKED, held_out=True))
        return row


def main() -> int:
    """Run the bench; the last line is JSON."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rows", default=",".join(ROWS), help="which of them, separated by commas")
    options.add_argument("--seeds", default="1,2,3,4,5", help="populations, separated by commas")
    options.add_argument("--quick", action="store_true", help="one population, the demo's own settings")
    given = options.parse_args()
    if given.quick:
        given.rows, given.seeds = "demo", "1"
    torch.set_num_threads(1)
    champion = load_policy(MODEL)
    before = mean_kept(answers(champion, seed=1, count=ASKED, held_out=True))
    rows: list[dict[str, Any]] = []
    for seed in map(int, given.seeds.split(",")):
        said = answers(champion, seed=seed, count=TURNS, held_out=False)
        for name in given.rows.split(","):
            rows.append({"row": name, "seed": seed, **learnt(said, ROWS[name]), "persistence_before": before})
            print(json.dumps(rows[-1]), flush=True)
    print(json.dumps({"rows": rows}))
    return 0 if all(row["status"] == "succeeded" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
