"""Sessions for tests of evidence and decisions: people in a canary, in order, with rates by arm."""

import random
from datetime import UTC, datetime, timedelta
from typing import Any

from app.domain.release.sessions import Session

AT = datetime(2026, 11, 21, 12, tzinfo=UTC)


def session(number: int, *, arm: str = "champion", stage: str = "canary-2", share: float = 0.5, **changes: Any) -> Session:
    """One labelled session of person `number`, one second after the one before."""
    values: dict[str, Any] = {
        "inference_id": f"i-{number}", "actor": f"person-{number}", "episode_id": f"e-{number}", "release_id": "r", "stage": stage,
        "arm": arm, "probability": share if arm == "candidate" else 1.0 - share, "share": share, "holdback": 0.0,
        "digest": "v2" if arm == "candidate" else "v1", "exposed_at": AT + timedelta(seconds=number), "served": True,
        "finish_reason": "stop", "completion": "```x```", "completion_tokens": 40, "labelled": True, "reward": 0.2, "terms": {},
        "signals": {"task_success": True},
    }  # fmt: skip
    return Session(**{**values, **changes})


def people(
    count: int, *, candidate: float = 0.6, champion: float = 0.6, share: float = 0.5, stage: str = "canary-2", seed: int = 1
) -> list[Session]:
    """People whose tasks succeed at the rate of their arm."""
    dice = random.Random(seed)
    made: list[Session] = []
    for number in range(count):
        arm = "candidate" if dice.random() < share else "champion"
        good = dice.random() < (candidate if arm == "candidate" else champion)
        made.append(
            session(number, arm=arm, stage=stage, share=share, reward=0.5 if good else -0.5, signals={"task_success": good})
        )  # fmt: skip
    return made
