"""A small body is read to its bound and no further, whatever was announced."""

import asyncio

import pytest
from starlette.requests import Request
from starlette.types import Message

from app.listening.bodies import read_json
from app.listening.errors import HttpError


def read(*chunks: bytes, most: int = 10, **headers: str) -> bytes | tuple[int, str]:
    """The body, or how it is refused; and that nothing is asked for behind that."""
    left = [*chunks]

    async def receive() -> Message:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    try:
        found = asyncio.run(read_json(Request({"type": "http", "method": "POST", "headers": given}, receive), most=most))
    except HttpError as error:
        return error.status, error.code
    assert isinstance(found, bytes)
    return found


JSON = "Application/JSON ; charset=utf-8"


def test_a_body_of_the_largest_size_is_read_announced_or_not() -> None:
    assert read(b"12345", b"67890", content_type=JSON) == b"1234567890"
    assert read(b"1234567890", content_type="application/json", content_length="10") == b"1234567890"


@pytest.mark.parametrize("length", ["11", "-1", "x", ""])
def test_a_body_that_is_announced_too_large_or_in_no_number_is_not_asked_for(length: str) -> None:
    assert read(content_type=JSON, content_length=length) == (413, "body_too_large")


def test_a_body_that_grows_too_large_is_read_no_further() -> None:
    assert read(b"1234567890", b"1", content_type=JSON) == (413, "body_too_large")
    assert read(b"1234567890", b"1", content_type=JSON, content_length="3") == (413, "body_too_large")


@pytest.mark.parametrize("kind", ["text/plain", "application/jsonl", ""])
def test_a_body_of_another_type_is_not_asked_for(kind: str) -> None:
    assert read(content_type=kind) == (415, "content_type")
    assert read() == (415, "content_type")
