"""Who is in, and whose hands let them in."""

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, kw_only=True)
class SessionRow:
    """An open browser session."""

    created_at: datetime
    seen_at: datetime
    expires_at: datetime


@dataclass(frozen=True, kw_only=True)
class HandRow:
    """A credential that was made for somebody."""

    what: str
    made_by: str
    at: datetime
