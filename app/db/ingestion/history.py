"""History that was told under the id of an answer that somebody was really served: the answer takes its place.

A stream names its id before its turn is committed, so anybody who reads it could tell history under it, with a key of whatever policy.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime

from sqlalchemy import Connection, bindparam, delete, select, update

from app.db.chunks import one_of
from app.db.ingestion import segment_rows
from app.db.ingestion.turns import insert_turns
from app.db.ingestion.words import forget_words
from app.db.learning.readings import forget_readings
from app.db.learning.rollups import COLUMNS, add_up
from app.db.tables import labels, turns
from app.domain.telemetry.events import IMPORTED, is_imported
from app.domain.telemetry.streams import AppliedEvent, JoinRules
from app.domain.telemetry.turns import TurnServed


def served_first(told: Sequence[tuple[AppliedEvent, TurnServed]]) -> list[tuple[AppliedEvent, TurnServed]]:
    """One turn of each id: the first that was served, else the first."""
    first: dict[str, tuple[AppliedEvent, TurnServed]] = {}
    for event, turn in sorted(told, key=lambda pair: is_imported(pair[1].source)):
        first.setdefault(turn.inference_id, (event, turn))
    return list(first.values())


def insert_served(
    connection: Connection, told: Sequence[TurnServed], *, rules: JoinRules, erased: Mapping[str, datetime]
) -> tuple[set[str], set[str]]:
    """`insert_turns`; and turns that were served take the place, and nothing else, of what was told as history under their ids.

    Returns the ids of those that were new, and the segments that owe it to be copied without the history's words.
    """
    inserted = insert_turns(connection, told, rules=rules, erased=erased)
    ignored = {turn.inference_id: turn for turn in told if turn.inference_id not in inserted and not is_imported(turn.source)}
    if not ignored:
        return inserted, set()
    replaced, owing = _forget_history(connection, ignored.keys())
    inserted |= insert_turns(connection, [ignored[id_] for id_ in replaced], rules=rules, erased=erased)
    if replaced:  # a labeller that read the history's observations a moment ago sees at its write that they are not these
        newer = update(turns).where(turns.c.inference_id == bindparam("of")).values(evidence=bindparam("seen"))
        connection.execute(newer, [{"of": id_, "seen": seen + 1} for id_, seen in replaced.items()])
    return inserted, owing


def _forget_history(connection: Connection, ids: Collection[str]) -> tuple[dict[str, int], set[str]]:
    """Delete what was told as history under these ids, with its labels; its evidence by id, and the segments with its words."""
    t = turns.c
    mine = one_of(connection, t.inference_id, ids) & t.source.startswith(IMPORTED)
    told = select(t.inference_id, t.evidence, t.payload_segment).where(mine).order_by(t.inference_id)
    found = connection.execute(told.with_for_update()).all()
    evidence = {row.inference_id: row.evidence for row in found}
    owing = {row.payload_segment for row in found if row.payload_segment is not None}
    if found:
        gone = connection.execute(delete(labels).where(one_of(connection, labels.c.inference_id, evidence)).returning(*COLUMNS)).all()
        add_up(connection, (), taken_back=[row for row in gone if row.current])
        forget_readings(connection, list(evidence))
        forget_words(connection, list(evidence))
        connection.execute(delete(turns).where(one_of(connection, t.inference_id, evidence)))
        segment_rows.leave_out(connection, owing)
    return evidence, owing
