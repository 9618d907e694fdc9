"""`ratchet keys`: create, list and revoke API keys."""

from datetime import timedelta

import click
from rich.console import Console
from rich.table import Table

from app import wiring
from app.domain.access import ApiKey, Scope
from app.domain.ids import utc_now
from app.settings import from_environment
from pipelines.commands.operating import os_user


@click.group()
def keys() -> None:
    """Create, list and revoke API keys."""


@keys.command()
@click.option("--name", required=True, help="What or whom it is for.")
@click.option(
    "--scope", "scopes", multiple=True, required=True, type=click.Choice([scope.value for scope in Scope]), help="May be repeated."
)
@click.option("--policy", help="The one policy it is good for; all without it.")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="Events and requests a second; unlimited without it.")
@click.option("--expires-days", type=click.FloatRange(min=0, min_open=True), help="Days until it ends; never without it.")
def create(name: str, scopes: tuple[str, ...], policy: str | None, rate: float | None, expires_days: float | None) -> None:
    """Create a key and show it, this once."""
    settings = from_environment()
    if policy is not None:
        wiring.require_policy(wiring.load_policies(settings), policy)
    expires_at = utc_now() + timedelta(days=expires_days) if expires_days else None
    key, text = wiring.key_book(settings).create(
        name=name, scopes=[Scope(scope) for scope in scopes], policy=policy, rate_per_s=rate, expires_at=expires_at, by=os_user()
    )
    click.echo(text)
    click.echo(f"This is the only time the key is shown. Its prefix is {key.prefix}; `ratchet keys revoke {key.prefix}` ends it.", err=True)


@keys.command("list")
def list_() -> None:
    """List the keys there are and were; never their secrets."""
    table = Table("prefix", "name", "scopes", "policy", "rate/s", "created", "state")
    for key in wiring.key_book(from_environment()).history():
        scopes = ", ".join(sorted(key.scopes))
        rate = "" if key.rate_per_s is None else f"{key.rate_per_s:g}"
        table.add_row(key.prefix, key.name, scopes, key.policy or "all", rate, f"{key.created_at:%Y-%m-%d %H:%M}", _state(key))
    Console().print(table)


@keys.command()
@click.argument("prefix")
def revoke(prefix: str) -> None:
    """End a key for good; running services refuse it within two seconds."""
    key = wiring.key_book(from_environment()).revoke(prefix, by=os_user())
    click.echo(f"{key.prefix} ({key.name}) is revoked")


@keys.command("rotate-sessions")
def rotate_sessions() -> None:
    """Sign the keys of sessions with a fresh secret; those signed with the one before it stay good, older ones end."""
    path = wiring.rotate_session_secret(from_environment())
    click.echo(f"{path} has a fresh secret; run this twice and every session key there was has ended")


def _state(key: ApiKey) -> str:
    if key.revoked_at is not None:
        return f"revoked {key.revoked_at:%Y-%m-%d %H:%M}"
    if key.expires_at is None:
        return "active"
    return f"{'expires' if key.usable_at(utc_now()) else 'expired'} {key.expires_at:%Y-%m-%d %H:%M}"
