"""Who is in, and whose hands let them in."""

from sqlalchemy import Connection, select

from app.db.tables import browser_sessions, credential_acts
from app.domain.ids import utc_now
from app.domain.people import SESSION_IDLE
from app.domain.views.access import HandRow, SessionRow

MOST = 50


def read_sessions(connection: Connection, person_id: str) -> list[SessionRow]:
    """Open ones of somebody, newest first."""
    s, now = browser_sessions.c, utc_now()
    good = (s.person_id == person_id, s.ended_at.is_(None), s.expires_at > now, s.seen_at > now - SESSION_IDLE)
    rows = connection.execute(select(s.created_at, s.seen_at, s.expires_at).where(*good).order_by(s.created_at.desc()).limit(MOST))
    return [SessionRow(**row._mapping) for row in rows]


def read_hands(connection: Connection, actor: str) -> list[HandRow]:
    """Whose hands made their credentials, newest first."""
    c = credential_acts.c
    rows = connection.execute(select(c.what, c.made_by, c.at).where(c.person == actor).order_by(c.seq.desc()).limit(MOST))
    return [HandRow(**row._mapping) for row in rows]
