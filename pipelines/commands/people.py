"""`ratchet people`: who may do what. Over HTTP as an admin; only the first admin's link is made on the machine itself."""

import json
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from app import wiring
from app.domain.errors import Refused
from app.domain.people import FIRST_LINK_LASTS, Role
from app.secret_files import private_folder, written
from app.settings import from_environment
from pipelines.commands.operating import Remote, os_user, remote

ROLES = click.Choice([role.value for role in Role])


@click.group()
def people() -> None:
    """Add, list, change and invite people."""


@people.command()
@click.argument("name")
@click.option("--os-user", "os_user_", help="Their user on this machine; the same person where four eyes are counted.")
@click.option("--break-glass", is_flag=True, help="Although there is an admin: theirs is lost. Audited.")
def first(name: str, os_user_: str | None, break_glass: bool) -> None:
    """Make NAME the first admin: writes a link that is good once, for 15 minutes, into a file that you alone can read.

    Whoever can run this can write the database anyway. From then on this service is closed: products need keys (`ratchet keys create`).
    """
    settings = from_environment()
    book, who = wiring.people_book(settings), os_user()
    admins = [p for p in book.all() if Role.ADMIN in p.roles and p.disabled_at is None and p.policy is None]
    ready = [p.name for p in admins if p.has_password or p.subject is not None]
    if ready and not break_glass:
        raise Refused(f"{', '.join(ready)} can add people already (`ratchet people add`); where nobody of them can sign in, --break-glass")
    known = {person.name: person for person in book.all()}
    if name not in known:
        book.add(name, roles=[Role.ADMIN], os_user=os_user_, by=who)
    elif Role.ADMIN not in known[name].roles:
        book.change(name, roles=[*known[name].roles, Role.ADMIN], by=who)
    secret = book.invite(name, lasts=FIRST_LINK_LASTS, by=who)
    path = written(private_folder(settings.secrets), [f"{settings.address}/console/welcome?link={secret}"])
    target = path.replace(settings.secrets / "first_admin_link")
    click.echo(f"{target} has a link with which {name} sets a password: good once, until {FIRST_LINK_LASTS.seconds // 60} minutes from now")


@people.command("list")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@remote
def list_(as_json: bool, url: str | None) -> None:
    """List everybody."""
    found = Remote.of(from_environment(), url).get("/v1/people")["people"]
    if as_json:
        click.echo(json.dumps(found))
        return
    table = Table("name", "roles", "policy", "signs in with", "added by", "state")
    for person in found:
        ways = [way for way, has in (("password", person["has_password"]), ("provider", person["provider"])) if has]
        state = "active" if person["disabled_at"] is None else f"disabled {person['disabled_at'][:16]}"
        table.add_row(
            person["name"], ", ".join(person["roles"]), person["policy"] or "all", " ".join(ways) or "nothing yet", person["made_by"], state
        )
    Console(soft_wrap=True).print(table)


@people.command()
@click.argument("name")
@click.option("--role", "roles", multiple=True, required=True, type=ROLES, help="May be repeated.")
@click.option("--policy", help="The one policy they are there for; all without it.")
@click.option("--email", help="Where news goes, and how a provider's account is recognised.")
@click.option("--os-user", "os_user_", help="Their user on the machine; the same person where four eyes are counted.")
@remote
def add(name: str, roles: tuple[str, ...], policy: str | None, email: str | None, os_user_: str | None, url: str | None) -> None:
    """Add NAME and show the link with which they set a password, once, within a day."""
    given: dict[str, Any] = {"name": name, "roles": roles, "policy": policy, "email": email, "os_user": os_user_}
    made = Remote.of(from_environment(), url).send("POST", "/v1/people", {k: v for k, v in given.items() if v is not None})
    click.echo(made["link"])
    click.echo(f"{name} is {', '.join(made['roles'])}. The link is shown this once, and is good once, for a day.", err=True)


@people.command()
@click.argument("name")
@click.option("--role", "roles", multiple=True, type=ROLES, help="The roles from now on; may be repeated.")
@click.option("--policy", help="The one policy they are there for; `all` for all.")
@click.option("--email", help="Their address.")
@click.option("--os-user", "os_user_", help="Their user on the machine.")
@click.option("--disable/--enable", "disabled", default=None, help="Disabled, every session and token of theirs ends at once.")
@remote
def change(
    name: str, roles: tuple[str, ...], policy: str | None, email: str | None, os_user_: str | None, disabled: bool | None, url: str | None
) -> None:
    """Change what NAME may do."""
    given: dict[str, Any] = {"roles": roles or None, "email": email, "os_user": os_user_, "disabled": disabled}
    changes = {k: v for k, v in given.items() if v is not None}
    if policy is not None:
        changes["policy"] = None if policy == "all" else policy
    if not changes:
        raise Refused("nothing to change: name --role, --policy, --email, --os-user, --disable or --enable")
    now = Remote.of(from_environment(), url).send("PATCH", f"/v1/people/{name}", changes)
    state = "" if now["disabled_at"] is None else ", disabled"
    click.echo(f"{name} is {', '.join(now['roles'])} of {now['policy'] or 'all policies'}{state}")


@people.command()
@click.argument("name")
@remote
def invite(name: str, url: str | None) -> None:
    """Show a new link with which NAME sets a password; for a day you do not count beside them."""
    click.echo(Remote.of(from_environment(), url).send("POST", f"/v1/people/{name}/link")["link"])


@people.command("sign-out")
@click.argument("name")
@remote
def sign_out(name: str, url: str | None) -> None:
    """End every session and token of NAME at once; they may sign in again."""
    Remote.of(from_environment(), url).send("POST", f"/v1/people/{name}/sign-out")
    click.echo(f"every session and token of {name} has ended")


@people.command()
@remote
def roles(url: str | None) -> None:
    """Show which role may do what."""
    table = Table("action", *(role.value for role in Role))
    for action, allowed in Remote.of(from_environment(), url).get("/v1/roles").items():
        table.add_row(action, *("yes" if role in allowed else "" for role in Role))
    Console(soft_wrap=True).print(table)
