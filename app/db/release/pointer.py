"""What is live: the deployment pointer, changed by compare-and-swap only, its history, and the routes read from it.

The pointer is the truth; MLflow's aliases are a projection of it. Serving pins digests, so nothing here is resolved twice.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any

from sqlalchemy import Connection, Engine, Row, insert, select, update

from app.contact import Contact, Part
from app.db.engine import expected_to_answer, insert_or_ignore, reading, upsert
from app.db.release.holdouts import open_holdouts, read_open
from app.db.tables import deployment_history, deployment_pointer, quarantine, releases, versions
from app.domain.errors import StaleGeneration, Unavailable
from app.domain.release.releases import Pointer, Release, ReleaseState, Route

log = logging.getLogger(__name__)

SERVED = (ReleaseState.CANARY, ReleaseState.PROMOTING, ReleaseState.APPROVED, ReleaseState.READY)
"""States in which a candidate gets traffic, the first of them first: a canary takes over from a release that waits for people."""
CANDIDATES = (ReleaseState.OFFLINE, ReleaseState.QUEUED, *SERVED)
"""States in which engines keep a candidate resident: the offline suites are answered by the engines that would serve it."""
CHAMPION_MOVES = ("bootstrap", "promote", "rollback")
"""Actions of the history that change who is champion; the others only move the holdback or the anchor."""


def read_pointer(connection: Connection, policy: str, *, lock: bool = False) -> Pointer | None:
    """The pointer of a policy; `lock` holds its row until the transaction ends, so that one act follows the other."""
    query = select(deployment_pointer).where(deployment_pointer.c.policy == policy)
    row = connection.execute(query.with_for_update() if lock else query).one_or_none()
    return None if row is None else Pointer(**row._mapping)


def moves_since(connection: Connection, policy: str, generation: int) -> list[str]:
    """What became of the pointer after this generation, oldest first, in sentences."""
    table = deployment_history
    query = select(table).where(table.c.policy == policy, table.c.generation > generation).order_by(table.c.generation)
    return [
        f"{row.action} of {row.digest[:12]} by {row.actor} at {row.occurred_at:%Y-%m-%d %H:%M:%S} UTC" for row in connection.execute(query)
    ]


def swap_pointer(
    connection: Connection, pointer: Pointer, *, expected: int | None, action: str, actor: str, reason: str | None, good: bool = True
) -> None:
    """Move the pointer from generation `expected` (None: there is none yet) to `pointer`, and append to the history.

    Raises `StaleGeneration` when somebody else moved it first; nothing is changed then.
    """
    values = {column.name: getattr(pointer, column.name) for column in deployment_pointer.c}
    if expected is None:
        first = insert_or_ignore(connection, deployment_pointer).values(values).returning(deployment_pointer.c.policy)
        swapped = len(connection.execute(first).all())  # rowcount is -1 here on PostgreSQL
    else:
        held = (deployment_pointer.c.policy == pointer.policy) & (deployment_pointer.c.generation == expected)
        swapped = connection.execute(update(deployment_pointer).where(held).values(values)).rowcount
    if swapped != 1:
        raise StaleGeneration(f"the pointer of {pointer.policy} is no longer at generation {expected}: read it again and decide afresh")
    connection.execute(
        insert(deployment_history).values(
            policy=pointer.policy, generation=pointer.generation, digest=pointer.digest, previous=pointer.previous, anchor=pointer.anchor,
            holdback=pointer.holdback, holdback_digest=pointer.holdback_digest, action=action, good=good, release_id=pointer.release_id,
            actor=actor, reason=reason, occurred_at=pointer.changed_at,
        )
    )  # fmt: skip


def read_history(connection: Connection, policy: str, *, newest: int = 100) -> Sequence[Row[Any]]:
    """The newest rows of the history, newest first."""
    table = deployment_history
    return connection.execute(select(table).where(table.c.policy == policy).order_by(table.c.generation.desc()).limit(newest)).all()


def champion_moved_since(connection: Connection, policy: str, generation: int) -> bool:
    """Whether another version became champion after `generation` (a moved holdback or anchor does not count)."""
    table = deployment_history
    moved = (table.c.policy == policy) & (table.c.generation > generation) & table.c.action.in_(CHAMPION_MOVES)
    return connection.execute(select(table.c.generation).where(moved).limit(1)).first() is not None


def good_versions(connection: Connection, policy: str, *, besides: frozenset[str] = frozenset()) -> list[str]:
    """Digests that were champion and are not quarantined, the newest first, each once: where a rollback may go."""
    table = deployment_history
    query = select(table.c.digest).where(table.c.policy == policy, table.c.good, table.c.action.in_(CHAMPION_MOVES))
    found = connection.execute(query.order_by(table.c.generation.desc())).scalars().all()
    barred = besides | quarantined(connection, policy)
    return [digest for digest in dict.fromkeys(found) if digest not in barred]


def quarantined(connection: Connection, policy: str) -> frozenset[str]:
    """Digests that may never serve again."""
    return frozenset(connection.execute(select(quarantine.c.digest).where(quarantine.c.policy == policy)).scalars())


def bar(connection: Connection, release: Release, *, reason: str, now: datetime) -> bool:
    """Quarantine a release's version; False where it is barred for this very reason already.

    Another reason takes the older one's place, and votes to lift begin anew: they were about what was known when they were cast.
    """
    q, history = quarantine.c, deployment_history.c
    held = (q.policy == release.policy) & (q.digest == release.digest)
    if connection.execute(select(q.reason).where(held)).scalar() == reason:
        return False
    row = {"policy": release.policy, "digest": release.digest, "reason": reason, "release_id": release.id, "since": now}
    barred = upsert(connection, quarantine, key=("policy", "digest"), update=("reason", "lift_votes"))
    connection.execute(barred.values({**row, "lift_votes": None}))
    bad = (history.policy == release.policy) & (history.digest == release.digest)
    connection.execute(update(deployment_history).where(bad).values(good=False))
    return True


def wanted_versions(connection: Connection) -> set[tuple[str, str]]:
    """(policy, digest) of everything the engines have to hold: champion, previous, holdback's reference, holdout, candidates."""
    wanted: set[tuple[str, str]] = set()
    for row in connection.execute(select(deployment_pointer)):
        pointer = Pointer(**row._mapping)
        wanted |= {(pointer.policy, digest) for digest in (pointer.digest, pointer.previous, pointer.reference) if digest is not None}
    wanted |= {(holdout.policy, holdout.digest) for holdout in open_holdouts(connection)}
    table = releases
    candidates = connection.execute(select(table.c.policy, table.c.digest).where(table.c.state.in_(CANDIDATES)))
    return wanted | {(row.policy, row.digest) for row in candidates}


