"""A small deployment for the pages: a champion with labels, a candidate in each interesting state, a chain, letters, an erasure."""

from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, Engine, insert

from app.db.engine import writing
from app.db.learning.rollups import rebuild
from app.db.tables import (
    cycles,
    dead_letters,
    engine_versions,
    erasures,
    exposures,
    holdouts,
    labels,
    observations,
    progress,
    rule_set_activations,
    rule_sets,
    stream_offsets,
    turns,
    versions,
)
from app.db.troubles import SqlTroubles
from app.domain.ids import utc_now
from app.domain.release.alarms import AlarmKind
from app.domain.release.releases import ReleaseState
from tests.fakes.releases import POLICY, ReleaseRoom, release_room
from tests.fakes.traffic import Behaviour
from tests.fakes.watching import WatchedRoom, watched_room

HOSTILE = (
    "<img src=x onerror=alert(1)>", '"><script>alert(1)</script>', "<a hx-get=/console/act>x</a>", "<b data-hx-get='/x' hx-trigger=load>",
    "\u202eevil\u2066", "=cmd|' /C calc'!A0", "+1+1", "-1+1", "@SUM(1)", "{{ 7 * 7 }}", "${7*7}", "' OR 1=1 --", "\x00\x1b[31m",
    "x" * 5_000,
)  # fmt: skip
"""What a prompt, a comment, a tool or a name may bring."""


def deploy(engine: Engine, *, name: str = "tiny-v2", word: str = "hello") -> ReleaseRoom:
    """v1 is champion; v2 has been a canary and is READY; twelve labels of each. `name` of v2 and `word` of everything else are shown."""
    room = release_room(engine)
    room.clock.now = utc_now()
    with writing(engine) as connection:
        for digest, called, parent in (("v1", "tiny-v1", None), ("v2", name, "v1")):
            row = {"digest": digest, "policy": POLICY, "name": called, "kind": "rl", "parent": parent, "step": 1, "base_model": word}
            connection.execute(insert(versions).values(**row, licence="Apache-2.0", tags={}, created_at=utc_now()))
    fill(engine, release_id=room.ready("v2").id, word=word)
    return room


def fill(engine: Engine, *, release_id: str, word: str) -> None:
    """Two dozen labelled turns of v1 and v2, and what the loop, the stream and people leave behind."""
    with writing(engine) as connection:
        for n in range(24):
            _turn(connection, n, version="v1" if n % 2 else "v2", release_id=release_id, word=word)
        _loop(connection, word)
        _holdout(connection, word)
        rebuild(connection)


def busy(engine: Engine) -> WatchedRoom:
    """v1 is champion and pinned; v2 did harm, is quarantined, and somebody wants it back; v3 is a canary; promotions are frozen, the relay
    waits, and an engine is away. Judged by the real watch on simulated people."""
    world = watched_room(engine)
    with writing(engine) as connection:
        for digest in ("v1", "v2", "v3"):
            row = {"digest": digest, "policy": POLICY, "name": f"tiny-{digest}", "kind": "rl", "step": 1, "base_model": "tiny", "tags": {}}
            parent = None if digest == "v1" else "v1"
            connection.execute(insert(versions).values(**row, parent=parent, licence="Apache-2.0", created_at=world.room.clock.now))
    world.run(world.queue("v2", Behaviour(success=0.3)), until=frozenset({ReleaseState.ABORTED}))
    world.run(world.queue("v3", Behaviour(undo=0.12)), until=frozenset({ReleaseState.READY}), rounds=12)
    desk = world.room.desk
    desk.freeze(POLICY, AlarmKind.GAP, actor="system:watch", reason="paid more, no better")
    desk.unfreeze(POLICY, actor="user:bob")
    desk.lift(POLICY, "v2", actor="user:bob", reason="the metric was broken")
    desk.pin(POLICY, "v1", actor="user:bob", reason="the paper names it")
    SqlTroubles(engine, name="relay", clock=world.room.clock).report("the broker does not answer")
    return world


