"""`make bench-long`: sixty cycles in a row on a small language model whose optimum is known, under the default configuration.

What a cycle does in production, without people, canary and clock: answers of the champion, an update, gate G0, and the next champion where
both agree. Nobody renews the anchor. The defaults are those of `TrainingConfig` and `GatesConfig`, but for the learning rate, which is that
of a model of a few thousand random weights. Liking is 1 at best and 1/3 for the first version; it is measured on fresh answers to prompts
that are not trained on, which the update never sees.

| key             | what                                                                         | bound             |
|-----------------|------------------------------------------------------------------------------|-------------------|
| `published`     | cycles whose candidate became champion; `held`: update or gate refused       |                   |
| `reward_first`  | liking of the first version; `reward_last`: of the last one                  | rises by a half   |
| `reward_kept`   | the lowest share of its best so far that liking ever fell to                 | at least 0.95     |
| `kl_anchor_max` | the largest divergence from the anchor of a champion, nats per token         | within the budget |
| `stuck_cycles`  | the longest run of cycles without a new champion                             | at most 3         |

Exit code 1 where a bound is broken. `--seed`, `--cycles` and `--turns` vary it.
"""

import argparse
import json
import logging
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.domain.release.gates import Verdict
from app.domain.release.versions import PastRun, Version
from pipelines.evaluation.config import GatesConfig
from pipelines.evaluation.health import judge_health
from pipelines.training import TrainingConfig, TrainingPorts, train
from tests.fakes.learning import NOON, fake_ports, make_batch, put_version, random_prompts, version_of
from tests.learning.policy_iteration import answers, liking, satisfaction

CONFIG = TrainingConfig(learning_rate=3e-3, threads=1, dtype="float32")
FRESH_TURNS = 2048
"""Answers per measurement: 10,240 tokens, so that liking is known to half a per cent."""


class Line:
    """A line of champions."""

    def __init__(self, ports: TrainingPorts, *, seed: int) -> None:
        self.ports, self.seed = ports, seed
        self.base = self.champion = put_version(ports, seed=seed)
        self.history: list[PastRun] = []
        self.reasons: list[str] = []
        """Per cycle: empty where its candidate became champion."""
        self.kl_anchor: list[float] = [0.0]
        self.liked: list[float] = [self._liking(0)]

    def turn(self, number: int, *, turns: int) -> None:
        """One cycle."""
        name, prompts = self.seed * 1000 + number, random_prompts(turns, seed=self.seed * 1000 + number)
        sampled = answers(self.ports.weights.path(self.champion.digest), prompts, version=self.champion.digest, seed=name)
        rewards = [liking(turn) for turn in sampled]
        batch = replace(make_batch(self.ports, sampled, rewards, champion=self.champion.digest, slot=number), anchor=self.base.digest)
        made = train(batch, run_id=f"run-{number}", parent=self.champion, anchor=self.base, config=CONFIG, ports=self.ports)
        metrics = made.metrics | {"term_shares": {"rating": 1.0}}
        gate = judge_health(replace(made, metrics=metrics), config=GatesConfig(), now=NOON, history=self.history[-20:])
        if made.candidate is None or gate.verdict is not Verdict.PASS:
            self.reasons.append(made.message or gate.reason)
        else:
            self._promote(made.candidate, metrics)
        self.liked.append(self._liking(number + 1))

    def _promote(self, candidate: str, metrics: dict[str, Any]) -> None:
        self.reasons.append("")
        self.kl_anchor.append(metrics["kl_anchor"])
        self.history.append(PastRun(candidate=candidate, anchor=self.base.digest, metrics=metrics, canary=None))
        parent: Version = self.champion
        uri = metrics["optimizer_uri"]
        self.champion = version_of(candidate, parent=parent.digest, step=parent.step + 1, optimizer_uri=uri)

    def _liking(self, number: int) -> float:
        return satisfaction(self.ports, self.champion, seed=self.seed * 1000 + 500_000 + number, turns=FRESH_TURNS)

    def figures(self) -> dict[str, Any]:
        """What the bench prints."""
        kept = min(liked / max(self.liked[: place + 1]) for place, liked in enumerate(self.liked))
        return {
            "cycles": len(self.reasons), "published": self.reasons.count(""), "held": sum(reason != "" for reason in self.reasons),
            "reward_first": round(self.liked[0], 4), "reward_last": round(self.liked[-1], 4), "reward_best": round(max(self.liked), 4),
            "reward_kept": round(kept, 4), "kl_anchor_max": round(max(self.kl_anchor), 4), "stuck_cycles": longest(self.reasons),
        }  # fmt: skip


def longest(reasons: list[str]) -> int:
    """The longest run of cycles without a new champion."""
    found = current = 0
    for reason in reasons:
        current = current + 1 if reason else 0
        found = max(found, current)
    return found


def broken_bounds(figures: dict[str, Any]) -> list[str]:
    """Which of the bounds in the table above do not hold."""
    checked = {
        "reward_last: rises by a half": figures["reward_last"] >= 1.5 * figures["reward_first"],
        "reward_kept >= 0.95": figures["reward_kept"] >= 0.95,
        "kl_anchor_max within the budget": figures["kl_anchor_max"] <= CONFIG.guards.max_kl_anchor,
        "stuck_cycles <= 3": figures["stuck_cycles"] <= 3,
    }
    return [bound for bound, holds in checked.items() if not holds]


def main() -> None:
    """The last line is JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cycles", type=int, default=60)
    parser.add_argument("--turns", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        line = Line(fake_ports(Path(folder)), seed=arguments.seed)
        for number in range(arguments.cycles):
            line.turn(number, turns=arguments.turns)
            print(f"{number:3} liked {line.liked[-1]:.3f} kl {line.kl_anchor[-1]:.3f} {line.reasons[-1]}", flush=True)
    figures = line.figures()
    broken = broken_bounds(figures)
    for bound in broken:
        print(f"broken: {bound}", file=sys.stderr)
    print(json.dumps(figures))
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