def candidates_of(connection: Connection, policy: str) -> list[Row[Any]]:
    """The releases whose version engines keep as a candidate: those with traffic first, then the newest."""
    table = releases
    moving = connection.execute(select(table).where(table.c.policy == policy, table.c.state.in_(CANDIDATES))).all()
    served = [state.value for state in SERVED]
    return sorted(moving, key=lambda row: (served.index(row.state) if row.state in served else len(served), -row.changed_at.timestamp()))


def versions_by_role(connection: Connection, policy: str) -> dict[str, list[str]]:
    """What `wanted_versions` are wanted for: `champion`, `candidate` (those with traffic first, then the newest), `previous` (the
    holdback's reference first), `held` (by the long-term holdout)."""
    pointer = read_pointer(connection, policy)
    champion = [] if pointer is None else [pointer.digest]
    back = [] if pointer is None else [digest for digest in (pointer.reference, pointer.previous) if digest is not None]
    coming = [row.digest for row in candidates_of(connection, policy) if row.digest not in champion]
    roles = {"champion": champion, "candidate": coming}
    roles |= {"previous": [digest for digest in dict.fromkeys(back) if digest not in champion]}
    holdout = read_open(connection, policy)
    return roles | {"held": [] if holdout is None or holdout.digest in champion else [holdout.digest]}


def read_route(connection: Connection, policy: str) -> Route | None:
    """The route of a policy as the tables say it now; None before its first deployment."""
    pointer = read_pointer(connection, policy)
    if pointer is None:
        return None
    candidates = candidates_of(connection, policy)
    route = Route(
        policy=policy, pointer=pointer, holdout=read_open(connection, policy), quarantined=quarantined(connection, policy),
        coming=next((row.digest for row in candidates if row.digest != pointer.digest), None),
    )  # fmt: skip
    # what people judged was never in a stage, and nobody is served by it before its promotion
    served = [row for row in candidates if row.state in SERVED and row.stage is not None]
    if not served or served[0].champion_digest != pointer.digest:
        return route
    canary, stage = served[0], served[0].stage or 0
    return replace(
        route, canary_digest=canary.digest, canary_release=canary.id, canary_stage=stage,
        canary_share=float(canary.config["stages"][stage]), canary_lasting=float(canary.config.get("lasting", 0.0)),
    )  # fmt: skip


ROUTE_PATIENCE_S = 1.0
"""How long whoever asks for a route waits for the database, once: until it answers again nobody else does."""
SILENT_S = 3.0
"""A database that says nothing for so long is told as silent: a busy one takes a second now and then."""


@dataclass(frozen=True)
class _Question:
    """Something that the database is asked, and when it was."""

    name: str
    answer: Future[Any] = field(default_factory=Future[Any])
    at_s: float = field(default_factory=time.monotonic)


