"""A product's year in rows, written by the database itself: realistic sizes, any number of turns.

Turn n is of one of the people of its span of `SPAN` turns, each of whom has fifteen in it, and in episode n div 4; it has some
observations, an exposure, a label (all but the newest have), and the inbox, deduplication and outbox rows that it came through. A turn
comes every `STEP` and the newest at `NOW`: more turns are a longer past, not more traffic. Versions take turns in time, and the newest
serves the newest turns. One batch was cut, `WINDOW` ago.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sqlalchemy import Connection, Engine, text, update

from app.db.engine import writing
from app.db.tables import EPOCH, inbox_eras
from app.db.upkeep import eras

POLICY = "composer"
VERSION = "v-new"
NOW = datetime(2026, 11, 1, tzinfo=UTC)
STEP = timedelta(seconds=20)
WINDOW = timedelta(hours=1)
SPAN = 4_000
DAY = timedelta(days=1)
ERAS = 7
"""Of the inbox, on PostgreSQL; here they hold the whole past between them, not the last week alone."""


def _micros(moment: datetime) -> int:
    return (moment - EPOCH) // timedelta(microseconds=1)


@dataclass(frozen=True, kw_only=True)
class Year:
    """How much there is."""

    turns: int
    unlabelled: int
    """The newest turns, whose wait is not over; the same however much there is, as traffic is."""
    versions: int = 12
    turns_per_person: int = 15
    """Everybody comes for a while, `SPAN` turns of the whole product, and others come later: a longer past is more people."""
    observations: int = 2
    """About each turn: a rating, and looks at how the edit persists."""
    prompt_bytes: int = 400
    """Of an inbox payload that is not trimmed yet."""
    kept: int = 1_500
    """Inbox rows, the newest ones, that still have their payload."""


def fill(engine: Engine, year: Year) -> None:
    """Write everything, then let the database look at its tables."""
    postgres = engine.dialect.name == "postgresql"
    if postgres:
        _open_eras(engine)
    with writing(engine) as connection:
        for statement in _statements(year, postgres=postgres):
            connection.execute(text(statement))
        _sequences(connection, postgres=postgres)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ANALYZE"))


def _open_eras(engine: Engine) -> None:
    """The inbox's, one for each day of the last week."""
    with writing(engine) as connection:
        connection.execute(update(inbox_eras).values(opened_at=NOW - ERAS * DAY))
    for number in range(1, ERAS):
        eras.turn(engine, now=NOW - (ERAS - number) * DAY, after=DAY)


def _sequences(connection: Connection, *, postgres: bool) -> None:
    if postgres:
        for table in ("inbox", "outbox"):
            connection.execute(text(f"SELECT setval(pg_get_serial_sequence('{table}', 'seq'), (SELECT max(seq) FROM {table}))"))


