"""Events as each released version wrote them, kept in `tests/data/events/<version>`: what was written once is read for ever.

Before a release: `python -m tests.recorded` writes the folder of the version in pyproject.toml. A folder that was released never changes.
"""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from app.domain.telemetry.events import CloudEvent, envelope
from app.domain.telemetry.turns import Assignment, Consent, FinishReason, SamplingParams, ToolCall, ToolVerdict, Usage
from tests.fakes.served import at, erasure, event_of, exposure, observation, retraction, turn

FOLDER = Path(__file__).parent / "data" / "events"


def samples() -> dict[str, CloudEvent]:
    """One event of every kind, with every field said that a client or the gateway may say."""
    effects: dict[str, Any] = {
        "turn": turn(
            "t1", routed_experts=[[[1, 2]], [[3, 4]]], kept_log_mass=[-0.25, 0.0], time_to_first_token_s=0.125, tags={"fault": "none"},
            sampling=SamplingParams(temperature=0.7, top_p=0.9, max_tokens=64, seed=7, stop=("\n",)), finish_reason=FinishReason.TOOL_CALLS,
            tool_calls=[ToolCall(id="c1", name="weather", arguments="{}", verdict=ToolVerdict.INVALID_ARGUMENTS)],
            consent=Consent(train=False), usage=Usage(prompt_tokens=3, completion_tokens=2),
            assignment=Assignment(release_id="r1", stage="canary-1", arm="candidate", probability=0.05),
        ),
        "turn-bare": turn("t2", logprobs=None, completion_tokens=[], prompt_tokens=[], completion="", actor=None, segment={}),
        "turn-imported": turn("t3", logprobs=None, completion_tokens=[], prompt_tokens=[], source="import:sharegpt"),
        "observation-of-turn": observation("o1", of="t1", policy="composer", actor="alice", tags={"k": "v"}),
        "observation-of-episode": observation("o2", episode="e1", name="follow_up", value="thanks, that works"),
        "retraction": retraction("o1"),
        "exposure": msgspec.structs.replace(exposure("t1"), release_id="r1", stage="canary-1", arm="candidate", probability=0.05),
        "erasure": erasure("alice"),
    }  # fmt: skip
    return {name: event_of(effect) for name, effect in effects.items()}


def record(folder: Path) -> None:
    """Write the samples as this version says them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, event in samples().items():
        record = {"headers": envelope(event, at(2)), "key": event.key, "value": json.loads(event.data)}
        (folder / f"{name}.json").write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    record(FOLDER / version("ratchet"))
