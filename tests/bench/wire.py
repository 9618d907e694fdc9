"""The wire types against the same types in Pydantic: JSON in, JSON out, one core. `make bench-wire`

Ends with {"decode_us": {...}, "encode_us": {...}, "speedup": {...}}; microseconds are medians over the rounds, of the same bytes.
"""

import json
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pydantic

from app.domain.telemetry.events import Observation
from app.domain.telemetry.turns import FinishReason, SamplingParams, TurnServed, Usage

ROUNDS = 15
REPEATS = 400
AT = datetime(2026, 11, 21, 9, 0, tzinfo=UTC)

OBSERVATION = Observation(
    id="0199-edit", inference_id="0199", name="edit_persistence", value={"horizon_s": 60, "four_gram": 0.93},
    occurred_at=AT, source="api", actor="a3f1" * 8, tags={"editor": "vim"},
)  # fmt: skip
TURN = TurnServed(
    inference_id="0199", episode_id="0198", policy="composer", version="ab" * 32, started_at=AT, finished_at=AT,
    messages=[{"role": "user", "content": "Write a function that reverses a list. " * 12}],
    completion="def reverse(items):\n    return items[::-1]\n" * 3,
    prompt_tokens=list(range(1000, 1180)), completion_tokens=list(range(2000, 2096)), logprobs=[-0.1 * (i % 40) for i in range(96)],
    sampling=SamplingParams(), finish_reason=FinishReason.STOP, usage=Usage(prompt_tokens=180, completion_tokens=96),
)  # fmt: skip


def twin(struct: type[msgspec.Struct]) -> type[pydantic.BaseModel]:
    """The same type in Pydantic: frozen, unknown fields forbidden, nested structs alike."""
    hints = get_type_hints(struct)
    fields: dict[str, Any] = {
        field.name: (_twin_of(hints[field.name]), ... if field.required else pydantic.Field(default_factory=_default(field)))
        for field in msgspec.structs.fields(struct)
    }
    return pydantic.create_model(struct.__name__, __config__=pydantic.ConfigDict(frozen=True, extra="forbid"), **fields)


def _twin_of(hint: Any) -> Any:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return twin(hint)
    if isinstance(hint, UnionType):
        left, *rest = [_twin_of(part) for part in get_args(hint)]
        for part in rest:
            left = left | part
        return left
    if get_origin(hint) is list:
        return list[_twin_of(get_args(hint)[0])]
    return hint


def _default(field: msgspec.structs.FieldInfo) -> Callable[[], Any]:
    return lambda: msgspec.to_builtins(field.default) if field.default is not msgspec.NODEFAULT else field.default_factory()


def microseconds(act: Callable[[], object]) -> float:
    """Median time of one call."""
    rounds: list[float] = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(REPEATS):
            act()
        rounds.append((time.perf_counter() - started) / REPEATS * 1e6)
    return statistics.median(rounds)


def compare(value: msgspec.Struct) -> dict[str, dict[str, float]]:
    """Decode and encode one value with both; the decoded values must be equal."""
    data = msgspec.json.encode(value)
    decoder, encoder, model = msgspec.json.Decoder(type(value)), msgspec.json.Encoder(), twin(type(value))
    parsed = model.model_validate_json(data)
    assert msgspec.convert(parsed.model_dump(), type(value)) == decoder.decode(data) == value
    return {
        "decode_us": {
            "msgspec": microseconds(lambda: decoder.decode(data)),
            "pydantic": microseconds(lambda: model.model_validate_json(data)),
        },
        "encode_us": {"msgspec": microseconds(lambda: encoder.encode(value)), "pydantic": microseconds(parsed.model_dump_json)},
    }


def main() -> None:
    """Compare both types of the hot path."""
    result: dict[str, Any] = {}
    for value in (TURN, OBSERVATION):
        measured = compare(value)
        speedup = {act[:6]: round(times["pydantic"] / times["msgspec"], 2) for act, times in measured.items()}
        rounded = {act: {library: round(us, 2) for library, us in times.items()} for act, times in measured.items()}
        result[type(value).__name__] = {**rounded, "speedup": speedup}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
