"""The OpenAPI document of endpoints that read raw bodies with msgspec: FastAPI cannot see their types."""

from typing import Any

import msgspec

from app.domain.errors import BadRequest

PREFIX = "#/components/schemas/"
_registered: set[type] = set()
_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _error(description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _ERROR}}}


ERRORS: dict[int | str, dict[str, Any]] = {
    400: _error("The request is wrong; `param` names the field."),
    401: _error("No key, or a wrong one."),
    403: _error("The key may not do this."),
    404: _error("No such thing."),
    408: _error("The body came too slowly."),
    413: _error("The body is too large."),
    415: _error("The body's encoding is not known."),
    422: _error("The request is wrong; `param` names the field."),
    429: _error("A limit is reached; `Retry-After` says when to come back."),
    431: _error("The headers are too large."),
    502: _error("The engine failed."),
    503: _error("A dependency does not answer."),
    504: _error("The engine was too slow."),
}


def body(*kinds: type, also_array: bool = False, media_types: tuple[str, ...] = ("application/json",)) -> dict[str, Any]:
    """`openapi_extra` for a body of one of the kinds, or an array of them."""
    _registered.update(kinds)
    refs = [_ref(kind) for kind in kinds]
    one: dict[str, Any] = {"oneOf": refs} if len(refs) > 1 else refs[0]
    schema = {"oneOf": [one, {"type": "array", "items": one, "minItems": 1}]} if also_array else one
    return {"requestBody": {"required": True, "content": {media: {"schema": schema} for media in media_types}}}


def answer(kind: type, description: str) -> dict[str, Any]:
    """A response with a JSON body of that kind."""
    _registered.add(kind)
    return {"description": description, "content": {"application/json": {"schema": _ref(kind)}}}


def completed(document: dict[str, Any]) -> dict[str, Any]:
    """The document with the schemas of every kind that was named."""
    _, schemas = msgspec.json.schema_components(sorted(_registered, key=lambda kind: kind.__name__), ref_template=PREFIX + "{name}")
    document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
    return document


def path_id(text: str) -> str:
    """An id from a path. Raises `BadRequest` where it is none."""
    if not 0 < len(text) <= 180 or "\x00" in text:
        raise BadRequest("an id in a path has 1 to 180 characters", param="id")
    return text


def _ref(kind: type) -> dict[str, Any]:
    return {"$ref": PREFIX + kind.__name__}
