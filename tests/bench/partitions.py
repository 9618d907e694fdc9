"""Where partitions pay: `make bench-partitions` (`--quick` within 55 s). PostgreSQL of the wheel, our tables, rows that it makes itself.

For each table whose rows go by age, what a row costs that is deleted and vacuumed away against what everybody pays, at every event, for
looking into several partitions instead of one table; microseconds of one connection, medians, turn and turn about.

    identities     `applied_events` in five and nine eras: an event must be looked for in all of them, because clients choose their ids
    bodies         the inbox: emptied when it is old, deleted later and vacuumed, against one look into the era before
    said           `observations` in fourteen slices of a week by the turn's id (UUIDv7, so that most look-ups need one): what is said is
                   inserted, found by its turn, and joined to turns as the gates read it, once each

Ends with one line of JSON; `…_pay` says whether partitions are cheaper. Exit code 1 where that is not what the schema has.
"""

import argparse
import hashlib
import json
import random
import statistics
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import psycopg

from app.db.migrate import upgrade
from tests.postgres import running_postgres

EVENTS, IDS = 2_000, 256
WEEKS = 14
WEEK_MS = 7 * 86_400_000
LAST_MS = 1_795_000_000_000
FIRST_MS = LAST_MS - WEEKS * WEEK_MS
DRAW = random.Random(5)
CHOSEN = {"identities_pay": False, "bodies_pay": True, "said_pay": False}
"""What the schema has: docs/decisions/2026-11-24-partitions-where-they-pay.md."""


def v7(ms: int) -> str:
    """An id as the gateway makes it at that moment."""
    return str(uuid.UUID(int=ms << 80 | 0x7 << 76 | DRAW.getrandbits(12) << 64 | 0b10 << 62 | DRAW.getrandbits(62)))


def bound(ms: int) -> str:
    """What every id of that moment is above."""
    return f"{ms:012x}"[:8] + "-" + f"{ms:012x}"[8:]


def id_of(rows: int) -> str:
    """SQL: the id of row n of so many, spread over the weeks."""
    ms = f"lpad(to_hex({FIRST_MS} + n::bigint * {LAST_MS - FIRST_MS} / {rows}), 12, '0')"
    rest = "'-7' || substr(md5(n::text), 1, 3) || '-a' || substr(md5(n::text), 4, 3) || '-' || substr(md5(n::text), 7, 12)"
    return f"substr({ms}, 1, 8) || '-' || substr({ms}, 9, 4) || {rest}"


