"""`ratchet webhooks`: who hears of releases, signed as Standard Webhooks has it, and what reached them. Over HTTP."""

import asyncio
from datetime import datetime
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Column, Table

from app import wiring
from app.domain.errors import Refused
from app.domain.ids import utc_now
from app.release.addresses import check_url
from app.release.webhooks import new_secret
from app.settings import Settings, from_environment
from pipelines.commands.operating import Remote, acting
from pipelines.commands.operating import break_glass as _break_glass

ID_WIDTH = 36
"""Ids are to be copied from the table: they are never cut off."""
TEST_S = 60.0
"""A receiver has 15 seconds in all, and the service may be busy."""


@click.group()
def webhooks() -> None:
    """Add, list, test, rotate and remove receivers of release events; `ratchet watch` delivers, for days where it has to."""


@webhooks.command("list")
@acting
def list_(url: str | None, break_glass: bool) -> None:
    """List the receivers there are and were; never their secrets."""
    settings = from_environment()
    if break_glass:
        known = [msgspec.to_builtins(hook.told()) for hook in wiring.webhook_book(settings).all()]
    else:
        known = Remote.of(settings, url).get("/v1/webhooks")["data"]
    table = Table(Column("webhook", min_width=ID_WIDTH), "policy", "url", "events", "signatures", "state")
    for hook in known:
        state = "active" if hook["disabled_at"] is None else f"removed {datetime.fromisoformat(hook['disabled_at']):%Y-%m-%d %H:%M}"
        table.add_row(hook["id"], hook["policy"] or "all", hook["url"], ", ".join(hook["events"]) or "all", str(hook["signatures"]), state)
    Console(soft_wrap=True).print(table)


@webhooks.command()
@click.argument("receiver", metavar="URL")
@click.option("--policy", help="Only events of this policy; all without it.")
@click.option("--event", "events", multiple=True, help="Only types that begin so, such as release.ready or deployment. (repeatable).")
@acting
def add(receiver: str, policy: str | None, events: tuple[str, ...], url: str | None, break_glass: bool) -> None:
    """Register a receiver and show its signing secret, this once."""
    settings = from_environment()
    if break_glass:
        hook_id, secret = _added_here(settings, receiver, policy, events)
    else:
        given: dict[str, Any] = {"url": receiver, "events": events} | ({"policy": policy} if policy else {})
        made = Remote.of(settings, url).send("POST", "/v1/webhooks", given)
        hook_id, secret = made["id"], made["secret"]
    click.echo(secret)
    click.echo(f"{hook_id} is registered; this is the only time its secret is shown. Try it: `ratchet webhooks test {hook_id}`", err=True)


def _added_here(settings: Settings, receiver: str, policy: str | None, events: tuple[str, ...]) -> tuple[str, str]:
    if policy is not None:
        wiring.require_policy(wiring.load_policies(settings), policy)
    check_url(receiver, allow_loopback=settings.reached_by is None)
    who, secret = _break_glass(settings, act="webhooks add", subject=policy or "all policies"), new_secret()
    hook = wiring.webhook_book(settings).add(policy=policy, url=receiver, secret=secret, events=events, now=utc_now(), by=who)
    return hook.id, secret


@webhooks.command()
@click.argument("webhook_id")
@acting
def test(webhook_id: str, url: str | None, break_glass: bool) -> None:
    """Send `webhook.test` to a receiver, signed like any event; exit code 2 where it did not take it."""
    settings = from_environment()
    if break_glass:
        hook = wiring.webhook_book(settings).find(webhook_id)
        _break_glass(settings, act="webhooks test", subject=webhook_id)
        status, arrived = asyncio.run(wiring.courier(settings).send_test(hook))
    else:
        told = Remote.of(settings, url).send("POST", f"/v1/webhooks/{webhook_id}/test", patience_s=TEST_S)
        status, arrived = told["status"], told["arrived"]
    if not arrived:
        raise Refused(f"{webhook_id} did not take it ({status}): it has to answer with 2xx within 15 seconds")
    click.echo(f"{webhook_id} answered {status}")


@webhooks.command()
@click.argument("webhook_id")
@acting
def rotate(webhook_id: str, url: str | None, break_glass: bool) -> None:
    """Give a receiver a new secret and show it, this once; the one before it keeps signing until the next rotation."""
    settings = from_environment()
    if break_glass:
        who, secret = _break_glass(settings, act="webhooks rotate", subject=webhook_id), new_secret()
        wiring.webhook_book(settings).rotate(webhook_id, secret, now=utc_now(), by=who)
    else:
        secret = Remote.of(settings, url).send("POST", f"/v1/webhooks/{webhook_id}/rotate")["secret"]
    click.echo(secret)


@webhooks.command()
@click.argument("webhook_id")
@acting
def remove(webhook_id: str, url: str | None, break_glass: bool) -> None:
    """Stop deliveries to a receiver; what it got stays on record."""
    settings = from_environment()
    if break_glass:
        who = _break_glass(settings, act="webhooks remove", subject=webhook_id)
        receiver = wiring.webhook_book(settings).disable(webhook_id, now=utc_now(), by=who).url
    else:
        receiver = Remote.of(settings, url).send("DELETE", f"/v1/webhooks/{webhook_id}")["url"]
    click.echo(f"{receiver} hears no more")


@webhooks.command()
@click.argument("webhook_id")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="How many, newest first.")
@acting
def deliveries(webhook_id: str, limit: int, url: str | None, break_glass: bool) -> None:
    """What became of the newest deliveries."""
    settings = from_environment()
    if break_glass:
        book = wiring.webhook_book(settings)
        rows = msgspec.to_builtins(book.deliveries(book.find(webhook_id).id, limit=limit))
    else:
        rows = Remote.of(settings, url).get(f"/v1/webhooks/{webhook_id}/deliveries", limit=limit)["data"]
    table = Table(Column("event", min_width=ID_WIDTH), "attempts", "last answer", "delivered", "next attempt")
    for row in rows:
        times = [
            f"{datetime.fromisoformat(row[name]):%Y-%m-%d %H:%M:%S}" if row[name] else "" for name in ("delivered_at", "next_attempt_at")
        ]
        table.add_row(row["event_id"], str(row["attempts"]), row["last_status"] or "", *times)
    Console(soft_wrap=True).print(table)
