"""Where a page begins: the key of the last row before it, as text that goes through an address and comes back."""

from datetime import datetime, timedelta

from app.db.tables import EPOCH
from app.domain.errors import BadRequest


def key_of(moment: datetime, id_: str) -> str:
    """`1763733600000000.ID`."""
    return f"{(moment - EPOCH) // timedelta(microseconds=1)}.{id_}"


def read_key(text: str) -> tuple[datetime, str]:
    """Back again. Raises `BadRequest`."""
    micros, _, id_ = text.partition(".")
    if not micros.lstrip("-").isdigit() or len(micros) > 17 or not id_:
        raise BadRequest(f"{text[:60]!r} is no place in this list: begin at its first page", param="after")
    return EPOCH + timedelta(microseconds=int(micros)), id_


def read_number(text: str) -> int:
    """A key that is a number. Raises `BadRequest`."""
    if not text.isdigit() or len(text) > 18:
        raise BadRequest(f"{text[:60]!r} is no place in this list: begin at its first page", param="after")
    return int(text)
