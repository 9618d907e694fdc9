"""JSON schemas that a client sends, which may be made to hurt: checked in one pass, and applied with a budget. Pure.

`jsonschema`'s own check of a schema costs 15 s per megabyte (2026-11, two cores), its application may be exponential (nested references)
and its patterns may run for ever on thirty characters. So: a schema's form is checked by a walk over it; keywords with regular
expressions, and the two that collect what other keywords saw, are not applied (`IGNORED`); what a reference says of a value is found
out once, however often it is asked; and what needs more than `STEPS` keyword evaluations counts as not satisfied.
"""

from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, cast

from jsonschema import Draft202012Validator, validators  # pyright: ignore[reportUnknownVariableType] - `extend` is not typed
from jsonschema.exceptions import ValidationError
from referencing import Registry
from referencing.exceptions import Unresolvable

STEPS = 1200
"""Keyword evaluations: an argument object of six hundred values, and at most 30 ms of the thread it is decided in."""
DEPTH = 64
IGNORED = frozenset({"pattern", "patternProperties", "unevaluatedItems", "unevaluatedProperties"})
TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_ONE = frozenset({
    "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not", "propertyNames", "then", "unevaluatedItems",
    "unevaluatedProperties",
})  # fmt: skip
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
_TEXTS = frozenset(
    {"$anchor", "$comment", "$dynamicAnchor", "$dynamicRef", "$id", "$ref", "$schema", "description", "format", "pattern", "title"}
)
_COUNTS = frozenset({"maxContains", "maxItems", "maxLength", "maxProperties", "minContains", "minItems", "minLength", "minProperties"})
_NUMBERS = frozenset({"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"})


def is_schema(schema: object) -> bool:
    """Whether every keyword has a value of its form (JSON Schema 2020-12); takes time in proportion to its size."""
    waiting: list[tuple[object, int]] = [(schema, 0)]
    while waiting:
        found, depth = waiting.pop()
        if isinstance(found, bool):
            continue
        if not isinstance(found, dict) or depth > DEPTH:
            return False
        for keyword, value in cast("dict[str, object]", found).items():
            inner = _subschemas(keyword, value)
            if inner is None or not _is_well_formed(keyword, value):
                return False
            waiting += [(sub, depth + 1) for sub in inner]
    return True


def _subschemas(keyword: str, value: object) -> list[object] | None:
    """The schemas under a keyword; None where it should have some and its value has another form."""
    if keyword in _ONE:
        return [value]
    if keyword in _LISTS:
        return cast("list[object]", value) if isinstance(value, list) and value else None
    if keyword in _NAMED:
        return list(cast("dict[str, object]", value).values()) if isinstance(value, dict) else None
    return []


def _is_well_formed(keyword: str, value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if keyword == "type":
        return (
            value in TYPES if isinstance(value, str) else _are_texts(value) and bool(value) and TYPES.issuperset(cast("list[str]", value))
        )
    if keyword in _TEXTS:
        return isinstance(value, str)
    if keyword in _COUNTS:
        return is_number and cast(float, value) >= 0 and float(cast(float, value)).is_integer()
    if keyword in _NUMBERS:
        return is_number and (keyword != "multipleOf" or cast(float, value) > 0)
    if keyword == "required":
        return _are_texts(value)
    if keyword == "dependentRequired":
        return isinstance(value, dict) and all(_are_texts(names) for names in cast("dict[str, object]", value).values())
    if keyword == "enum":
        return isinstance(value, list)
    return keyword != "uniqueItems" or isinstance(value, bool)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in cast("list[object]", value))


class _Spent(Exception):
    """The budget is used up."""


Keyword = Callable[..., Iterator[ValidationError] | None]


@dataclass(kw_only=True)
class _Budget:
    """What one application of a schema may still cost, and what it has found out."""

    left: int
    found: dict[tuple[str, str, int], list[ValidationError] | None] = field(
        default_factory=dict[tuple[str, str, int], "list[ValidationError] | None"]
    )
    """By reference, where it stands and the value's identity (which lives as long as this does); None while it is being found out."""


_BUDGET: ContextVar[_Budget] = ContextVar("budget")


def satisfies(value: object, schema: Mapping[str, Any], *, steps: int = STEPS) -> bool:
    """Whether the value satisfies the schema; references outside the schema are never fetched, and what cannot be decided is a no."""
    token = _BUDGET.set(_Budget(left=steps))
    try:
        return bool(_Validator(_plain(schema), registry=_NOWHERE).is_valid(value))
    except (_Spent, Unresolvable, RecursionError):
        return False
    finally:
        _BUDGET.reset(token)


def _counted(apply: Keyword) -> Keyword:
    """The keyword, paid for: one step, and one for each item of a list."""

    def keyword(validator: Any, wanted: Any, instance: Any, around: Any) -> Any:  # noqa: ANN401 - jsonschema's own types
        budget = _BUDGET.get()
        budget.left -= 1 + (len(cast("list[object]", instance)) if isinstance(instance, list) else 0)
        if budget.left < 0:
            raise _Spent
        return apply(validator, wanted, instance, around)

    return keyword


def _once(apply: Keyword) -> Keyword:
    """A reference, followed once per value: nested ones would double the work with each level. One that leads back to itself is a no."""

    def keyword(validator: Any, wanted: Any, instance: Any, around: Any) -> Any:  # noqa: ANN401 - jsonschema's own types
        found = _BUDGET.get().found
        asked = (str(wanted), str(validator._resolver._base_uri), id(instance))
        if asked not in found:
            found[asked] = None
            found[asked] = list(islice(apply(validator, wanted, instance, around) or (), 1))
        errors = found[asked]
        if errors is None:
            raise _Spent
        return iter(errors)

    return keyword


def _validator_class() -> Any:  # noqa: ANN401 - jsonschema makes the class
    keywords = dict(cast("Mapping[str, Keyword]", Draft202012Validator.VALIDATORS))
    keywords["$ref"] = _once(keywords["$ref"])
    applied = {name: _counted(apply) for name, apply in keywords.items()}
    return cast(Any, validators).extend(Draft202012Validator, applied)


_Validator: Any = _validator_class()
_NOWHERE: Any = cast(Any, Registry)()


def _plain(schema: object) -> Any:  # noqa: ANN401 - a JSON schema
    """The schema without what is not applied; properties that patterns could have allowed are allowed."""
    if not isinstance(schema, dict):
        return schema
    fields = cast("dict[str, object]", schema)
    allowed = frozenset[str]({"additionalProperties"}) if "patternProperties" in fields else frozenset[str]()
    left_out = IGNORED | allowed
    return {keyword: _plain_value(keyword, value) for keyword, value in fields.items() if keyword not in left_out}


def _plain_value(keyword: str, value: object) -> object:
    if keyword in _ONE:
        return _plain(value)
    if keyword in _LISTS and isinstance(value, list):
        return [_plain(item) for item in cast("list[object]", value)]
    if keyword in _NAMED and isinstance(value, dict):
        return {name: _plain(item) for name, item in cast("dict[str, object]", value).items()}
    return value
