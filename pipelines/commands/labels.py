"""`ratchet labels`: how turns were labelled and what was left out; whether whoever reads follow-ups reads them as people do."""

import json
from dataclasses import asdict
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table

from app import wiring
from app.domain.learning.label_reports import LabelReport
from app.domain.learning.readings import Asked
from app.settings import from_environment, read_toml
from pipelines.config import loop_config
from pipelines.labelling.follow_up.agreement import (
    SAMPLED,
    Agreement,
    Message,
    agreement,
    apart,
    distil,
    draw,
    messages_of,
    open_model,
    read_annotated,
    write_messages,
)
from pipelines.labelling.follow_up.term import Reader, shipped

NEWEST = 100_000
"""Labelled turns that are looked through for follow-ups."""


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


@labels.command()
@click.argument("policy")
@click.option("--count", type=click.IntRange(min=1), default=SAMPLED, show_default=True, help="Follow-ups to draw.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="File for people to write moods into.")
def sample(policy: str, count: int, out: Path) -> None:
    """Draw follow-ups of POLICY by lot, one JSON object a line. People write dissatisfied, satisfied, refinement or neutral into `mood`;
    `ratchet labels agreement` reads the file. It holds what users wrote: keep it as you keep that."""
    drawn = draw(_messages(policy), count)
    if not drawn:
        raise click.ClickException(f"no follow-up of {policy} is labelled yet")
    write_messages(drawn, out)
    click.echo(f"{len(drawn)} follow-ups in {out}: write a mood into each line, then run ratchet labels agreement {out}")


@labels.command()
@click.argument("policy")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="File for `ratchet labels agreement`.")
def reviewed(policy: str, out: Path) -> None:
    """Write the follow-ups of POLICY that people read in the console, one JSON object a line with its `mood`. Those that the reader was
    sure of were drawn by lot; those it abstained on were not. It holds what users wrote: keep it as you keep that."""
    settings = from_environment()
    wiring.require_policy(wiring.load_policies(settings), policy)
    found = [_message(one) for one in wiring.reading_book(settings).annotated(policy)]
    if not found:
        raise click.ClickException(f"nobody has read a follow-up of {policy} yet: /console/readings asks about them")
    write_messages(found, out)
    click.echo(f"{len(found)} follow-ups that people read in {out}: ratchet labels agreement {out}")


def _message(read: Asked) -> Message:
    answer = next((said.text for said in reversed(read.conversation) if said.role == "assistant"), "")
    mood = "" if read.reading is None else read.reading.mood.value
    return Message(id=read.observation_id, episode=read.episode_id, text=read.message, answer=answer, mood=mood)


@labels.command("agreement")
@click.argument("file", type=click.Path(exists=True, path_type=Path, dir_okay=False))
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")
def compare(file: Path, as_json: bool) -> None:
    """How far the judge model, the classifier in use and people agree on the annotated FILE."""
    annotated = read_annotated(file)
    found = {name: agreement(annotated, read) for name, read in _readers().items()}
    if as_json:
        click.echo(json.dumps({name: asdict(one) for name, one in found.items()}))
        return
    for name, one in found.items():
        click.echo(f"{name}: {_sentence(one)}")


@labels.command("distil")
@click.argument("policy")
@click.option("--count", type=click.IntRange(min=1), default=2000, show_default=True, help="Follow-ups that the judge reads.")
@click.option("--sampled", type=click.IntRange(min=0), default=SAMPLED, show_default=True, help=(
    "As many as `ratchet labels sample` drew for people: nothing of their conversations is learned from."
))  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="Where the classifier is written.")
def make(policy: str, count: int, sampled: int, out: Path) -> None:
    """Have the judge model read follow-ups of POLICY and fit a classifier to its readings, which reads a thousand a second without it.

    Compare it with people before it is used ([labelling] follow_up_model): `ratchet labels agreement`.
    """
    judge = _readers().get("judge")
    if judge is None:
        raise click.ClickException("no judge is configured: set judge_url and judge_model under [labelling]")
    model = distil(apart(_messages(policy), count, sampled=sampled), judge)
    out.write_bytes(msgspec.json.encode(model) + b"\n")
    click.echo(f'wrote {out}, which punishes from {model.punish_from:.2f} on; to use it: [labelling] follow_up_model = "{out}"')


def _messages(policy: str) -> list[Message]:
    settings = from_environment()
    wiring.require_policy(wiring.load_policies(settings), policy)
    with wiring.labelled_turns(settings, policy, limit=NEWEST) as labelled:
        return messages_of(labelled)


def _readers() -> dict[str, Reader]:
    """The judge, where there is one, and the classifier that would read without it."""
    from pipelines.labelling.follow_up.judge_model import open_judge

    config = loop_config(read_toml(from_environment().config)).labelling
    judge = open_judge(config)
    classifier = shipped if config.follow_up_model is None else open_model(Path(config.follow_up_model))
    return ({"judge": judge} if judge is not None else {}) | {"classifier": classifier}


def _sentence(found: Agreement) -> str:
    low, high = found.interval
    said = f"kappa {found.kappa:.2f} ({low:.2f} to {high:.2f}) with people on {found.messages} follow-ups"
    if found.unread:
        said += f", {found.unread} more it could not read"
    if found.precision_punished is None or found.recall_punished is None:
        return f"{said}; it would punish none of them, or people were dissatisfied with none"
    right, caught = found.precision_punished, found.recall_punished
    return f"{said}; {right:.0%} of what it would punish deserves it, and of what deserves it {caught:.0%} would be punished"


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