def _statements(year: Year, *, postgres: bool) -> list[str]:
    n, step = year.turns, STEP // timedelta(microseconds=1)
    numbers = (
        f"(SELECT generate_series(0::bigint, {n - 1}::bigint) AS n)"
        if postgres
        else f"(WITH RECURSIVE g(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM g WHERE n < {n - 1}) SELECT n FROM g)"
    )
    said = f"FROM {numbers} AS g"
    at = f"({_micros(NOW) - n * step} + n * {step})"
    wait = 1_800_000_000
    old = f"n < {n - year.unlabelled}"
    version = f"(CASE WHEN n >= {n - n // year.versions} THEN '{VERSION}' ELSE 'v-' || (n * {year.versions} / {n}) END)"
    true, false = ("true", "false") if postgres else ("1", "0")
    # Spread over 60 bits as a hash is: the golden ratio's multiples modulo a prime.
    lot = (
        "(((n / 4) * 11400714819::bigint) % 1000000007) * 1152921503" if postgres else "(((n / 4) * 11400714819) % 1000000007) * 1152921503"
    )
    blob = f"decode(repeat('7b', {year.prompt_bytes}), 'hex')" if postgres else f"zeroblob({year.prompt_bytes})"
    empty, digest = ("''::bytea", "decode(md5(n::text), 'hex')") if postgres else ("x''", "zeroblob(16)")
    words = "repeat(md5(n::text), 12)" if postgres else "substr(hex(zeroblob(200)), 1, 384)"
    payload = f"(CASE WHEN n >= {n - year.kept} THEN {blob} ELSE {empty} END)"
    present = SPAN // year.turns_per_person
    person, episode = f"'person-' || (n / {SPAN} * {present} + n % {SPAN} % {present})", "'e-' || (n / 4)"
    applied = f"(CASE WHEN {old} THEN {at} + 2000000 END)"
    return [
        f"""INSERT INTO turns (inference_id, episode_id, policy, version, kind, source, started_at, finished_at, label_due_at, labelled_at,
        needs_relabel, evidence, actor, segment, finish_reason, train_consent, has_logprobs, prompt_tokens, completion_tokens, tool_calls,
        stage, arm, probability, completion, tags, payload_segment)
        SELECT 't-' || n, {episode}, '{POLICY}', {version}, 'answer', 'gateway', {at}, {at}, {at} + {wait},
        CASE WHEN {old} THEN {at} + {wait} END, {false}, 2, {person}, 'task=edit', 'stop', {true}, {true}, 400, 120, '[]', 'champion',
        'champion', 1.0, '', '{{}}', 's-' || (n / 500) {said}""",
        f"INSERT INTO turn_words (inference_id, completion, tool_calls) SELECT 't-' || n, {words}, '[]' {said}",
        f"""INSERT INTO observations (source, id, policy, inference_id, name, value, occurred_at, received_at, actor, tags, status)
        SELECT 'api', 'o-' || n, '{POLICY}', 't-' || n, 'rating', '1.0', {at}, {at}, {person}, '{{}}', 'joined' {said}""",
        *(f"""INSERT INTO observations (source, id, policy, inference_id, name, value, occurred_at, received_at, actor, tags, status)
        SELECT 'api', 'p{k or ''}-' || n, '{POLICY}', 't-' || n, 'edit_persistence', '{{"horizon_s": 600, "four_gram": 0.9}}', {at}, {at},
        NULL, '{{}}', 'joined' {said}""" for k in range(year.observations - 1)),
        f"""INSERT INTO exposures (id, policy, inference_id, episode_id, actor, stage, arm, probability, share, holdback, digest,
        occurred_at)
        SELECT 'x-' || n, '{POLICY}', 't-' || n, {episode}, {person}, 'champion', 'champion', 1.0, 0.0, 0.0, {version}, {at} {said}""",
        f"""INSERT INTO retractions (source, observation_id, occurred_at, received_at, matched)
        SELECT 'api', 'o-' || n, {at}, {at}, {true} {said} WHERE n % 10 = 0""",
        f"""INSERT INTO batch_items (inference_id, batch_id, episode_id, reward, label_revision, segment, actor)
        SELECT 't-' || n, 'b', {episode}, 0.5, 1, '', {person} {said} WHERE n % 10 = 3 AND n < {n // 2}""",
        f"""INSERT INTO labels (inference_id, revision, current, policy, version, reward, terms, rule_set, exclusion, segment, actor,
        held_out, finished_at, labelled_at, lot, batch_id)
        SELECT 't-' || n, 1, {true}, '{POLICY}', {version}, (n % 7) / 7.0,
        '[{{"name": "rating", "value": 1.0, "weight": 1.0, "detail": {{}}, "abstained": null}}]', 'rules',
        CASE WHEN n % 5 = 0 THEN 'no_signal' END, 'task=edit', {person}, {false}, {at}, {at} + {wait}, {lot},
        CASE WHEN n % 10 = 3 AND n < {n // 2} THEN 'b' END {said} WHERE {old}""",
        """INSERT INTO turn_counts (policy, version, turns, labelled)
        SELECT policy, version, count(*), count(labelled_at) FROM turns GROUP BY policy, version""",
        f"""INSERT INTO applied_events (source, event_id, payload_hash, applied_at)
        SELECT 'gateway', 't-' || n, {digest}, {at} {said} WHERE {old}""",
        f"""INSERT INTO inbox (seq, source, event_id, type, key, time, payload, payload_hash, received_at, relayed_at, applied_at, era)
        SELECT n + 1, 'gateway', 't-' || n, 'ratchet.turn.v1', {episode}, {at}, {payload}, {digest}, {at},
        {applied}, {applied}, {f"n * {ERAS} / {n}" if postgres else "0"} {said}""",
        f"""INSERT INTO outbox (seq, event_id, topic, key, type, payload, created_at, sent_at)
        SELECT n + 1, 'l-' || n, 'ratchet.labels', 't-' || n, 'ratchet.label.v1', {blob}, {at}, {at} {said} WHERE {old}""",
        f"""INSERT INTO segments (name, rows, bytes, created_at)
        SELECT 's-' || n, 500, 200000, {_micros(NOW)} FROM {numbers} AS g WHERE n <= {n // 500}""",
        f"""INSERT INTO versions (digest, policy, name, kind, parent, step, base_model, licence, tags, created_at)
        VALUES ('{VERSION}', '{POLICY}', 'newest', 'full', NULL, 1, 'tiny', 'Apache-2.0', '{{}}', {_micros(NOW)})""",
        f"""INSERT INTO batches (id, policy, slot, champion, anchor, rule_set, window_from, window_to, left_out, created_at)
        VALUES ('b', '{POLICY}', 1, '{VERSION}', '{VERSION}', 'rules', 0, {_micros(NOW - WINDOW)}, '{{}}', {_micros(NOW)})""",
    ]  # fmt: skip
