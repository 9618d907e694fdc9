"""Lineage: what a version was trained on, and which versions saw a person."""

from typing import Any

from sqlalchemy import Connection, func, select, union_all

from app.db.release.versions import lineage
from app.db.tables import batch_items, batches, returned_items, training_runs, turns, versions
from app.domain.errors import NotFound
from app.domain.release.versions import Version

EVER = union_all(*(select(table.c.batch_id, table.c.actor) for table in (batch_items, returned_items))).subquery("ever")
"""Whose turns were ever in which batch, given back or not: a candidate that a fault ended has seen them all the same."""


def version_of_name(connection: Connection, name: str) -> Version:
    """The version with this name, or whose digest begins with it. Raises `NotFound`."""
    row = connection.execute(
        select(versions.c.policy, versions.c.digest).where((versions.c.name == name) | versions.c.digest.startswith(name, autoescape=True))
    ).all()
    if len(row) != 1:
        raise NotFound(f"{len(row)} versions are called or begin with {name!r}; give a full name or more of the digest")
    return lineage(connection, row[0].policy, row[0].digest)[0]


def chain_of(connection: Connection, version: Version) -> list[dict[str, Any]]:
    """The version and its ancestors, newest first, back to the base: each with its run's configuration, the code that ran (in `tags`), and
    what it learned from: a batch with its rule set, people and turns, or a corpus (in `tags`)."""
    return [_link(connection, link) for link in lineage(connection, version.policy, version.digest)]


def _link(connection: Connection, version: Version) -> dict[str, Any]:
    link: dict[str, Any] = {
        "name": version.name, "digest": version.digest, "kind": version.kind.value, "created_at": version.created_at.isoformat(),
        "base_model": version.base_model, "licence": version.licence, "tags": version.tags,
    }  # fmt: skip
    run = connection.execute(select(training_runs).where(training_runs.c.id == version.run_id)).first() if version.run_id else None
    if run is None:
        return link
    link |= {"run": run.id, "config": run.config}
    batch = connection.execute(select(batches).where(batches.c.id == run.batch_id)).first()
    if batch is None:
        return link  # pretrained: the corpus is in its tags
    items = select(func.count(), func.count(func.distinct(EVER.c.actor))).where(EVER.c.batch_id == batch.id)
    trained, people = connection.execute(items).one()
    return link | {
        "batch": batch.id, "rule_set": batch.rule_set, "turns": trained, "people": people,
        "window": [batch.window_from.isoformat(), batch.window_to.isoformat()], "left_out": batch.left_out,
    }  # fmt: skip


def versions_that_saw(connection: Connection, actor: str) -> dict[str, list[str]]:
    """Names of versions by relation to a person (hashed): `served` them, `trained` on their turns, `descended` from one that was."""
    served = select(turns.c.policy, turns.c.version).where(turns.c.actor == actor).distinct()
    used = (
        select(training_runs.c.policy, training_runs.c.candidate)
        .join(EVER, EVER.c.batch_id == training_runs.c.batch_id)
        .where(EVER.c.actor == actor, training_runs.c.candidate.is_not(None))
        .distinct()
    )
    trained = {(row.policy, row.candidate) for row in connection.execute(used)}
    known = {(row.policy, row.digest): row for row in connection.execute(select(versions)).all()}
    descended = {key for key in known if key not in trained and _has_ancestor(key, trained, known)}
    seen = {(row.policy, row.version) for row in connection.execute(served)}
    groups = {"served": seen, "trained": trained, "descended": descended}
    return {relation: sorted(known[key].name for key in keys if key in known) for relation, keys in groups.items()}


def _has_ancestor(key: tuple[str, str], among: set[tuple[str, str]], known: dict[tuple[str, str], Any]) -> bool:
    policy, digest = key
    while (row := known.get((policy, digest))) is not None and row.parent is not None:
        if (policy, row.parent) in among:
            return True
        digest = row.parent
    return False
