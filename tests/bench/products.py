"""`make bench-products`: products of different shapes, and what a label teaches in each, beside two plain ways to learn.

The products are in `tests.learning.shops`; what people do there goes through the shipped terms, rule set and classifier, the chains' pay
and the update itself, with the tests' learning rate and without guards. Every cycle asks 96 new problems (32 episodes of three turns in
`agent`); a label is a turn that an update learned from.

| method      | baseline                                                              | answers per prompt                     |
|-------------|-----------------------------------------------------------------------|----------------------------------------|
| `ours`      | the default: the segment's, where the same channels decided           | 1                                      |
| `one_mean`  | the segment's, whoever decided                                        | 1                                      |
| `reinforce` | the mean of the batch                                                 | 1                                      |
| `groups`    | the mean over the tries at one prompt, as TRL's GRPO without division | 4, which no production prompt ever has |

Per product and method: `liked_first`, `liked_last` (of new answers, mean over the last three cycles), its 95 % `interval` over the seeds,
`labels`, and `labels_per_10pp`, the labels for ten points more (null where nothing rose). Exit code 1 where ours rises in a product by
less than ten points, its interval reaches down to where it began, or plain REINFORCE ends higher by more than both intervals allow.
`--resume FILE` runs it in pieces, a seed of a method and product each (`tests.bench.common.pieces`).
"""

import argparse
import json
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from pipelines.training import TrainingConfig
from tests.bench.common.pieces import Pieces, add_pieces, pieces_of
from tests.bench.common.styled import base_for, styled_arguments
from tests.learning.lines import CONFIG, Line, interval
from tests.learning.shops import SHOPS, Shop, lessons_of
from tests.learning.styles import answered, problems

ASKED = 96
TRIES = 4
METHODS = {"ours": "segment_tracker", "one_mean": "segment_tracker", "reinforce": "batch_mean", "groups": "group_mean"}


def liked(shop: Shop, folder: Path, seed: int, *, count: int = 512) -> float:
    """Of new answers to new problems."""
    turns = answered(folder, problems(count, 20_000 + seed), version="", seed=20_000 + seed, name="fresh")
    return statistics.fmean(shop.liking(turn) for turn in turns)


def run(shop: Shop, method: str, base: Path, *, seed: int, cycles: int, config: TrainingConfig = CONFIG) -> tuple[list[float], int]:
    """What is liked before the first cycle and after the last three, and the labels used."""
    with tempfile.TemporaryDirectory() as folder:
        line = Line(Path(folder), base, msgspec.structs.replace(config, estimator=METHODS.get(method, method)))
        found, labels = [liked(shop, base, seed)], 0
        for cycle in range(cycles):
            name, long = seed * 1000 + cycle, shop.turns_per_episode
            tries = TRIES if method == "groups" else 1
            tasks = [problems(long, f"{name}-{task}") for task in range(ASKED // long // tries)]
            asked = [problem for task in tasks for _ in range(tries) for problem in task]
            turns = answered(line.folder, asked, version=line.version.digest, seed=name)
            lessons = lessons_of(shop, turns, name)
            if method in ("one_mean", "reinforce", "groups"):
                lessons = [lesson.of_any_channel() for lesson in lessons]
            labels += len(lessons)
            line.learn(lessons)
            if cycle >= cycles - 3:
                found.append(liked(shop, line.folder, seed))
    return found, labels


def figures(pieces: Pieces, name: str, method: str, base: Path, seeds: list[int], cycles: int) -> dict[str, Any]:
    """Of the product of that name, over the seeds."""
    runs: list[tuple[list[float], int]] = [
        pieces.get(f"{name} {method} seed {seed} cycles {cycles}", partial(run, SHOPS[name], method, base, seed=seed, cycles=cycles))
        for seed in seeds
    ]
    first = statistics.fmean(curve[0] for curve, _ in runs)
    last = [statistics.fmean(curve[-3:]) for curve, _ in runs]
    labels, gained = statistics.fmean(count for _, count in runs), statistics.fmean(last) - first
    return {
        "labels": round(labels), "liked_first": round(first, 3), "liked_last": round(statistics.fmean(last), 3),
        "interval": [round(value, 3) for value in interval(last)],
        "labels_per_10pp": round(labels / (gained * 10)) if gained > 0.005 else None,
    }  # fmt: skip


def missed(found: dict[str, dict[str, Any]]) -> list[str]:
    """The bounds that do not hold, a sentence each."""
    sentences: list[str] = []
    for product, methods in found.items():
        ours, plain = methods.get("ours"), methods.get("reinforce")
        if ours is None:
            continue
        if ours["liked_last"] < ours["liked_first"] + 0.1 or ours["interval"][0] <= ours["liked_first"]:
            sentences.append(
                f"{product} rises from {ours['liked_first']} to {ours['liked_last']} {ours['interval']}, by less than .1 surely"
            )
        if plain is not None and plain["interval"][0] > ours["interval"][1]:
            sentences.append(f"{product}: plain REINFORCE ends at {plain['liked_last']}, ours at {ours['liked_last']}")
    return sentences


def main() -> int:
    """The last line is JSON: per product and method."""
    parser = styled_arguments()
    parser.add_argument("--products", nargs="+", choices=SHOPS, default=list(SHOPS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    add_pieces(parser)
    arguments = parser.parse_args()
    return pieces_of(arguments, __file__).in_turn(lambda pieces: told(pieces, arguments))


def told(pieces: Pieces, arguments: argparse.Namespace) -> int:
    """All products and methods that were asked for."""
    found: dict[str, dict[str, Any]] = {}
    with base_for(arguments.base) as base:
        for product in arguments.products:
            found[product] = {}
            for method in arguments.methods:
                found[product][method] = figures(pieces, product, method, base, arguments.seeds, arguments.cycles)
                print(product, method, found[product][method], flush=True)
    for sentence in missed(found):
        print(f"# missed: {sentence}", flush=True)
    print(json.dumps(found))
    return 1 if missed(found) else 0


if __name__ == "__main__":
    sys.exit(main())
