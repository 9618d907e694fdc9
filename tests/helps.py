"""`python -m tests.helps`: what every command and group says of itself, as JSON by its words.

In a process where nothing ran before: a command keeps the names of its help option from its first call, which in a test may be its own.
"""

import json
import sys
from collections.abc import Iterator

import click
from click.testing import CliRunner

from pipelines.__main__ import ratchet


def leaves(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command and group, by its words."""
    yield path
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from leaves(command.get_command(context, name) or command, (*path, name))


def said() -> dict[str, str]:
    """What `--help` prints, by the command's words."""
    found: dict[str, str] = {}
    for path in leaves(ratchet):
        ran = CliRunner().invoke(ratchet, [*path, "--help"], env={"COLUMNS": "140"}, terminal_width=140, max_content_width=140)
        assert ran.exit_code == 0, (path, ran.exception)
        found[" ".join(path)] = ran.output
    return found


if __name__ == "__main__":
    json.dump(said(), sys.stdout)
