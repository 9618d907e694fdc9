"""A request's headers as ASGI hands them over."""

from collections.abc import Iterable, Mapping

Headers = Mapping[bytes, bytes]
"""By lower-case name; of one sent twice the last."""


def header(headers: Headers, name: bytes) -> str | None:
    """The header of that (lower-case) name."""
    value = headers.get(name)
    return None if value is None else value.decode("latin-1")


def as_headers(sent: Iterable[tuple[str, str]]) -> Headers:
    """Those that the standard library's server has read."""
    return {name.lower().encode("latin-1", "replace"): value.encode("latin-1", "replace") for name, value in sent}
