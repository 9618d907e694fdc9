"""The `ratchet` command. Subcommands are listed here and imported only when called: `ratchet --help` stays under half a second."""

import errno
import importlib
import sys

import click

from app.domain.errors import RatchetError
from app.secret_files import keep_to_owner

COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("pipelines.commands.running.up:up", "Run every process of a deployment on this machine, supervised."),
    "demo": ("pipelines.commands.demo:demo", "Run the whole loop with a real model and simulated people, live in the terminal."),
    "api": ("pipelines.commands.running.processes:api", "Serve the HTTP API and the console."),
    "engine": ("pipelines.commands.running.processes:engine", "Serve the embedded engine."),
    "broker": ("pipelines.commands.running.processes:broker", "Run the embedded Kafka-protocol broker on loopback."),
    "relay": ("pipelines.commands.running.processes:relay", "Send the inbox and the outbox to Kafka (leased: one at a time)."),
    "ingest": ("pipelines.commands.running.processes:ingest", "Apply events from Kafka to the database."),
    "label": ("pipelines.commands.running.processes:label", "Label turns whose wait is over."),
    "loop": ("pipelines.commands.running.processes:loop", "Run one cycle per slot: batch, update, judge, release."),
    "watch": ("pipelines.commands.running.processes:watch", "Judge canaries and champions on live traffic; promote and roll back."),
    "prepare": ("pipelines.commands.running.prepare:prepare", "Make a deployment ready whose processes somebody else starts."),
    "doctor": ("pipelines.commands.maintenance.doctor:doctor", "Look at every assumption of this deployment and say the cure."),
    "backup": ("pipelines.commands.maintenance.backup:backup", "Write down that a backup was made, or restored and found whole."),
    "cycle": ("pipelines.commands.cycle:cycle", "Run or inspect cycles by hand."),
    "db": ("pipelines.commands.maintenance.db:db", "Create, upgrade or check the database schema."),
    "model": ("pipelines.commands.model:model", "Fetch or make the quickstart's models."),
    "status": ("pipelines.commands.terminal.commands:status", "Say how the deployment is and what needs you."),
    "top": ("pipelines.commands.terminal.commands:top", "Show the status live."),
    "releases": ("pipelines.commands.terminal.commands:releases", "List releases, with the evidence that an approval names."),
    "diff": ("pipelines.commands.terminal.commands:diff", "Compare two releases: terms and every gate's figures."),
    "slots": ("pipelines.commands.terminal.commands:slots", "List the newest slots of the loop and what became of each."),
    "tail": ("pipelines.commands.terminal.commands:tail", "Show what is done as it is done."),
    "logs": ("pipelines.commands.terminal.commands:logs", "Show the logs that `ratchet up` keeps on this machine."),
    "login": ("pipelines.commands.terminal.login:login", "Sign in and keep a token of your own for this terminal."),
    "logout": ("pipelines.commands.terminal.login:logout", "End that token and forget it."),
    "completion": ("pipelines.commands.terminal.completion:completion", "Print what makes a shell complete `ratchet`."),
    "people": ("pipelines.commands.people:people", "Add, list, change and invite people."),
    "keys": ("pipelines.commands.keys:keys", "Create, list and revoke API keys."),
    "release": ("pipelines.commands.release:release", "List, explain, approve, abort and roll back releases."),
    "rules": ("pipelines.commands.rules:rules", "Validate, replay, diff and activate reward rule sets."),
    "labels": ("pipelines.commands.labels:labels", "Report how turns were labelled and what was left out."),
    "dlq": ("pipelines.commands.maintenance.dlq:dlq", "List and replay dead letters."),
    "erase": ("pipelines.commands.maintenance.erase:erase", "Remove everything known about an actor."),
    "recover": ("pipelines.commands.maintenance.recover:recover", "After a restore or a failover: find and mend what the database forgot."),
    "upkeep": ("pipelines.commands.maintenance.upkeep:upkeep", "Drop what is old, merge small segments, and show how old the oldest is."),
    "export": ("pipelines.commands.export:export", "Export decisions and rewards (VW DSJSON), or turns with their tokens (Parquet)."),
    "import": ("pipelines.commands.importer:importer", "Import conversations as history through the public API."),
    "collect": ("pipelines.commands.collect:collect", "Watch a working tree and report how edits persist."),
    "suite": ("pipelines.commands.suite:suite", "Build, list and run offline evaluation suites."),
    "env": ("pipelines.commands.env:env", "List, check, try and run tasks for agents at practice."),
    "lineage": ("pipelines.commands.lineage:lineage", "Say what a version was trained on, or which versions saw a person."),
    "webhooks": ("pipelines.commands.webhooks:webhooks", "Add, list, test, rotate and remove receivers of release events."),
    "audit": ("pipelines.commands.audit:audit", "Show and verify the audit chain."),
    "pretrain": ("pipelines.commands.pretrain:pretrain", "Continue pretraining a base model on a corpus."),
}


class LazyGroup(click.Group):
    """A group that imports a subcommand's module when the subcommand is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All subcommands, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the subcommand."""
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name][0].split(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the subcommands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ratchet")
def ratchet() -> None:
    """Close the loop between a product and the language model inside it.

    Config says how (a TOML file named by RATCHET_CONFIG), environment says where (RATCHET_DATA and friends).
    """


def main() -> None:
    """Run `ratchet`; what a person can act on ends in one sentence and exit code 2, or the one of its kind (`docs/terminal.md`)."""
    keep_to_owner()
    try:
        ratchet(prog_name="ratchet")
    except RatchetError as error:
        click.echo(f"ratchet: {error}", err=True)
        sys.exit(error.exit_code)
    except Exception as error:
        if (told := sentence(error)) is None:
            raise
        click.echo(f"ratchet: {told}", err=True)
        sys.exit(RatchetError.exit_code)


DATABASE_FAULTS = ("OperationalError", "DatabaseError", "ArgumentError", "NoSuchModuleError")
"""SQLAlchemy's, by their names, because `--help` imports no database; its others are bugs of ours."""


def sentence(error: Exception) -> str | None:
    """What a person can do about a file or a database that does not work, whichever command met it; None for a bug of ours."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}: correct the name or its rights, or choose another place"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"the disk takes no more ({error.strerror}): free some space, or choose another place"
    if isinstance(error, UnicodeDecodeError):
        return f"what was read is no text in UTF-8 ({error.reason}): name a text file"
    if type(error).__module__ == "sqlalchemy.exc" and type(error).__name__ in DATABASE_FAULTS:
        why = str(getattr(error, "orig", None) or error).splitlines()[0]
        return f"the database does not work ({why}): correct RATCHET_DATABASE_URL or its disk, or restore it (docs/backup.md)"
    return None


if __name__ == "__main__":
    main()
