"""Rows for batching's tests: versions, turns and labels as the earlier stages would have written them."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Engine, insert

from app.db.engine import writing
from app.db.tables import labels, turns, versions

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


def add_version(engine: Engine, digest: str, *, parent: str | None = None, policy: str = "composer") -> None:
    """A version row."""
    with writing(engine) as connection:
        connection.execute(
            insert(versions).values(
                digest=digest, policy=policy, name=f"{policy}-{digest}", kind="base", parent=parent, step=0, base_model="tiny",
                licence="Apache-2.0", tags={}, created_at=NOON,
            )
        )  # fmt: skip


def add_turn(
    engine: Engine, name: str, *, reward: float = 0.0, version: str = "champion", episode: str | None = None, exclusion: str | None = None,
    minute: int = 0, labelled: bool = True, segment: str = "task=edit", actor: str | None = None, held_out: bool = False,
    rule_set: str = "rules-1", policy: str = "composer", terms: Sequence[Mapping[str, Any]] = (), **turn: Any,
) -> None:  # fmt: skip
    """A turn that finished `minute` minutes after noon, with its current label (unless `labelled` is false)."""
    at = NOON + timedelta(minutes=minute)
    row: dict[str, Any] = {
        "inference_id": name, "episode_id": episode or f"episode-of-{name}", "policy": policy, "version": version, "kind": "answer",
        "source": "gateway", "started_at": at, "finished_at": at, "label_due_at": at, "labelled_at": at if labelled else None,
        "actor": actor, "segment": segment, "finish_reason": "stop", "train_consent": True, "has_logprobs": True, "prompt_tokens": 3,
        "completion_tokens": 4, "tool_calls": [], "stage": "champion", "arm": "champion", "probability": 1.0, "completion": "x", "tags": {},
        "payload_segment": "segment-1",
    } | turn  # fmt: skip
    label = {
        "inference_id": name, "revision": 1, "current": True, "policy": policy, "version": version, "reward": reward,
        "terms": list(terms) or [{"name": "rating", "value": reward, "weight": 1.0}], "rule_set": rule_set, "exclusion": exclusion,
        "segment": segment, "actor": actor, "held_out": held_out, "finished_at": at, "labelled_at": at,
    }  # fmt: skip
    with writing(engine) as connection:
        connection.execute(insert(turns).values(row))
        if labelled:
            connection.execute(insert(labels).values(label))
