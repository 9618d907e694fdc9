"""`ratchet dlq`: look at dead letters, and apply them after all once their cause is mended. Over HTTP."""

import json
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

import click
import msgspec

from app import wiring
from app.domain.telemetry.dead_letters import letter_of, told, told_whole
from app.domain.telemetry.dead_letters import replay as replay_page
from app.settings import Settings, from_environment
from pipelines.commands.operating import Remote, acting
from pipelines.commands.operating import break_glass as _break_glass

PAGE_S = 300.0
"""A page of letters, each a transaction of its own."""


@click.group()
def dlq() -> None:
    """Records that made no sense, with where they lay and why."""


@dlq.command(name="list")
@click.option("--reason", help="Only those whose reason holds these words.")
@click.option("--all", "everything", is_flag=True, help="Replayed ones too.")
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True)
@acting
def list_(reason: str | None, everything: bool, limit: int, url: str | None, break_glass: bool) -> None:
    """List dead letters, oldest first."""
    settings = from_environment()
    if break_glass:
        found = wiring.dead_letters(settings).find(reason=reason, pending=not everything, limit=limit)
        rows: list[dict[str, Any]] = [msgspec.to_builtins(told(stored)) for stored in found]
    else:
        asked = Remote.of(settings, url)
        rows = asked.get("/v1/dead-letters", reason=reason, replayed="true" if everything else None, limit=limit)["data"]
    for row in rows:
        place = f"{row['topic']}:{row['partition']}:{row['offset']}"
        state = "replayed" if row["replayed_at"] else f"tried {row['attempts']}×"
        click.echo(f"{row['id']}\t{datetime.fromisoformat(row['first_seen_at']):%Y-%m-%dT%H:%M:%SZ}\t{place}\t{state}\t{row['reason']}")
    click.echo(f"{len(rows)} dead letters", err=True)


@dlq.command()
@click.argument("id_", metavar="ID", type=int)
@acting
def show(id_: int, url: str | None, break_glass: bool) -> None:
    """Show one dead letter whole, as JSON: it is what somebody said."""
    settings = from_environment()
    if break_glass:
        _break_glass(settings, act="dlq show", subject=f"dead letter {id_}")
        letter = msgspec.to_builtins(told_whole(letter_of(wiring.dead_letters(settings), id_)))
    else:
        letter = Remote.of(settings, url).get(f"/v1/dead-letters/{id_}")
    click.echo(json.dumps(letter, indent=2, ensure_ascii=False))


@dlq.command()
@click.argument("ids", metavar="[ID]...", type=int, nargs=-1)
@click.option("--reason", help="Those whose reason holds these words, instead of ids.")
@acting
def replay(ids: Sequence[int], reason: str | None, url: str | None, break_glass: bool) -> None:
    """Apply dead letters (by id, by reason, or all that wait); what was applied meanwhile is not applied twice."""
    settings = from_environment()
    page = _here(settings, ids, reason) if break_glass else _there(Remote.of(settings, url), ids, reason)
    applied, again, after = 0, 0, 0
    while after is not None:
        done = page(after)
        for id_, why in done["still"].items():
            click.echo(f"{id_}: still {why}", err=True)
        applied, again, after = applied + done["applied"], again + len(done["still"]), done["after"]
    click.echo(f"{applied} replayed, {again} still make no sense")


def _there(service: Remote, ids: Sequence[int], reason: str | None) -> Callable[[int], dict[str, Any]]:
    asked = {"ids": ids} | ({"reason": reason} if reason else {})
    return lambda after: service.send("POST", "/v1/dead-letters/replay", asked | {"after": after}, patience_s=PAGE_S)


def _here(settings: Settings, ids: Sequence[int], reason: str | None) -> Callable[[int], dict[str, Any]]:
    _break_glass(settings, act="dlq replay", subject="dead letters", reason=reason or "")
    letters, store, clock = wiring.dead_letters(settings), wiring.effect_store(settings), wiring.clock(settings)
    return lambda after: dict(vars(replay_page(letters, store, ids=ids, reason=reason, after=after, clock=clock)))


@dlq.command()
@click.option("--days", type=click.FloatRange(0), default=30.0, show_default=True, help="Age since their replay.")
@acting
def purge(days: float, url: str | None, break_glass: bool) -> None:
    """Delete dead letters that were replayed long ago."""
    settings = from_environment()
    if break_glass:
        _break_glass(settings, act="dlq purge", subject="dead letters")
        deleted = wiring.dead_letters(settings).purge(before=wiring.clock(settings)() - timedelta(days=days))
    else:
        deleted = Remote.of(settings, url).send("POST", "/v1/dead-letters/purge", {"days": days})["deleted"]
    click.echo(f"{deleted} deleted")
