"""Class defaults are the vetted settings: whoever changes one changes tests/data/vetted_defaults.txt too, and says in the commit why."""

from collections.abc import Iterator, Mapping, Sequence
from typing import cast, get_args, get_type_hints

import msgspec

from app.domain.policies import PolicyConfig
from app.messaging.options import KafkaConfig
from app.settings import Settings, from_environment
from pipelines.config import LoopConfig
from pipelines.training.pretraining import PretrainingConfig
from tests.architecture.sources import ROOT

VETTED = ROOT / "tests" / "data" / "vetted_defaults.txt"
ELSEWHERE = {"data", "database_url", "inbox_url", "segments", "weights", "mlflow_uri"}
"""Settings that say where this folder is."""


def flat(name: str, value: object) -> Iterator[str]:
    """A line for each value, by its dotted name."""
    if isinstance(value, Mapping) and value:
        for key, item in cast("Mapping[str, object]", value).items():
            yield from flat(f"{name}.{key}", item)
    elif isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
        for number, item in enumerate(cast("Sequence[Mapping[str, object]]", value)):
            yield f"{name}.{item.get('name', number)} = {msgspec.json.encode(item, order='sorted').decode()}"
    else:
        yield f"{name} = {msgspec.json.encode(value, order='sorted').decode()}"


def defaults() -> Iterator[str]:
    """Everything that is in force where nobody configured anything."""
    for name, made in (
        ("loop", LoopConfig()), ("kafka", KafkaConfig()), ("pretrain", PretrainingConfig()),
        ("policy", PolicyConfig(model="", base_name="", base_model="")),
    ):  # fmt: skip
        yield from flat(name, msgspec.to_builtins(made))
    settings = from_environment({})
    yield from (line for field in Settings.__dataclass_fields__ if field not in ELSEWHERE for line in flat(field, getattr(settings, field)))


def kinds(of: object) -> Iterator[type[msgspec.Struct]]:
    """The configuration classes that a type is made of, itself among them."""
    if isinstance(of, type) and issubclass(of, msgspec.Struct):
        yield of
        parts = list(get_type_hints(of).values())
    else:
        parts = list(get_args(of))
    for part in parts:
        yield from kinds(part)


def defaults_of_kinds() -> Iterator[str]:
    """What each field is where somebody configured its class and not the field; `loop.training.lora`, for one, is nothing by default."""
    found = {kind for top in (LoopConfig, KafkaConfig, PretrainingConfig, PolicyConfig) for kind in kinds(top)}
    for kind in sorted(found, key=lambda one: one.__name__):
        for field in msgspec.structs.fields(kind):
            value = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
            if value is not msgspec.NODEFAULT:
                yield from flat(f"{kind.__name__}.{field.name}", msgspec.to_builtins(value))


def test_what_is_in_force_without_a_configuration_is_what_was_vetted() -> None:
    """A new setting needs no line here until somebody has vetted its default."""
    assert [line for line in VETTED.read_text().splitlines() if line not in {*defaults(), *defaults_of_kinds()}] == []
