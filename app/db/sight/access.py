"""Who is in, whose hands let them in, and what the audit chain says of what was done."""

from sqlalchemy import Connection, or_, select

from app.db.sight.paging import page_by_number
from app.db.tables import audit, browser_sessions, credential_acts, releases, versions
from app.domain.ids import utc_now
from app.domain.people import SESSION_IDLE
from app.domain.release.releases import AuditEntry
from app.domain.views.access import HandRow, SessionRow
from app.domain.views.pages import AuditFilter, Page

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


def read_audit(connection: Connection, wanted: AuditFilter, *, after: str | None, limit: int) -> Page[AuditEntry]:
    """Entries of the chain that fit, newest first."""
    a = audit.c
    query = select(audit)
    for column, value in ((a.subject, wanted.subject), (a.actor, wanted.actor)):
        query = query if value is None else query.where(column == value)
    if wanted.action is not None:
        query = query.where(a.action.startswith(wanted.action, autoescape=True))
    if wanted.policy is not None:
        mine = (select(t.c[id_]).where(t.c.policy == wanted.policy) for t, id_ in ((releases, "id"), (versions, "digest")))
        query = query.where(or_(a.subject == wanted.policy, *(a.subject.in_(ids) for ids in mine)))
    return page_by_number(connection, query, a.seq, after=after, limit=limit, made=lambda row: AuditEntry(**row._mapping))