class Server:
    """One connection, and how long what it is asked takes."""

    def __init__(self, connection: "psycopg.Connection[Any]") -> None:
        self._connection = connection

    def run(self, *statements: str) -> None:
        """Each in a transaction of its own."""
        for statement in statements:
            self._connection.execute(statement)  # type: ignore[arg-type] - our own words

    def ask(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """All rows."""
        cursor = self._connection.execute(statement, values)  # type: ignore[arg-type] - our own words
        return cursor.fetchall() if cursor.description else []

    def per_item_us(self, items: int, acts: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
        """Median microseconds an item of each act, turn and turn about; the first quarter warms."""
        took: dict[str, list[float]] = {name: [] for name in acts}
        for _ in range(repeats):
            for name, act in acts.items():
                began = time.perf_counter()
                act()
                took[name].append((time.perf_counter() - began) * 1e6 / items)
        return {name: round(statistics.median(found[repeats // 4 :]), 2) for name, found in took.items()}


def identities(server: Server, rows: int, repeats: int) -> dict[str, Any]:
    """Deduplication of 2,000 events that are new, by ids of the gateway and by random ones; deletion of a tenth."""
    half = f"FROM generate_series(0, {rows // 2} - 1) n"
    places = {"one": 0, "five": 5, "nine": 9}
    for name, eras in places.items():
        of = f"applied_{name}"
        if eras:
            server.run(
                f"CREATE TABLE {of} (LIKE applied_events INCLUDING DEFAULTS, era int NOT NULL DEFAULT {eras - 1}) PARTITION BY LIST (era)"
            )
            server.run(*(f"CREATE TABLE {of}_{n} PARTITION OF {of} FOR VALUES IN ({n})" for n in range(eras)))
            server.run(
                *(f"ALTER TABLE {of}_{n} ADD PRIMARY KEY (source, event_id)" for n in range(eras)), f"CREATE INDEX ON {of} (applied_at)"
            )
        else:
            server.run(f"CREATE TABLE {of} (LIKE applied_events INCLUDING ALL)")
        era = f", n::bigint * {eras} / {rows // 2}" if eras else ""
        for source, id_ in (("gateway", id_of(rows // 2)), ("api", "md5(n::text)")):
            server.run(f"INSERT INTO {of} SELECT '{source}', {id_}, decode(md5(n::text), 'hex'), n{era} {half}")
        server.run(f"VACUUM ANALYZE {of}")

    def take(name: str, ids: Sequence[str]) -> None:
        of, pairs = f"applied_{name}", "(SELECT * FROM unnest(%s::text[], %s::text[]))"
        if places[name]:
            server.ask(f"SELECT source, event_id, payload_hash FROM {of} WHERE (source, event_id) IN {pairs}", ["api"] * EVENTS, ids)
        server.ask(
            f"INSERT INTO {of} (source, event_id, payload_hash, applied_at) SELECT 'api', id, 'h', 1 FROM unnest(%s::text[]) t(id) "
            "ON CONFLICT DO NOTHING RETURNING event_id",
            ids,
        )

    def of_gateway() -> list[str]:
        return sorted(v7(LAST_MS + DRAW.randrange(WEEK_MS)) for _ in range(EVENTS))

    def of_clients() -> list[str]:
        return sorted(hashlib.md5(str(DRAW.random()).encode(), usedforsecurity=False).hexdigest() for _ in range(EVENTS))

    told: dict[str, Any] = {}
    for kind, ids in (("v7", of_gateway), ("random", of_clients)):
        told[f"identities_{kind}_us"] = server.per_item_us(EVENTS, {n: (lambda n=n, ids=ids: take(n, ids())) for n in places}, repeats)
    gone = server.ask("SELECT count(*) FROM applied_one WHERE applied_at < %s", rows // 20)[0][0]
    old = f"SELECT ctid FROM applied_one WHERE applied_at < {rows // 20} ORDER BY applied_at LIMIT 2000"
    told["identity_deleted_us"] = _emptied(server, "applied_one", f"DELETE FROM applied_one WHERE ctid = ANY(ARRAY({old}))", gone)
    extra = min(told[f"identities_{kind}_us"]["five"] - told[f"identities_{kind}_us"]["one"] for kind in ("v7", "random"))
    return told | {"identities_pay": extra < told["identity_deleted_us"]}


def _emptied(server: Server, table: str, step: str, rows: int) -> float:
    """Microseconds a row: the steps, and the vacuum after them."""
    began = time.perf_counter()
    for _ in range(-(-rows // 2_000)):
        server.run(step)
    server.run(f"VACUUM {table}")
    return round((time.perf_counter() - began) * 1e6 / rows, 2)


def bodies(server: Server, rows: int, repeats: int) -> dict[str, Any]:
    """Of bodies of 600 bytes: one table that is emptied by age and thinned out later, against eras that are dropped."""
    server.run("CREATE TABLE inbox_one (LIKE inbox_0 INCLUDING ALL)", "CREATE TABLE inbox_before (LIKE inbox_0 INCLUDING ALL)")
    columns = "seq, source, event_id, type, key, time, payload, payload_hash, received_at, relayed_at, applied_at"
    for of in ("inbox_one", "inbox_before"):
        server.run(
            f"INSERT INTO {of} ({columns}) SELECT n + 1, 'gateway', {id_of(rows)}, 't', 'e' || n / 4, n, decode(repeat('7b', 600), 'hex'), "
            f"decode(md5(n::text), 'hex'), n, n, n FROM generate_series(0, {rows} - 1) n",
            f"VACUUM ANALYZE {of}",
        )

    def look() -> None:
        ids = [v7(LAST_MS + DRAW.randrange(WEEK_MS)) for _ in range(EVENTS)]
        pairs = "(SELECT * FROM unnest(%s::text[], %s::text[]))"
        server.ask(f"SELECT source, event_id, payload_hash FROM inbox_before WHERE (source, event_id) IN {pairs}", ["api"] * EVENTS, ids)

    looked = server.per_item_us(EVENTS, {"before": look}, repeats)["before"]
    old, full = rows // 10, "applied_at IS NOT NULL AND length(payload) > 0"
    some = f"SELECT seq FROM inbox_one WHERE applied_at < {old} AND {full} ORDER BY applied_at LIMIT 2000"
    trimmed = _emptied(server, "inbox_one", f"UPDATE inbox_one SET payload = '' WHERE seq = ANY(ARRAY({some}))", old)
    head = f"SELECT seq FROM inbox_one WHERE seq <= {old} ORDER BY seq LIMIT 2000"
    deleted = _emptied(server, "inbox_one", f"DELETE FROM inbox_one WHERE seq = ANY(ARRAY({head}))", old)
    began = time.perf_counter()
    server.run("DROP TABLE inbox_before")
    dropped_ms = (time.perf_counter() - began) * 1e3
    return {
        "body_looked_for_us": looked, "body_trimmed_us": trimmed, "body_deleted_us": deleted, "era_dropped_ms": round(dropped_ms, 1),
        "bodies_pay": looked < trimmed + deleted,
    }  # fmt: skip


def said(server: Server, rows: int, repeats: int) -> dict[str, Any]:
    """One table against fourteen slices: what ingestion, labelling and the gates ask, and what it costs to let a week go."""
    for of in ("said_one", "said_sliced"):
        if of == "said_one":
            server.run(f"CREATE TABLE {of} (LIKE observations INCLUDING ALL)")
        else:
            server.run(f"CREATE TABLE {of} (LIKE observations INCLUDING DEFAULTS) PARTITION BY RANGE (inference_id)")
            server.run(*(f"CREATE INDEX ON {of} ({column})" for column in ("inference_id", "episode_id", "actor")))
            for week in range(WEEKS + 1):
                begin, end = bound(FIRST_MS + week * WEEK_MS), bound(FIRST_MS + (week + 1) * WEEK_MS)
                server.run(f"CREATE TABLE {of}_{week} PARTITION OF {of} FOR VALUES FROM ('{begin}') TO ('{end}')")
                server.run(f"ALTER TABLE {of}_{week} ADD PRIMARY KEY (source, id)")
        server.run(
            f"INSERT INTO {of} SELECT 'api', 'o-' || n, 'composer', {id_of(rows)}, NULL, 'rating', '1.0', n, n, 'person-' || n % 9999, "
            f"'{{}}', 'joined' FROM generate_series(0, {rows} - 1) n",
            f"VACUUM ANALYZE {of}",
        )
    server.run(
        "CREATE TABLE said_turns AS SELECT inference_id FROM said_one", "CREATE INDEX ON said_turns (inference_id)", "ANALYZE said_turns"
    )
    recent = [row[0] for row in server.ask("SELECT inference_id FROM said_one ORDER BY inference_id DESC LIMIT 20000")]
    fresh = iter(range(10**9))

    def acts(template: str, *values: Callable[[], Any]) -> dict[str, Callable[[], object]]:
        return {
            of: (lambda of=of: server.ask(template.format(of=of), *(value() for value in values))) for of in ("said_one", "said_sliced")
        }

    insert = "INSERT INTO {of} SELECT 'api', a, 'composer', b, NULL, 'rating', '1.0', 1, 1, 'p', '{{}}', 'joined' FROM unnest(%s::text[], "
    insert += "%s::text[]) t(a, b) ON CONFLICT DO NOTHING RETURNING id"
    ids = lambda: DRAW.sample(recent, IDS)  # noqa: E731 - a draw
    told = {
        "said_found_us": server.per_item_us(IDS, acts("SELECT * FROM {of} WHERE inference_id = ANY(%s)", ids), repeats),
        "said_joined_us": server.per_item_us(
            IDS, acts("SELECT count(*) FROM said_turns t JOIN {of} o USING (inference_id) WHERE t.inference_id = ANY(%s)", ids), repeats
        ),
        "said_inserted_us": server.per_item_us(
            IDS,
            acts(
                insert,
                lambda: [f"f-{next(fresh)}" for _ in range(IDS)],
                lambda: [v7(LAST_MS + DRAW.randrange(WEEK_MS)) for _ in range(IDS)],
            ),
            repeats,
        ),
    }
    week = server.ask("SELECT count(*) FROM said_one WHERE inference_id < %s", bound(FIRST_MS + WEEK_MS))[0][0]
    some = f"SELECT inference_id FROM said_one WHERE inference_id < '{bound(FIRST_MS + WEEK_MS)}' ORDER BY inference_id LIMIT 2000"
    deleted = _emptied(server, "said_one", f"DELETE FROM said_one WHERE inference_id = ANY(ARRAY({some}))", week)
    extra = sum(of["said_sliced"] - of["said_one"] for of in told.values())
    return told | {"said_deleted_us": deleted, "said_extra_us": round(extra, 2), "said_pay": extra < deleted}


def run(rows: int, repeats: int) -> dict[str, Any]:
    """All figures."""
    with running_postgres() as url:
        upgrade(url.format("postgres"))
        with psycopg.connect(url.format("postgres").replace("+psycopg", ""), autocommit=True) as connection:
            server = Server(connection)
            told: dict[str, Any] = {"rows": rows}
            for section in (identities, bodies, said):
                told |= section(server, rows, repeats)
                print(f"# {section.__name__}: {json.dumps(told)}", file=sys.stderr, flush=True)
            return told


def main() -> int:
    """Run, print, compare with what the schema has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="200,000 rows a table")
    parser.add_argument("--rows", type=int, default=4_000_000, help="rows a table")
    given = parser.parse_args()
    told = run(200_000 if given.quick else given.rows, repeats=12 if given.quick else 40)
    otherwise = [name for name, chosen in CHOSEN.items() if told[name] != chosen]
    for name in otherwise:
        print(f"{name} is {told[name]}: the schema has it otherwise", file=sys.stderr)
    print(json.dumps(told))
    return 1 if otherwise else 0


if __name__ == "__main__":
    sys.exit(main())
