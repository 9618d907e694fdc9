"""A long-term holdout in the terminal."""

import click
from rich.console import Console
from rich.table import Table

from app.domain.release.holdouts import Holdout, told_difference


def tell_holdout(found: Holdout) -> None:
    """Its people and its version, then a table with the newest week and all weeks together."""
    until = f"until {found.ends_at:%Y-%m-%d}" if found.ended_because is None else f"ended {found.ended_at:%Y-%m-%d}: {found.ended_because}"
    click.echo(f"{found.share:.1%} of the people on {found.digest[:12]} since {found.began_at:%Y-%m-%d}, {until}")
    if found.read_until is None:
        click.echo("nothing was read yet: the first reading comes with its first whole day")
        return
    table = Table("good is up", "week", "held", "others", "others - held", "95 %", "people")
    for one in found.told:
        week = "all" if one.week is None else str(one.week)
        means = [("-" if arm.mean is None else f"{arm.mean:.4f}") for arm in (one.held, one.beside)]
        table.add_row(one.metric, week, *means, *told_difference(one), f"{one.held.people} and {one.beside.people}")
    Console(soft_wrap=True).print(table)
    click.echo(f"counted until {found.read_until:%Y-%m-%d %H:%M} UTC; one interval of twenty misses, and there are {table.row_count}")
