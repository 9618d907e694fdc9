"""People who use a policy: rows as ingestion and labelling would write them, with behaviour by version.

The arm is drawn as the gateway draws it, from the route in the database. Time is the test's.
"""

import random
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from sqlalchemy import Engine, delete, insert

from app.db.engine import writing
from app.db.release.pointer import SqlRoutes
from app.db.tables import engine_versions, exposures, labels, observations, turns
from app.domain.ids import uuid7
from app.domain.release.assignment import Arm, assign
from tests.fakes.clock import FrozenClock

CODE = "```python\nx = 1\n```"


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """How a version answers and how people take it; rates per turn."""

    success: float = 0.6
    reward_if_good: float = 0.6
    reward_if_bad: float = -0.2
    fault: float = 0.005
    asks: float = 0.05
    refuses: float = 0.01
    length: int = 40
    feedback: float = 0.8
    """Rate of turns somebody reacts to."""
    hides_failures: float = 0.0
    """Share of the reactions to failures that never come (suppressed feedback)."""
    undo: float = 0.05


@dataclass(kw_only=True)
class Traffic:
    """Serves people on a database."""

    engine: Engine
    clock: FrozenClock
    behaviours: dict[str, Behaviour]
    policy: str = "tab"
    seed: int = 1
    people: int = 0
    sessions: int = 0
    delivered: bool = True
    """False: exposures and turns come, labels do not (the label process is down)."""
    dice: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)

    def engines_hold(self, *digests: str, state: str = "ready", detail: str | None = None) -> None:
        """An engine that is alive reports these versions."""
        rows = [
            {
                "engine_id": "engine-1", "policy": self.policy, "digest": digest, "address": "http://127.0.0.1:1", "state": state,
                "detail": detail, "changed_at": self.clock.now, "seen_at": self.clock.now + timedelta(days=365),
            }
            for digest in digests
        ]  # fmt: skip
        with writing(self.engine) as connection:
            connection.execute(insert(engine_versions), rows)

    def engines_hold_no_more(self, digest: str) -> None:
        """The engine took it out of its memory."""
        with writing(self.engine) as connection:
            connection.execute(delete(engine_versions).where(engine_versions.c.digest == digest))

    def serve(self, people: int, *, sessions: int = 1, seconds: float = 60.0, known: int | None = None) -> dict[str, int]:
        """New people come, spread over `seconds`, and use the product `sessions` times each; returns turns per version.

        With `known`, no new ones: the same `known` people come again, in turn.
        """
        route = SqlRoutes(self.engine, max_age_s=0.0).route(self.policy)
        batch: dict[str, list[dict[str, Any]]] = {"exposures": [], "turns": [], "labels": [], "observations": []}
        served: dict[str, int] = {}
        for _ in range(people):
            self.people += 1
            actor = f"person-{self.people}" if known is None else f"known-{self.people % known}"
            arm = assign(route, actor, at=self.clock.now)
            for _ in range(sessions):
                served[arm.digest] = served.get(arm.digest, 0) + 1
                self._turn(batch, actor, arm)
                self.clock.advance(seconds / (people * sessions))
        with writing(self.engine) as connection:
            for table in (exposures, turns, labels, observations):
                if batch[table.name]:
                    connection.execute(insert(table), batch[table.name])
        return served

    def _turn(self, batch: dict[str, list[dict[str, Any]]], actor: str, arm: Arm) -> None:
        self.sessions += 1
        behaviour, at, key = self.behaviours[arm.digest], self.clock.now, uuid7()
        chance = self.dice.random
        good, fault = chance() < behaviour.success, chance() < behaviour.fault
        text = self._text(behaviour)
        drawn = {"release_id": arm.release_id, "stage": arm.stage, "arm": arm.arm, "probability": arm.probability}
        batch["exposures"].append({
            "id": uuid7(), "policy": self.policy, "inference_id": key, "episode_id": f"e-{key}", "actor": actor, "share": arm.share,
            "holdback": arm.holdback, "digest": arm.digest, "occurred_at": at, **drawn,
        })  # fmt: skip
        batch["turns"].append({
            "inference_id": key, "episode_id": f"e-{key}", "policy": self.policy, "version": arm.digest, "kind": "answer",
            "source": "gateway", "started_at": at, "finished_at": at, "label_due_at": at + timedelta(seconds=5),
            "labelled_at": at if self.delivered else None, "actor": actor, "segment": "", "finish_reason": "error" if fault else "stop",
            "train_consent": True, "has_logprobs": True, "prompt_tokens": 10,
            "completion_tokens": max(1, round(self.dice.gauss(behaviour.length, 8))), "tool_calls": [], "completion": text, "tags": {},
            **drawn,
        })  # fmt: skip
        if not self.delivered:
            return
        hidden = not good and chance() < behaviour.hides_failures
        reacted = chance() < behaviour.feedback and not hidden
        reward = (behaviour.reward_if_good if good else behaviour.reward_if_bad) if reacted else 0.0
        batch["labels"].append({
            "inference_id": key, "revision": 1, "current": True, "policy": self.policy, "version": arm.digest, "reward": reward,
            "terms": [{"name": "edit_persistence", "value": reward, "weight": 1.0, "detail": {}}],
            "rule_set": "rules", "exclusion": None, "segment": "",
            "actor": actor, "held_out": False, "finished_at": at, "labelled_at": at,
        })  # fmt: skip
        if reacted:
            self._observe(batch, key, "task_success", good)
        if chance() < behaviour.undo and reacted:
            self._observe(batch, key, "undo", True)

    def _text(self, behaviour: Behaviour) -> str:
        drawn = self.dice.random()
        if drawn < behaviour.asks:
            return "Which file do you mean?"
        return "I'm sorry, I can't help with that." if drawn < behaviour.asks + behaviour.refuses else CODE

    def _observe(self, batch: dict[str, list[dict[str, Any]]], key: str, name: str, value: object) -> None:
        batch["observations"].append({
            "source": "api", "id": uuid7(), "policy": self.policy, "inference_id": key, "episode_id": None, "name": name, "value": value,
            "occurred_at": self.clock.now, "received_at": self.clock.now, "actor": None, "tags": {}, "status": "joined",
        })  # fmt: skip
