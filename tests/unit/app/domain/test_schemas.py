"""Schemas of clients: their form in one pass, their application within a budget."""

from typing import Any

import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from app.domain.telemetry.schemas import is_schema, satisfies

SCHEMAS: list[Any] = [
    {}, True, False, {"type": "object"}, {"type": ["string", "null"]}, {"type": "objekt"}, {"type": []}, {"type": 3}, {"type": [1]},
    {"properties": {"a": {"type": "integer"}}}, {"properties": []}, {"properties": {"a": 1}}, {"required": ["a"]}, {"required": "a"},
    {"required": [1]}, {"items": {"type": "string"}}, {"items": 3}, {"anyOf": [{}]}, {"anyOf": []}, {"anyOf": {}}, {"oneOf": [1]},
    {"enum": ["a", 1, None]}, {"enum": "a"}, {"minLength": 1}, {"minLength": -1}, {"minLength": "1"}, {"minLength": 1.5}, {"minimum": "1"},
    {"minimum": 1.5}, {"multipleOf": 0}, {"multipleOf": 0.5}, {"uniqueItems": 1}, {"uniqueItems": True}, {"additionalProperties": False},
    {"additionalProperties": 1}, {"$ref": "#/$defs/a", "$defs": {"a": {}}}, {"$ref": 1}, {"description": "x", "title": "y", "default": [1]},
    {"description": 1}, {"properties": {"pattern": {"type": "string"}}}, {"not": {"type": "string"}}, {"if": {}, "then": 3},
    {"dependentRequired": {"a": ["b"]}}, {"dependentRequired": {"a": "b"}}, {"const": {"any": "thing"}}, {"x-custom": 1}, None, [], "x", 3,
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS)
def test_the_walk_agrees_with_the_metaschema(schema: Any) -> None:
    try:
        Draft202012Validator.check_schema(schema)
        known = True
    except SchemaError:
        known = False
    assert is_schema(schema) == known


def test_a_schema_of_megabytes_is_looked_at_once() -> None:
    """3 MB took 44 s; the walk visits each of its 60,000 schemas once."""

    class Counting(dict[str, Any]):
        visits = 0

        def items(self) -> Any:
            Counting.visits += 1
            return super().items()

    properties = {f"p{n}": Counting({"type": "string", "description": "d" * 20}) for n in range(60_000)}
    assert is_schema({"type": "object", "properties": properties})
    assert Counting.visits == 60_000


def test_a_pattern_that_never_ends_is_not_begun() -> None:
    """Begun it would run for hours: it tries every way to split forty letters."""
    evil = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(a+)+$"}}, "patternProperties": {"(b+)+$": {}}}
    schema = evil | {"additionalProperties": False, "unevaluatedProperties": False}
    assert satisfies({"a": "a" * 40 + "!", "b" * 40 + "!": 1}, schema)
    assert not satisfies({"a": 1}, schema)


def test_what_would_take_for_ever_to_decide_is_not_satisfied() -> None:
    doubling = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 1}"}]} for n in range(40)}
    schema = {"$ref": "#/$defs/d0", "$defs": doubling | {"d40": {"type": "string"}}}
    assert not satisfies({}, schema), "2^40 ways to say no"
    assert not satisfies({"a": [[n] for n in range(20_000)]}, {"properties": {"a": {"uniqueItems": True}}}), "quadratic"
    assert not satisfies({}, {"$ref": "#"})
    assert satisfies({"a": list(range(500))}, {"properties": {"a": {"items": {"type": "integer"}}}})


def test_what_a_reference_says_of_a_value_is_found_out_once() -> None:
    """Followed each time it is met this would be 2^20 evaluations; the answer is a yes."""
    doubling = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 1}"}]} for n in range(20)}
    schema = {"$ref": "#/$defs/d0", "$defs": doubling | {"d20": {"type": "object"}}}
    assert satisfies({}, schema)
    assert satisfies({}, schema, steps=100)
    tree = {"$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["value"]}}, "$ref": "#/$defs/node"}
    assert satisfies({"value": 1, "next": {"value": 2}}, tree), "each value has an answer of its own"
    assert not satisfies({"value": 1, "next": {"values": 2}}, tree)


def test_a_property_may_be_called_as_a_keyword_is() -> None:
    schema = {"type": "object", "properties": {"pattern": {"type": "integer"}}, "required": ["pattern"], "additionalProperties": False}
    assert satisfies({"pattern": 1}, schema)
    assert not satisfies({"pattern": "x"}, schema)
    assert not satisfies({"other": 1, "pattern": 1}, schema)


@pytest.mark.parametrize(
    ("value", "schema", "steps"),
    [
        ({}, {"type": "object"}, 1), ({}, {"type": "object", "title": "t"}, 1),
        ([1, 2, 3], {"type": "array"}, 4), ([], {"type": "array"}, 1),
        ({"a": 1}, {"properties": {"a": {"type": "integer"}}, "required": ["a"]}, 3),
        ({"a": [1, 2]}, {"properties": {"a": {"items": {"type": "integer"}}}}, 6),
    ],
)  # fmt: skip
def test_a_keyword_costs_a_step_and_each_item_of_a_list_another(value: Any, schema: Any, steps: int) -> None:
    assert satisfies(value, schema, steps=steps)
    assert not satisfies(value, schema, steps=steps - 1)


def test_twelve_hundred_steps_are_taken_and_not_one_more() -> None:
    """docs/api.md tells clients so."""
    assert satisfies([0] * 1199, {"type": "array"})
    assert not satisfies([0] * 1200, {"type": "array"})


@pytest.mark.parametrize(("keyword", "wrap"), [("not", False), ("items", False), ("allOf", True)])
def test_a_schema_is_sixty_four_deep_at_most(keyword: str, wrap: bool) -> None:
    def nested(levels: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "object"}
        for _ in range(levels):
            schema = {keyword: [schema] if wrap else schema}
        return schema

    assert is_schema(nested(64))
    assert not is_schema(nested(65))
