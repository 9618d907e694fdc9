"""`ratchet rules`: what turns are paid for. A rule set is a TOML file, known by the digest of its content."""

import difflib
import time
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from app import wiring
from app.domain.errors import BadConfig, Refused
from app.domain.ids import utc_now
from app.domain.learning.rule_sets import Replay
from app.settings import Settings, from_environment, read_toml
from pipelines.commands.operating import Remote, Silent, acting
from pipelines.commands.operating import break_glass as _break_glass
from pipelines.commands.ruling import usable
from pipelines.config import loop_config
from pipelines.labelling.replay import SHARES, replay
from pipelines.labelling.rule_set import RuleSet, parse_rule_set, starting_toml
from pipelines.labelling.terms import Signals

SETTLED_S, LOOK_S = 20.0, 0.25
"""How long a labeller is waited for, and how often it is asked after."""
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group()
def rules() -> None:
    """Validate, replay, diff and activate reward rule sets."""


@rules.command()
@click.argument("file", type=FILE)
def validate(file: Path) -> None:
    """Read FILE as a rule set; say what it pays, or what is wrong with it."""
    _show(_parsed(from_environment(), file.read_text()))


@rules.command()
@click.argument("policy")
@click.option("--toml", "as_toml", is_flag=True, help="Print the file itself.")
def show(policy: str, as_toml: bool) -> None:
    """The rule set in force for POLICY, and who put it there."""
    settings = from_environment()
    text, history = _in_force(settings, policy), wiring.rule_book(settings, "").history(policy)
    if as_toml:
        click.echo(text, nl=False)
        return
    _show(_parsed(settings, text))
    if not history:
        click.echo("never activated: it is the one that this deployment starts with")
    for entry in history:
        click.echo(f"{entry.activated_at:%Y-%m-%d %H:%M} {entry.digest[:12]} {entry.name} activated by {entry.activated_by}")


@rules.command()
@click.argument("a")
@click.argument("b")
def diff(a: str, b: str) -> None:
    """The difference between A and B, each a file, the digest of a rule set that was activated once, or a policy."""
    settings = from_environment()
    lines = difflib.unified_diff(_text(settings, a).splitlines(), _text(settings, b).splitlines(), a, b, lineterm="")
    shown = list(lines)
    click.echo("\n".join(shown) if shown else "no difference")


@rules.command("replay")
@click.argument("file", type=FILE)
@click.option("--policy", required=True)
@click.option("--limit", type=click.IntRange(1, 1_000_000), default=10_000, show_default=True, help="The newest so many labelled turns.")
@click.option("--movers", type=click.IntRange(0, 1000), default=10, show_default=True)
def replay_(file: Path, policy: str, limit: int, movers: int) -> None:
    """Score the labelled turns of a policy by FILE and say what would change; nothing is written."""
    settings = from_environment()
    config = wiring.require_policy(wiring.load_policies(settings), policy)
    rule_set = _parsed(settings, file.read_text(), signals=config.signals)
    with wiring.labelled_turns(settings, policy, limit=limit) as labelled:
        found = replay(
            labelled, config=config, rule_set=rule_set, now=utc_now(), movers=movers,
            learn_from_rollouts=loop_config(read_toml(settings.config)).batching.rollout_share > 0,
        )  # fmt: skip
    _show_replay(found)


@rules.command()
@click.argument("file", type=FILE)
@click.option("--policy", required=True)
@acting
def activate(file: Path, policy: str, url: str | None, break_glass: bool) -> None:
    """Put FILE in force for a policy from now on. Labels that exist keep the rule set they were made under.

    Over HTTP it is proposed, and a running labeller puts it in force or says why not.
    """
    settings = from_environment()
    digest = _activate_here(settings, file, policy) if break_glass else _propose(Remote.of(settings, url), file, policy)
    click.echo(f"{digest[:12]} is in force for {policy}; running labellers score by it within seconds")


def _activate_here(settings: Settings, file: Path, policy: str) -> str:
    config = wiring.require_policy(wiring.load_policies(settings), policy)
    text, whole = file.read_text(), loop_config(read_toml(settings.config))
    rule_set = usable(text, policy=config, loop=whole)
    who = _break_glass(settings, act="rules activate", subject=policy)
    wiring.rule_book(settings, "").activate(
        policy=policy, digest=rule_set.digest, name=rule_set.config.name, toml=text, by=who, now=wiring.clock(settings)()
    )  # fmt: skip
    return rule_set.digest


