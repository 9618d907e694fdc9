"""Turns and observations as labelling sees them, with short ways to say what matters."""

from datetime import UTC, datetime, timedelta
from typing import Any

from app.domain.learning.rewards import DueTurn, TurnFacts
from app.domain.telemetry.events import Observation
from app.domain.telemetry.turns import FinishReason

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


def facts(**changes: Any) -> TurnFacts:
    """A plain answer of 64 tokens after one second; a scale of 256 prices them at 2(√1.25 − 1) · 0.05 = 0.0118."""
    fields: dict[str, Any] = {
        "inference_id": "i", "episode_id": "e", "policy": "composer", "version": "v", "kind": "answer", "source": "gateway",
        "started_at": NOON, "finished_at": NOON + timedelta(seconds=1), "actor": "alice", "segment": "task=edit",
        "finish_reason": FinishReason.STOP, "train_consent": True, "has_logprobs": True, "prompt_tokens": 10, "completion_tokens": 64,
        "tool_calls": (), "time_to_first_token_s": 0.1, "completion": "def f(): return 1", "tags": {}, "erased": False,
    }  # fmt: skip
    return TurnFacts(**(fields | changes))


def observed(name: str, value: Any, *, id_: str = "o", second: float = 10) -> Observation:
    """An observation of the turn `i`."""
    return Observation(id=id_, inference_id="i", name=name, value=value, occurred_at=NOON + timedelta(seconds=second), source="api")


def due(*observations: Observation, **changes: Any) -> DueTurn:
    """A turn to label."""
    return DueTurn(facts=facts(**changes), observations=observations, revision=0)
