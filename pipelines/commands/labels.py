"""`ratchet labels report`: how turns were labelled, which terms stayed silent, and what was left out and why."""

import json
from dataclasses import asdict

import click
from rich.console import Console
from rich.table import Table

from app import wiring
from app.domain.label_reports import LabelReport
from app.settings import from_environment


@click.group()
def labels() -> None:
    """Report how turns were labelled and what was left out."""


@labels.command()
@click.argument("policy")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
def report(policy: str, as_json: bool) -> None:
    """The current labels of POLICY: rewards, terms, follow-ups, exclusions per version and counters."""
    settings = from_environment()
    wiring.require_policy(wiring.load_policies(settings), policy)
    found = wiring.label_report(settings, policy)
    if as_json:
        shares = {term.name: term.abstention_share for term in found.terms}
        click.echo(json.dumps(asdict(found) | {"abstention_shares": shares}))
        return
    _show(found, Console())


def _show(found: LabelReport, console: Console) -> None:
    mean = "" if found.reward_mean is None else f", mean reward {found.reward_mean:.3f}"
    console.print(f"{found.labels} labels ({found.revised} revised, {found.held_out} held out){mean}")
    if found.reward_quantiles:
        console.print("rewards at 0, 25, 50, 75, 100 %: " + "  ".join(f"{value:.3f}" for value in found.reward_quantiles))
    terms = Table("term", "spoke", "mean", "abstained", "why", title="Terms")
    for term in found.terms:
        why = ", ".join(f"{reason} {count}" for reason, count in sorted(term.abstained.items()))
        terms.add_row(term.name, str(term.spoke), "" if term.mean is None else f"{term.mean:.3f}", f"{term.abstention_share:.1%}", why)
    console.print(terms)
    console.print(_counts("Follow-ups", "read as", found.moods))
    versions = Table("version", "labels", "by exclusion", title="Versions")
    for version, counted in sorted(found.versions.items()):
        versions.add_row(version[:12], str(sum(counted.values())), ", ".join(f"{name} {n}" for name, n in sorted(counted.items())))
    console.print(versions)
    console.print(_counts("Rule sets", "digest", {digest[:12]: n for digest, n in found.rule_sets.items()}))
    console.print(_counts("Counters", "counter", found.counters))


def _counts(title: str, what: str, counted: dict[str, int]) -> Table:
    table = Table(what, "count", title=title)
    for name, count in sorted(counted.items()):
        table.add_row(name, str(count))
    return table
