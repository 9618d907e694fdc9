"""W3C's trace context, as it travels with a turn: a tag of the turn, and an attribute of its event."""

import re

TRACEPARENT = "traceparent"
"""Header of a request, tag of a turn and of a version, attribute of an event: set where the trace is taken."""
HEADER = f"ce_{TRACEPARENT}"
"""Of a record on Kafka."""
FORM = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
LENGTH = 55
_MARK = f'"{TRACEPARENT}":"'.encode()
_TAIL_BYTES = 4096
"""A turn's tags are behind all that was said; and a name in quotes is no part of any text, which escapes them."""


def traceparent_in(payload: bytes) -> str | None:
    """The tag of an encoded turn, found without decoding it; 0.2 µs where it has none."""
    at = payload.rfind(_MARK, max(0, len(payload) - _TAIL_BYTES))
    if at < 0:
        return None
    found = payload[at + len(_MARK) : at + len(_MARK) + LENGTH].decode("ascii", "replace")
    return found if FORM.fullmatch(found) else None