def _holdout(connection: Connection, word: str) -> None:
    """Fifteen days old, on v1; the releases since have been good for what people do, and there were too few people for the first week."""
    began = utc_now() - timedelta(days=15)
    arms = {"held": {"people": 40, "turns": 400, "mean": 0.5}, "beside": {"people": 160, "turns": 1600, "mean": 0.53}}
    intervals = {0: (None, None, None), 1: (0.02, -0.01, 0.05), 2: (0.04, 0.01, 0.07), None: (0.03, 0.01, 0.05)}
    readings = [
        {"metric": "task_success", "week": week, **arms, "difference": difference, "low": low, "high": high}
        for week, (difference, low, high) in intervals.items()
    ]
    connection.execute(
        insert(holdouts).values(
            id="h1", policy=POLICY, digest="v1", share=0.02, began_at=began, ends_at=began + timedelta(days=15), counted_until=utc_now(),
            thresholds={}, readings=readings, read_until=utc_now(), ended_at=utc_now(), ended_because=word,
        )
    )  # fmt: skip


def _turn(connection: Connection, n: int, *, version: str, release_id: str, word: str) -> None:
    at = utc_now() + timedelta(microseconds=n)  # within one hour, whatever time it is
    arm = "candidate" if version == "v2" else "champion"
    common: dict[str, Any] = {"policy": POLICY, "version": version, "segment": "task=edit", "actor": f"p{n}", "finished_at": at}
    connection.execute(
        insert(turns).values(
            inference_id=f"i{n}", episode_id=f"e{n}", kind="answer", source="gateway", started_at=at, label_due_at=at, finish_reason="stop",
            train_consent=True, has_logprobs=True, prompt_tokens=1, completion_tokens=1, tool_calls=[], stage="canary-0", arm=arm,
            probability=0.5, completion=word, tags={}, labelled_at=at, **common,
        )
    )  # fmt: skip
    connection.execute(
        insert(exposures).values(
            id=f"x{n}", policy=POLICY, inference_id=f"i{n}", episode_id=f"e{n}", actor=f"p{n}", stage="canary-0", arm=arm, probability=0.5,
            share=0.5, holdback=0.0, digest=version, occurred_at=at, release_id=release_id,
        )
    )  # fmt: skip
    terms = [
        {"name": "edit_persistence", "value": 0.2, "weight": 1.0, "detail": {"survival": 0.5}},
        {"name": "follow_up", "value": -0.9 if n < 6 else None, "weight": 1.0, "abstained": "uncertain", "detail": {"said": word}},
    ]
    connection.execute(
        insert(labels).values(
            inference_id=f"i{n}", revision=1, current=True, reward=0.1 * (n % 5), terms=terms, rule_set="rs", held_out=False,
            exclusion="no_consent" if n == 0 else None, labelled_at=at, success=1.0, **common,
        )
    )  # fmt: skip
    seen = {"source": "api", "id": f"o{n}", "inference_id": f"i{n}", "name": "comment", "value": word, "tags": {}, "status": "joined"}
    connection.execute(insert(observations).values(**seen, occurred_at=at, received_at=at))


def _loop(connection: Connection, word: str) -> None:
    now = utc_now()
    for slot, status in ((36_000, "done"), (54_000, "held"), (72_000, "held")):
        connection.execute(
            insert(cycles).values(
                policy=POLICY, slot=slot, status=status, step="elected", reason=word, owner="o", fencing_token=1, attempt=1,
                timings={"batch": 0.5}, started_at=now,
            )
        )  # fmt: skip
    connection.execute(insert(progress).values(policy=POLICY, task="training", done=3, total=9, detail={}, updated_at=now))
    held = {"engine_id": word[:100], "policy": POLICY, "digest": "v1", "address": "http://e", "state": "failed", "detail": word}
    connection.execute(insert(engine_versions).values(**held, changed_at=now, seen_at=now))
    place = {"topic": "ratchet.events", "partition": 0, "offset": 7, "reason": word, "headers": {}, "payload": word.encode()}
    connection.execute(insert(dead_letters).values(**place, attempts=1, first_seen_at=now, last_seen_at=now))
    connection.execute(insert(erasures).values(actor="gone", requested_by=word[:150], erased_at=now, report={"turns": 3}))
    done = {"consumer_group": "ingest", "topic": "t", "partition": 0, "next_offset": 5, "high_water": 9, "updated_at": now}
    connection.execute(insert(stream_offsets).values(**done))
    for digest, toml in (("r1", "a = 1\n"), ("r2", f"a = 2\n# {word}\n")):
        connection.execute(insert(rule_sets).values(digest=digest, name=word[:150], toml=toml, created_at=now))
        connection.execute(insert(rule_set_activations).values(policy=POLICY, digest=digest, activated_by="user:ada", activated_at=now))
