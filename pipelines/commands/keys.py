"""`ratchet keys`: create, list and revoke API keys. Over HTTP; the first one, which closes an open service, on the machine itself."""

from datetime import datetime, timedelta
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Column, Table

from app import wiring
from app.domain.access import Scope
from app.domain.ids import utc_now
from app.settings import from_environment
from pipelines.commands.operating import Remote, acting
from pipelines.commands.operating import break_glass as _break_glass


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
@acting
def create(
    name: str, scopes: tuple[str, ...], policy: str | None, rate: float | None, expires_days: float | None, url: str | None,
    break_glass: bool,
) -> None:  # fmt: skip
    """Create a key and show it, this once."""
    if break_glass:
        text, prefix = _made_here(name, scopes, policy, rate, expires_days)
    else:
        given = {"name": name, "scopes": scopes, "policy": policy, "rate_per_s": rate, "expires_days": expires_days}
        made = Remote.of(from_environment(), url).send("POST", "/v1/keys", {k: v for k, v in given.items() if v is not None})
        text, prefix = made["key"], made["prefix"]
    click.echo(text)
    click.echo(f"This is the only time the key is shown. Its prefix is {prefix}; `ratchet keys revoke {prefix}` ends it.", err=True)


def _made_here(name: str, scopes: tuple[str, ...], policy: str | None, rate: float | None, days: float | None) -> tuple[str, str]:
    settings = from_environment()
    if policy is not None:
        wiring.require_policy(wiring.load_policies(settings), policy)
    key, text = wiring.key_book(settings).create(
        name=name, scopes=[Scope(scope) for scope in scopes], policy=policy, rate_per_s=rate,
        expires_at=utc_now() + timedelta(days=days) if days else None, by=_break_glass(settings, act="keys create", subject=name),
    )  # fmt: skip
    return text, key.prefix


@keys.command("list")
@acting
def list_(url: str | None, break_glass: bool) -> None:
    """List the keys there are and were; never their secrets."""
    settings = from_environment()
    if break_glass:
        known = [msgspec.to_builtins(key.told(utc_now())) for key in wiring.key_book(settings).history()]
    else:
        known = Remote.of(settings, url).get("/v1/keys")["keys"]
    table = Table(Column("prefix", no_wrap=True), "name", "scopes", "policy", "rate/s", "created", "last used", "state")
    for key in known:
        rate = "" if key["rate_per_s"] is None else f"{key['rate_per_s']:g}"
        used = "never" if key["last_used_at"] is None else _minute(key["last_used_at"])
        scopes, made = ", ".join(key["scopes"]), _minute(key["created_at"])
        table.add_row(key["prefix"], key["name"], scopes, key["policy"] or "all", rate, made, used, _state(key))
    Console(soft_wrap=True).print(table)


@keys.command()
@click.argument("prefix")
@acting
def revoke(prefix: str, url: str | None, break_glass: bool) -> None:
    """End a key for good; running services refuse it within two seconds."""
    settings = from_environment()
    if break_glass:
        key = wiring.key_book(settings).revoke(prefix, by=_break_glass(settings, act="keys revoke", subject=prefix))
        name = key.name
    else:
        name = Remote.of(settings, url).send("DELETE", f"/v1/keys/{prefix}")["name"]
    click.echo(f"{prefix} ({name}) is revoked")


@keys.command("rotate-sessions")
@acting
def rotate_sessions(url: str | None, break_glass: bool) -> None:
    """Sign the keys of sessions with a fresh secret; those signed with the one before it stay good, older ones end."""
    settings = from_environment()
    if break_glass:
        who = _break_glass(settings, act="keys rotate-sessions", subject="keys of sessions")
        where = str(wiring.rotate_session_secret(settings, by=who))
    else:
        service = Remote.of(settings, url)
        service.send("POST", "/v1/keys/rotate-sessions")
        where = service.url
    click.echo(f"{where} has a fresh secret; run this twice and every session key there was has ended")


def _state(key: dict[str, Any]) -> str:
    if key["revoked_at"] is not None:
        return f"revoked {_minute(key['revoked_at'])}"
    if key["expires_at"] is None:
        return "active"
    return f"{'expires' if key['usable'] else 'expired'} {_minute(key['expires_at'])}"


def _minute(moment: str) -> str:
    return f"{datetime.fromisoformat(moment):%Y-%m-%d %H:%M}"