def _propose(service: Remote, file: Path, policy: str) -> str:
    """The digest, once it is in force. Raises `Refused` with what is wrong with it, `Silent` where no labeller looked at it."""
    path = f"/v1/policies/{policy}/rules"
    mine, ends = service.act(path, {"toml": file.read_text()}), time.monotonic() + SETTLED_S
    while mine["state"] == "waiting" and time.monotonic() < ends:
        time.sleep(LOOK_S)
        mine = next(one for one in service.get(path)["proposals"] if one["id"] == mine["id"])
    if mine["state"] == "waiting":
        raise Silent(f"it is proposed, and no labeller has looked at it for {SETTLED_S:g} s (`ratchet label`): the next one that runs does")
    if mine["refused"] is not None:
        raise Refused(f"refused by the labeller: {mine['refused']}")
    return mine["digest"]


def _parsed(settings: Settings, text: str, *, signals: Signals | None = None) -> RuleSet:
    """A rule set with the terms that this deployment's configuration allows; `signals` where it is for one policy."""
    return parse_rule_set(text, signals=signals, allowed=loop_config(read_toml(settings.config)).labelling.allowed_terms)


def _in_force(settings: Settings, policy: str) -> str:
    wiring.require_policy(wiring.load_policies(settings), policy)
    labelling = loop_config(read_toml(settings.config)).labelling
    return wiring.rule_book(settings, starting_toml(labelling.rule_set, config=settings.config)).active(policy)


def _text(settings: Settings, name: str) -> str:
    """TOML by file name, policy or digest."""
    if Path(name).is_file():
        return Path(name).read_text()
    if name in wiring.load_policies(settings):
        return _in_force(settings, name)
    text = wiring.rule_book(settings, "").by_digest(name)
    if text is None:
        raise BadConfig(f"{name!r} is no file, no policy and no digest of an activated rule set: see `ratchet rules show POLICY`")
    return text


def _show(rule_set: RuleSet) -> None:
    config = rule_set.config
    table = Table("term", "weight", "aggregation", "params", title=f"{config.name} ({rule_set.digest[:12]})")
    for term in config.terms:
        params = ", ".join(f"{name}={value}" for name, value in term.params.items())
        table.add_row(term.name, f"{term.weight:g}", term.aggregation.value if term.aggregation else "", params)
    Console().print(table)
    silent = "trained on" if config.train_without_signal else "not trained on"
    click.echo(f"a turn without any signal gets {config.default_reward:g} and is {silent}")


def _show_replay(found: Replay) -> None:
    console = Console()
    console.print(f"{found.turns} turns, {found.changed} change; excluded: {found.excluded or 'none'}")
    quantiles = Table("reward", *(f"{share:.0%}" for share in SHARES), title="Distribution")
    quantiles.add_row("as labelled", *(f"{value:.3f}" for value in found.before))
    quantiles.add_row("replayed", *(f"{value:.3f}" for value in found.after))
    console.print(quantiles)
    segments = Table("segment", "turns", "as labelled", "replayed", title="Mean reward per segment")
    for segment, (count, before, after) in found.segments.items():
        segments.add_row(segment or "(none)", str(count), f"{before:.3f}", f"{after:.3f}")
    console.print(segments)
    terms = Table("term", "spoke", "paid on average", "would speak", "would pay", title="What each term pays")
    for name, shift in found.terms.items():
        terms.add_row(name, str(shift.spoke_before), f"{shift.mean_before:.3f}", str(shift.spoke_after), f"{shift.mean_after:.3f}")
    console.print(terms)
    movers = Table("turn", "segment", "as labelled", "replayed", "terms", title="Top movers")
    for move in found.movers:
        terms = ", ".join(f"{name}={value:.2f}" for name, value in move.paid_after.items())
        movers.add_row(move.inference_id, move.segment, f"{move.before:.3f}", f"{move.after:.3f}", terms)
    console.print(movers)
