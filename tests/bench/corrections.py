"""`make bench-corrections`: how many labels it takes until people keep what is written, by the reward, by what they made of it, or by both.

A product in the world of styles (`tests.learning.styles`): every answer goes into somebody's file, and what they keep of it is the reward
(edit persistence). Three people in four want the third style, in which the base writes one word in seven, the others want the second; so
.75 is the best that any version can reach. Half of the people rewrite the answer into what they wanted, one word in ten mistyped. Measured
on people and problems that no update saw.

| objective           | what is learned from                                                             |
|---------------------|----------------------------------------------------------------------------------|
| `scalar`            | the reward alone                                                                 |
| `self_distillation` | the corrections alone, the model with the correction in sight as its own teacher |
| `both`              | the reward and that teacher                                                      |
| `sft`, `dpo`        | the reward, and the pair (served, corrected) as the simple baselines have it     |

`labels`: until .45 of the answer is kept, mean and 95 % interval over seeds (never counts as the whole run). All share the
learning rate; each objective's weight was chosen on seed 100. Exit code 1 where what is found best is not the configuration's default
(of two whose labels differ by less than a batch, the one that ends higher), or where it does not need fewer labels than the reward alone.
`--resume FILE` runs it in pieces, a curve each (`tests.bench.common.pieces`).
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from app.domain.learning.corrections import Correction, CorrectionKind
from pipelines.training import TrainingConfig
from pipelines.training.hindsight.config import HindsightConfig
from tests.bench.common.pieces import Pieces, add_pieces, pieces_of
from tests.bench.common.styled import base_for, styled_arguments
from tests.learning.lines import CONFIG, Lesson, Line, interval
from tests.learning.styles import MOVES, Problem, Turn, answered, problems, styled, text_of

TURNS = 32
GOAL = 0.45
OBJECTIVES: dict[str, HindsightConfig] = {
    "scalar": HindsightConfig(objective="none"),
    "self_distillation": HindsightConfig(objective="self_distillation", weight=0.1, scalar_weight=0.0),
    "both": HindsightConfig(objective="self_distillation", weight=0.1),
    "sft": HindsightConfig(objective="sft", weight=0.3),
    "dpo": HindsightConfig(objective="dpo", weight=3.0),
}


class People:
    """Who asks, what they want, and whether they show it; the same for all objectives of a seed."""

    def __init__(self, seed: int) -> None:
        self.numbers = random.Random(f"people-{seed}")

    def wants(self) -> int:
        """The style of somebody new."""
        return 2 if self.numbers.random() < 0.75 else 1

    def shows(self, turn: Turn, style: int) -> Correction | None:
        """What half of them make of the answer."""
        wanted = list(styled(turn.problem, [style] * len(turn.problem)))
        for place in range(len(wanted)):
            if self.numbers.random() < 0.1:
                wanted[place] = self.numbers.randrange(24)
        rewrites, text = self.numbers.random() < 0.5, text_of(wanted)
        if not rewrites or tuple(wanted) == turn.answer:
            return None
        name = turn.payload.inference_id
        return Correction(inference_id=name, kind=CorrectionKind.DEMONSTRATION, said=text, wanted=text, author=f"author-of-{name}")


def kept(folder: Path, seed: int, *, count: int = 256) -> float:
    """What new people keep of answers to new problems."""
    people, asked = People(10_000 + seed), problems(count, 10_000 + seed)
    turns = answered(folder, asked, version="", seed=10_000 + seed, name="fresh")
    return statistics.fmean(turn.in_style(people.wants()) for turn in turns)


def curve(base: Path, objective: HindsightConfig, *, seed: int, cycles: int, config: TrainingConfig = CONFIG) -> list[float]:
    """What is kept before each cycle and after the last one."""
    with tempfile.TemporaryDirectory() as folder:
        line = Line(Path(folder), base, msgspec.structs.replace(config, hindsight=objective))
        people, found = People(seed), [kept(base, seed)]
        for cycle in range(cycles):
            asked: list[Problem] = problems(TURNS, seed * 1000 + cycle)
            turns = answered(line.folder, asked, version=line.version.digest, seed=seed * 1000 + cycle)
            wanted = [people.wants() for _ in turns]
            shown = [people.shows(turn, style) for turn, style in zip(turns, wanted, strict=True)]
            lessons = [Lesson(turn=turn, reward=turn.in_style(style)) for turn, style in zip(turns, wanted, strict=True)]
            line.learn(lessons, [correction for correction in shown if correction is not None])
            found.append(kept(line.folder, seed))
    return found


def labels_to_goal(found: list[float]) -> float:
    """Labels until the goal is first reached; those of the whole run where it never is."""
    return float(next((place for place, value in enumerate(found) if value >= GOAL), len(found) - 1) * TURNS)


def default_name() -> str:
    """Which of the objectives the configuration's default is."""
    default = HindsightConfig()
    if default.objective == "none":
        return "scalar"
    return next((name for name, objective in OBJECTIVES.items() if objective == default), f"none of these: {default.objective}")


def best_of(found: dict[str, dict[str, Any]]) -> str:
    """Fewest labels; of those within a batch of it, the one that ends highest."""
    fewest = min(row["labels"] for row in found.values())
    return max((name for name, row in found.items() if row["labels"] < fewest + TURNS), key=lambda name: found[name]["last"])


def main() -> int:
    """The last line is JSON."""
    parser = styled_arguments()
    parser.add_argument("--only", nargs="+", choices=OBJECTIVES, default=list(OBJECTIVES))
    parser.add_argument("--weight", type=float, help="Of the corrections, in place of each objective's own.")
    add_pieces(parser)
    arguments = parser.parse_args()
    return pieces_of(arguments, __file__).in_turn(lambda pieces: told(pieces, arguments))


def told(pieces: Pieces, arguments: argparse.Namespace) -> int:
    """All objectives that were asked for."""
    found: dict[str, dict[str, Any]] = {}
    with base_for(arguments.base) as base:
        for name in arguments.only:
            objective = OBJECTIVES[name]
            if arguments.weight is not None:
                objective = msgspec.structs.replace(objective, weight=arguments.weight)
            curves: list[list[float]] = [
                pieces.get(
                    f"{objective} seed {seed} cycles {arguments.cycles}",
                    partial(curve, base, objective, seed=seed, cycles=arguments.cycles),
                )
                for seed in arguments.seeds
            ]
            labels = [labels_to_goal(each) for each in curves]
            low, high = interval(labels)
            last = [statistics.fmean(each[-3:]) for each in curves]
            found[name] = {
                "labels": round(statistics.fmean(labels)), "interval": [round(low), round(high)],
                "first": round(statistics.fmean(each[0] for each in curves), 3), "last": round(statistics.fmean(last), 3),
                "last_interval": [round(value, 3) for value in interval(last)], "reached": sum(max(each) >= GOAL for each in curves),
            }  # fmt: skip
            print(name, found[name], flush=True)
    best = best_of(found)
    print(json.dumps({"objectives": found, "best": best, "default": default_name(), "turns_per_cycle": TURNS, "styles": len(MOVES)}))
    is_better = "scalar" not in found or found[best]["labels"] < found["scalar"]["labels"]
    return 0 if len(found) < len(OBJECTIVES) or (best == default_name() and is_better) else 1


if __name__ == "__main__":
    sys.exit(main())
