"""Turns of held-out people that ended well: what a product suite is cut from."""

from dataclasses import dataclass

from sqlalchemy import Connection, select

from app.db.ingestion.observations import of_the_turn_s_policy, was_served
from app.db.tables import labels, observations, turns


@dataclass(frozen=True, kw_only=True)
class WellEnded:
    """Where the turn's payload lies and what the user ended up with."""

    inference_id: str
    person: str
    segment: str
    ended_up_with: str


def well_ended_turns(connection: Connection, policy: str, *, limit: int) -> list[WellEnded]:
    """Newest first: turns of held-out people with a demonstration, or with an edit that was still there when last looked at."""
    query = (
        select(turns.c.inference_id, turns.c.actor, turns.c.payload_segment, observations.c.name, observations.c.value)
        .join(labels, (labels.c.inference_id == turns.c.inference_id) & labels.c.current)
        .join(observations, observations.c.inference_id == turns.c.inference_id)
        .where(turns.c.policy == policy, labels.c.held_out, turns.c.erased_at.is_(None), turns.c.payload_segment.is_not(None))
        .where(observations.c.name.in_(("demonstration", "edit_persistence")), observations.c.retracted_at.is_(None))
        .where(of_the_turn_s_policy(), was_served())
        .order_by(turns.c.finished_at.desc(), observations.c.occurred_at)
    )
    found: dict[str, WellEnded] = {}
    for row in connection.execute(query):
        text = _result(row.name, row.value)
        if text:
            person = row.actor or row.inference_id
            found[row.inference_id] = WellEnded(
                inference_id=row.inference_id, person=person, segment=row.payload_segment, ended_up_with=text
            )
        if len(found) >= limit:
            break
    return list(found.values())


def _result(name: str, value: object) -> str:
    if name == "demonstration":
        return str(value)
    if isinstance(value, dict) and value.get("after") and value.get("start") is None:
        return str(value["after"])
    return ""
