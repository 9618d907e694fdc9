"""Requests that were carried out, by name: asking again does nothing twice."""

from datetime import datetime

from sqlalchemy import Connection, select

from app.db.engine import insert_or_ignore
from app.db.tables import done_requests
from app.domain.errors import DoneAlready, Refused


def once(connection: Connection, request_id: str, *, actor: str, act: str, subject: str, now: datetime) -> None:
    """Write down that this transaction carries out the request. Raises `DoneAlready`; `Refused` where the name was another act's."""
    row = {"request_id": request_id, "actor": actor, "act": act, "subject": subject, "done_at": now}
    mine = done_requests.c.request_id == request_id
    fresh = insert_or_ignore(connection, done_requests).values(row).returning(done_requests.c.request_id)
    if connection.execute(fresh).one_or_none() is not None:
        return
    known = connection.execute(select(done_requests).where(mine)).one()
    if (known.actor, known.act, known.subject) != (actor, act, subject):
        raise Refused(f"the request id {request_id} was used for another act already ({known.act} of {known.subject}): use a fresh one")
    raise DoneAlready(f"done already, at {known.done_at:%Y-%m-%d %H:%M:%S} UTC by {known.actor}: nothing was done twice")
