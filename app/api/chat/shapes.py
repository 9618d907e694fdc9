"""The parameters of a chat that bend the distribution its answers are drawn from: penalties, biases, JSON, forced tools.

They become a `Shape`, which is recorded with the turn: it is scored under the same one when it is trained on.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from app.api.telemetry.drafts import decode
from app.domain.errors import BadRequest
from app.domain.telemetry.schemas import is_schema
from app.domain.telemetry.turns import Form, Shape

SCHEMA_CHARS = 64_000
"""Of a schema that answers are kept to: it travels with the turn."""
MOST_BIASES = 1024
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Bias = dict[str, Annotated[float, msgspec.Meta(ge=-100, le=100)]]


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's named schema."""

    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    """Answers are kept to the schema in any case."""


class TextFormat(msgspec.Struct, frozen=True, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Anything."""


class ObjectFormat(msgspec.Struct, frozen=True, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """Any JSON object."""


class SchemaFormat(msgspec.Struct, frozen=True, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """JSON that satisfies a schema."""

    json_schema: JsonSchema


ResponseFormat = TextFormat | ObjectFormat | SchemaFormat


class NamedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which function."""

    name: str


class NamedTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool that has to be called."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def shape_of(
    *, presence_penalty: float | None, frequency_penalty: float | None, logit_bias: Mapping[str, float] | None,
    response_format: ResponseFormat | None, tools: Sequence[Mapping[str, Any]], tool_choice: ToolChoice | None, parallel: bool | None,
) -> Shape | None:  # fmt: skip
    """What these parameters add to a plain draw; None where they add nothing. Raises `BadRequest`."""
    if len(logit_bias or {}) > MOST_BIASES:
        raise BadRequest(f"logit_bias has more than {MOST_BIASES} tokens: name fewer", param="logit_bias", code="size")
    if not all(token.isascii() and token.isdigit() and len(token) < 10 for token in logit_bias or {}):
        raise BadRequest("logit_bias names tokens by their number in the model's tokenizer", param="logit_bias")
    shape = Shape(
        presence_penalty=presence_penalty or 0.0, frequency_penalty=frequency_penalty or 0.0,
        logit_bias={int(token): bias for token, bias in (logit_bias or {}).items() if bias},
        form=_form(response_format, tools, tool_choice, parallel=parallel is not False),
    )  # fmt: skip
    return None if shape == Shape() else shape


def _form(
    response_format: ResponseFormat | None, tools: Sequence[Mapping[str, Any]], tool_choice: ToolChoice | None, *, parallel: bool
) -> Form | None:
    answer = _answer(response_format)
    if isinstance(tool_choice, NamedTool):
        return Form(call=_call(_named(tools, tool_choice.function.name)))
    if tool_choice == "required":
        if not tools:
            raise BadRequest("tool_choice is `required` and there are no tools: send some in `tools`", param="tool_choice")
        return Form(call=_call(tools), many=parallel)
    if answer is None:
        return None
    return Form(answer=answer, call=_call(tools) if tools else None, many=parallel and bool(tools))


def _answer(wanted: ResponseFormat | None) -> dict[str, Any] | None:
    match wanted:
        case ObjectFormat():
            return {"type": "object"}
        case SchemaFormat(json_schema=JsonSchema(schema=schema)):
            if schema is None:
                return {"type": "object"}
            if not is_schema(schema):
                raise _bad_schema("is no JSON schema")
            if len(msgspec.json.encode(schema)) > SCHEMA_CHARS:
                raise _bad_schema(f"has more than {SCHEMA_CHARS} characters: send a shorter one")
            return schema
        case _:
            return None


def _bad_schema(what: str) -> BadRequest:
    return BadRequest(f"response_format.json_schema.schema {what}", param="response_format", code="invalid_schema")


def _named(tools: Sequence[Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
    found = [tool for tool in tools if tool["function"]["name"] == name]
    if not found:
        raise BadRequest(f"tool_choice names the function {name!r}, which is not in `tools`: send it there", param="tool_choice")
    return found


def _call(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The schema of a call of one of these tools; references in a tool's parameters stay within them."""
    calls: list[dict[str, Any]] = []
    definitions: dict[str, Any] = {}
    for index, tool in enumerate(tools):
        parameters = tool["function"].get("parameters")
        if isinstance(parameters, dict) and parameters:
            parameters = _moved(parameters, index, definitions)
        else:
            parameters = {"type": "object"}
        calls.append(
            {
                "type": "object", "required": ["name", "arguments"], "additionalProperties": False,
                "properties": {"name": {"const": tool["function"]["name"]}, "arguments": parameters},
            }
        )  # fmt: skip
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {**schema, "$defs": definitions} if definitions else schema


def _moved(parameters: dict[str, Any], index: int, definitions: dict[str, Any]) -> dict[str, Any]:
    """The parameters with their definitions moved to where the whole schema looks for them."""
    own = {f"#/{place}/{name}": f"tool{index}.{name}" for place in ("$defs", "definitions") for name in parameters.get(place) or {}}

    def pointed(value: Any) -> Any:  # noqa: ANN401 - any JSON
        if isinstance(value, dict):
            return {key: _pointer(own, inner) if key == "$ref" else pointed(inner) for key, inner in value.items()}
        return [pointed(inner) for inner in value] if isinstance(value, list) else value

    for place in ("$defs", "definitions"):
        for name, inner in (parameters.get(place) or {}).items():
            definitions[f"tool{index}.{name}"] = pointed(inner)
    return pointed({key: value for key, value in parameters.items() if key not in ("$defs", "definitions")})


def _pointer(own: Mapping[str, str], where: object) -> str:
    if not isinstance(where, str) or where not in own:
        raise BadRequest(
            f"the parameters of a tool that may be forced refer to {where!r}: only their own `$defs` are looked at", param="tools"
        )
    return f"#/$defs/{own[where]}"


def read_format(raw: dict[str, Any] | None) -> ResponseFormat | None:
    """`response_format`. Raises `BadRequest`."""
    return None if raw is None else _reading(_format, raw, "response_format")


def read_choice(raw: str | dict[str, Any] | None) -> ToolChoice | None:
    """`tool_choice`. Raises `BadRequest`."""
    return None if raw is None else _reading(_choice, raw, "tool_choice")


_format = msgspec.json.Decoder(ResponseFormat)
_choice: msgspec.json.Decoder[Any] = msgspec.json.Decoder(ToolChoice)


def _reading(decoder: Any, raw: object, param: str) -> Any:  # noqa: ANN401 - a decoder of unions
    try:
        return decode(decoder, msgspec.json.encode(raw))
    except BadRequest as error:
        raise BadRequest(f"{param}: {error}", param=param, code="invalid_request") from error