class SqlRoutes:
    """Routes for the gateway, read again when older than `max_age_s`; safe for threads.

    While the database does not answer, the last route is served: nothing can have moved the pointer meanwhile that this process
    could see, and a version that serves is better than none. A database that says nothing at all, neither yes nor no, is asked in a
    thread of its own: it holds up whoever notices it first for `ROUTE_PATIENCE_S`, and nobody after that. `contact` hears of both.
    What was never read is refused then (`Unavailable`), because there is nothing to serve meanwhile.
    """

    def __init__(self, engine: Engine, *, max_age_s: float = 1.0, contact: Contact | None = None) -> None:
        self._engine = engine
        self._contact = contact or Contact()
        self._max_age_s = max_age_s
        self._cache: dict[str, tuple[float, Route]] = {}
        self._versions: set[tuple[str, str]] = set()
        self._asking: dict[str, _Question] = {}
        self._lock = threading.Lock()
        self._away = False
        """The last question was not answered in time, or not at all."""

    def route(self, policy: str) -> Route:
        """The route of a policy, at most `max_age_s` old while the database answers.

        Raises `Unavailable` when nothing was deployed yet, or the database does not say what.
        """
        cached = self._cache.get(policy)
        if cached is not None and time.monotonic() - cached[0] < self._max_age_s:
            return cached[1]
        asked = self._ask(policy, partial(self._read, policy))
        if cached is None:
            route = self._first(asked)
            if route is None:
                raise Unavailable(f"nothing is deployed for {policy} yet: start `ratchet loop`, which deploys the base version")
            return route
        if not self._away or asked.answer.done():
            self._await(asked)
        if not asked.answer.done() and (for_s := time.monotonic() - asked.at_s) >= SILENT_S:
            self._contact.lost(Part.DATABASE, f"nothing was said for {SILENT_S:g} s", for_s=for_s)
        return self._cache[policy][1]

    def champions(self) -> dict[str, str]:
        """The champion of each policy that was asked for, as it was last heard of."""
        return {policy: route.pointer.digest for policy, (_, route) in sorted(self._cache.items())}

    def _ask(self, name: str, read: Callable[[], Any]) -> _Question:
        """The question of that name that is being asked, or a new one."""
        with self._lock:
            asked = self._asking.get(name)
            if asked is None:
                asked = self._asking[name] = _Question(name)
                threading.Thread(target=self._answer, args=(asked, read), name=f"route of {name}", daemon=True).start()
            return asked

    def _answer(self, asked: _Question, read: Callable[[], Any]) -> None:
        answer, fault = None, None
        try:
            answer = read()
        except Exception as error:  # noqa: BLE001 - whoever asked hears of it
            fault = error
            self._contact.lost(Part.DATABASE, str(error))
        self._away = fault is not None
        with self._lock:
            del self._asking[asked.name]
        if fault is None:
            asked.answer.set_result(answer)
        else:
            asked.answer.set_exception(fault)

    def _await(self, asked: _Question) -> None:
        """Until it is answered, or was asked `ROUTE_PATIENCE_S` ago."""
        if not wait([asked.answer], max(0.0, asked.at_s + ROUTE_PATIENCE_S - time.monotonic())).done:
            self._away = True

    def _first(self, asked: _Question) -> Any:  # noqa: ANN401 - what the question is answered with
        """What was never read before. Raises `Unavailable` where the database does not answer, or not in time."""
        self._await(asked)
        if not asked.answer.done():
            raise Unavailable(
                f"the database said nothing within {ROUTE_PATIENCE_S:g} s about {asked.name}: check RATCHET_DATABASE_URL and its server"
            )
        return asked.answer.result()

    def knows(self, policy: str, digest: str) -> bool:
        """Whether this is a version of the policy; a version stays one, so a yes is remembered. Raises `Unavailable`."""
        if (policy, digest) in self._versions:
            return True
        return self._first(self._ask(f"{policy}@{digest}", partial(self._find, policy, digest)))

    def _find(self, policy: str, digest: str) -> bool:
        mine = (versions.c.policy == policy) & (versions.c.digest == digest)
        with expected_to_answer(), reading(self._engine) as connection:
            found = connection.execute(select(versions.c.digest).where(mine)).first() is not None
        if found:
            self._versions.add((policy, digest))
        return found

    def _read(self, policy: str) -> Route | None:
        asked_at = time.monotonic()
        with expected_to_answer("check RATCHET_DATABASE_URL and its server"), reading(self._engine) as connection:
            route = read_route(connection, policy)
        self._contact.heard(Part.DATABASE)
        if route is not None:
            self._cache[policy] = (asked_at, route)
        return route


def deployed_at(connection: Connection, policy: str, generation: int) -> datetime | None:
    """When a generation of the pointer was made."""
    table = deployment_history
    return connection.execute(select(table.c.occurred_at).where(table.c.policy == policy, table.c.generation == generation)).scalar()
