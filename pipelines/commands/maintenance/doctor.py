"""`ratchet doctor`: look at every assumption of this deployment and say the cure."""

import json

import click

from app.settings import from_environment
from pipelines.commands.examination.checks import checks_of
from pipelines.commands.examination.findings import State, look, worst
from pipelines.commands.running.deployment import environment


@click.command()
@click.option("--only", "names", multiple=True, help="Only this check (repeatable).")
@click.option("--json", "as_json", is_flag=True, help="One JSON array instead of lines.")
@click.option("--strict", is_flag=True, help="Exit code 1 for warnings too.")
def doctor(names: tuple[str, ...], as_json: bool, strict: bool) -> None:
    """Look at every assumption of this deployment, from where it is run; exit code 1 where one does not hold.

    Run it with the environment of the processes. It changes nothing but one small file in each storage, which it removes.
    """
    checks = checks_of(from_environment(environment()))
    known = [name for name, _ in checks]
    if unknown := sorted(set(names) - set(known)):
        raise click.UsageError(f"no check is called {', '.join(unknown)}: there are {', '.join(known)}")
    findings = look([(name, check) for name, check in checks if not names or name in names])
    click.echo(json.dumps([finding.row() for finding in findings], indent=1) if as_json else "\n".join(f.line() for f in findings))
    if worst(findings) is State.FAIL or (strict and worst(findings) is State.WARN):
        raise click.exceptions.Exit(1)
