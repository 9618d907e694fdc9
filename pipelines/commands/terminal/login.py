"""`ratchet login` and `ratchet logout`: a token of one's own for this terminal."""

import socket

import click

from app.domain.errors import Refused
from app.settings import from_environment
from pipelines.commands.operating import Remote, remote
from pipelines.commands.terminal.kept import keep_token, kept_token

PREFIX_CHARS = 11


@click.command()
@click.option("--name", help="Who you are; asked for without it.")
@click.option("--days", default=30.0, show_default=True, type=click.FloatRange(min=0, min_open=True, max=366), help="Until the token ends.")
@click.option("--token", is_flag=True, help="Keep a token that you made on the page Access, read from the standard input.")
@remote
def login(name: str | None, days: float, token: bool, url: str | None) -> None:
    """Sign in to the service and keep a token for it, readable by you alone."""
    service = Remote.of(from_environment(), url)
    if token:
        text = input().strip()
    else:
        name = name or click.prompt("name")
        password = click.prompt("password", hide_input=True)
        asked = {"name": name, "password": password, "token_name": f"terminal on {socket.gethostname()}"[:150], "expires_days": days}
        text = str(Remote(service.url, None).send("POST", "/v1/sign-in", asked)["token"])
    me = Remote(service.url, text).get("/v1/me")
    if not me["roles"]:
        raise Refused(f"this is the key of {me['actor']}, not a person's token: put a program's key into RATCHET_KEY")
    path = keep_token(service.url, text)
    click.echo(f"signed in to {service.url} as {me['actor']} ({', '.join(me['roles'])}); the token is in {path}")


@click.command()
@remote
def logout(url: str | None) -> None:
    """End the token that is kept for the service, and forget it."""
    where = Remote.of(from_environment(), url).url
    token = kept_token(where)
    if token is None:
        raise Refused(f"no token is kept for {where}: nobody is signed in")
    try:
        Remote(where, token).send("DELETE", f"/v1/tokens/{token[:PREFIX_CHARS]}")
    finally:
        keep_token(where, None)
    click.echo(f"the token for {where} has ended")
