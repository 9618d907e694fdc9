"""`ratchet recover`: after a restore to a moment, or a failover that lost commits. See docs/recovery.md for the order of steps."""

import re
import sys
from collections.abc import Iterator

import click

from app import wiring
from app.settings import from_environment
from pipelines.commands.operating import os_user


@click.group()
def recover() -> None:
    """Find and mend what a database that went back does not know any more."""


@recover.command()
@click.option("--kafka/--no-kafka", default=True, show_default=True, help="Ask the broker how far ingestion had told it to be.")
def check(*, kafka: bool) -> None:
    """Hold the database to what did not go back with it; a line for each difference with its cure, and exit code 1 where there is one."""
    found = wiring.recovery_findings(from_environment(), kafka=kafka)
    for finding in found:
        first = f" ({finding.first}, …)" if finding.count > 1 and finding.first else (f" ({finding.first})" if finding.first else "")
        click.echo(f"{finding.count:>8}  {finding.what}{first}: {finding.cure}")
    if found:
        raise click.exceptions.Exit(1)
    click.echo("everything fits together")


@recover.command()
def erasures() -> None:
    """Forget again whom the database forgot to have forgotten, and whose words came back with older files.

    Before that, turns whose file was merged or copied since the moment are found in the one that took its place.
    """
    turns, people, files = wiring.erase_again(from_environment())
    found = f"found the words of {turns} turns in newer files, " if turns else ""
    click.echo(f"{found}erased {people} people again, and took the words of erased ones out of {files} segments")


@recover.command()
@click.confirmation_option("--yes", prompt="Everybody who is stored becomes a stranger, and can be erased by --pseudonym alone. Go on?")
def salt() -> None:
    """Go on with the salt that is set, or a fresh one where none is, when the one that people are stored under is lost.

    Every process that answers people has to be started again after it.
    """
    wiring.accept_salt(from_environment(), by=os_user())
    click.echo("from now on people are stored under this salt: start the api's processes again")


@recover.command()
@click.argument("file", type=click.File(), default=sys.stdin)
def acknowledged(file: Iterator[str]) -> None:
    """Ids that were answered 202, one a line (or log lines with `inference_id=…`), against what is known: the others must be sent again.

    Prints them, one a line; exit code 1 where there are any.
    """
    asked = {id_ for line in file if (id_ := _id(line))}
    unknown = wiring.recovery(from_environment()).not_known(asked)
    for id_ in unknown:
        click.echo(id_)
    click.echo(f"{len(unknown)} of {len(asked)} acknowledged ids are not known here", err=True)
    if unknown:
        raise click.exceptions.Exit(1)


_LOGGED = re.compile(r"\binference_id=(\S+)")


def _id(line: str) -> str:
    logged = _LOGGED.search(line)
    return logged[1] if logged else line.strip()
