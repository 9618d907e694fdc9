"""`ratchet webhooks`: who hears of releases, signed as Standard Webhooks has it, and what reached them."""

import click
from rich.console import Console
from rich.table import Column, Table

from app import wiring
from app.domain.errors import Refused
from app.domain.ids import utc_now
from app.release.webhooks import check_url, new_secret
from app.settings import LOOPBACK, from_environment

ID_WIDTH = 36
"""Ids are to be copied from the table: they are never cut off."""


@click.group()
def webhooks() -> None:
    """Add, list, test, rotate and remove receivers of release events; `ratchet watch` delivers, for days where it has to."""


@webhooks.command("list")
def list_() -> None:
    """List the receivers there are and were; never their secrets."""
    table = Table(Column("webhook", min_width=ID_WIDTH), "policy", "url", "events", "secrets", "state")
    for hook in wiring.webhook_book(from_environment()).all():
        state = "active" if hook.disabled_at is None else f"removed {hook.disabled_at:%Y-%m-%d %H:%M}"
        table.add_row(hook.id, hook.policy or "all", hook.url, ", ".join(hook.events) or "all", str(len(hook.secrets)), state)
    Console(soft_wrap=True).print(table)


@webhooks.command()
@click.argument("url")
@click.option("--policy", help="Only events of this policy; all without it.")
@click.option("--event", "events", multiple=True, help="Only types that begin so, such as release.ready or deployment. (repeatable).")
def add(url: str, policy: str | None, events: tuple[str, ...]) -> None:
    """Register a receiver and show its signing secret, this once."""
    settings = from_environment()
    if policy is not None:
        wiring.require_policy(wiring.load_policies(settings), policy)
    check_url(url, allow_loopback=settings.host in LOOPBACK)
    secret = new_secret()
    hook = wiring.webhook_book(settings).add(policy=policy, url=url, secret=secret, events=events, now=utc_now())
    click.echo(secret)
    click.echo(f"{hook.id} is registered; this is the only time its secret is shown. Try it: `ratchet webhooks test {hook.id}`", err=True)


@webhooks.command()
@click.argument("webhook_id")
def test(webhook_id: str) -> None:
    """Send `webhook.test` to a receiver, signed like any event; exit code 2 where it did not take it."""
    settings = from_environment()
    hook = wiring.webhook_book(settings).find(webhook_id)
    status, arrived = wiring.courier(settings).send_test(hook)
    if not arrived:
        raise Refused(f"{hook.url} did not take it ({status}): it has to answer with 2xx within 15 seconds")
    click.echo(f"{hook.url} answered {status}")


@webhooks.command()
@click.argument("webhook_id")
def rotate(webhook_id: str) -> None:
    """Give a receiver a new secret and show it, this once; the one before it keeps signing until the next rotation."""
    book, secret = wiring.webhook_book(from_environment()), new_secret()
    hook = book.find(webhook_id)
    book.set_secrets(webhook_id, [secret, *hook.secrets[:1]])
    click.echo(secret)


@webhooks.command()
@click.argument("webhook_id")
def remove(webhook_id: str) -> None:
    """Stop deliveries to a receiver; what it got stays on record."""
    book = wiring.webhook_book(from_environment())
    click.echo(f"{book.disable(book.find(webhook_id).id, now=utc_now()).url} hears no more")


@webhooks.command()
@click.argument("webhook_id")
@click.option("--limit", default=20, show_default=True, help="How many, newest first.")
def deliveries(webhook_id: str, limit: int) -> None:
    """What became of the newest deliveries."""
    book = wiring.webhook_book(from_environment())
    table = Table(Column("event", min_width=ID_WIDTH), "attempts", "last answer", "delivered", "next attempt")
    for row in book.deliveries(book.find(webhook_id).id, limit=limit):
        times = [f"{row[name]:%Y-%m-%d %H:%M:%S}" if row[name] else "" for name in ("delivered_at", "next_attempt_at")]
        table.add_row(row["event_id"], str(row["attempts"]), row["last_status"] or "", *times)
    Console(soft_wrap=True).print(table)
