"""What is said during a fault run: turns, observations and retractions, seeded, with repetitions, reordering and early feedback.

Every event is a CloudEvent as a client would post it; what labels they must lead to is worked out by a run without faults.
"""

import random
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

POLICY = "composer"
SOURCE = "import:faults"
REPEATED = 0.2
FINISHED = timedelta(hours=1)
"""How long ago the turns ended: due at once, so that most labels are made before their observations come, and corrected after."""
LONG_AGO = timedelta(days=60)
"""How long ago some turns ended."""
TOO_LATE = timedelta(days=50)
"""When something occurred about those: later than lateness allows."""


@dataclass(frozen=True, kw_only=True)
class Story:
    """Events in the order in which they happened, and in the order in which clients send them."""

    happened: tuple[dict[str, Any], ...]
    """Each once, a turn before what is said about it."""
    told: tuple[dict[str, Any], ...]
    """Shuffled within a window, a fifth of them repeated."""

    @property
    def turns(self) -> set[str]:
        """Inference ids."""
        return {event["id"] for event in self.happened if event["type"] == "ratchet.turn.v1"}

    @property
    def observations(self) -> set[str]:
        """Ids."""
        return {event["id"] for event in self.happened if event["type"] == "ratchet.observation.v1"}


def make_story(events: int, *, seed: int, now: datetime) -> Story:
    """About `events` tellings, repetitions included."""
    chance = random.Random(seed)
    happened: list[dict[str, Any]] = []
    number = 0
    while len(happened) * (1 + REPEATED) < events:
        happened += _one_turn(f"{seed}-{number:07d}", chance, now)
        number += 1
    repeated = [chance.choice(happened) for _ in range(int(len(happened) * REPEATED))]
    window = max(50, len(happened) // 10)
    keyed = [(index + chance.uniform(-window, window), event) for index, event in enumerate(happened)]
    keyed += [(chance.uniform(0, len(happened)), event) for event in repeated]
    return Story(happened=tuple(happened), told=tuple(event for _, event in sorted(keyed, key=lambda pair: pair[0])))


def _one_turn(name: str, chance: random.Random, now: datetime) -> list[dict[str, Any]]:
    is_old = chance.random() < 0.05
    finished = now - (LONG_AGO if is_old else FINISHED)
    episode = f"episode-{name}"
    events = [_event(f"turn-{name}", "ratchet.turn.v1", _turn(f"turn-{name}", episode, finished, chance))]
    for position in range(chance.choice((0, 1, 2, 3))):
        said = f"said-{name}-{position}"
        about = {"inference_id": f"turn-{name}"} if chance.random() < 0.7 else {"episode_id": episode}
        moment = finished + timedelta(seconds=chance.uniform(1, 600)) + (TOO_LATE if is_old else timedelta())
        what = {"name": "rating", "value": round(chance.uniform(-1, 1), 3)} if chance.random() < 0.8 else {"name": "undo", "value": True}
        events.append(_event(said, "ratchet.observation.v1", what | about | {"occurred_at": moment.isoformat()}))
        if chance.random() < 0.1:
            taken = {"observation_id": said, "occurred_at": (moment + timedelta(seconds=5)).isoformat()}
            events.append(_event(f"back-{said}", "ratchet.retraction.v1", taken))
    return events


def _event(id_: str, type_: str, data: dict[str, Any]) -> dict[str, Any]:
    return {"specversion": "1.0", "id": id_, "source": SOURCE, "type": type_, "data": data}


def _turn(id_: str, episode: str, finished: datetime, chance: random.Random) -> dict[str, Any]:
    return {
        "inference_id": id_, "episode_id": episode, "policy": POLICY, "version": f"v{chance.randint(1, 3)}", "source": SOURCE,
        "started_at": (finished - timedelta(seconds=2)).isoformat(), "finished_at": finished.isoformat(),
        "messages": [{"role": "user", "content": "x" * chance.randint(20, 400)}], "completion": "y" * chance.randint(1, 400),
        "prompt_tokens": [], "completion_tokens": [], "logprobs": None, "sampling": {}, "finish_reason": "stop",
        "usage": {"prompt_tokens": 40, "completion_tokens": chance.randint(1, 300)}, "actor": f"actor-{chance.randint(0, 500)}",
        "segment": {"task": chance.choice(("edit", "ask"))},
    }  # fmt: skip


def utc(moment: datetime) -> datetime:
    """Whole seconds, in UTC."""
    return moment.astimezone(UTC).replace(microsecond=0)
