"""`ratchet suite`: the offline suites."""

from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table

from app import wiring
from app.domain.errors import Refused
from app.settings import from_environment, read_toml
from pipelines.commands.running.loop_ports import examination, offline_gate
from pipelines.config import loop_config
from pipelines.evaluation.suites.contamination import contaminated
from pipelines.evaluation.suites.product_suite import SourceTurn, cut_product_suite
from pipelines.evaluation.suites.suites import load_suite


@click.group()
def suite() -> None:
    """The suites of the offline gate: list what is configured, build one from real episodes, run them on two versions."""


@suite.command("list")
def list_suites() -> None:
    """List the configured suites, and where their `execute` tasks are graded."""
    settings = from_environment()
    config = loop_config(read_toml(settings.config)).offline
    table = Table("suite", "class", "source", "tasks", "samples", "margin", "hash")
    for wanted in config.suites:
        loaded = load_suite(wanted, folder=settings.config.parent if settings.config else settings.data)
        table.add_row(
            wanted.name,
            wanted.kind.value,
            wanted.source,
            str(len(loaded.tasks)),
            str(wanted.samples),
            f"{wanted.margin:g}",
            loaded.hash[:12],
        )
    console = Console()
    console.print(table)
    console.print(examination(config).describe())


@suite.command()
@click.argument("policy")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="JSONL file to write; look at it before you use it.")
@click.option("--most", default=300, show_default=True, help="Tasks at most.")
@click.option("--judged", is_flag=True, help="Let the judge model score quality (offline.judge_url), not only whether code parses.")
def build(policy: str, out: Path, most: int, judged: bool) -> None:
    """Cut a product suite for POLICY from episodes of held-out people, one task per dimension."""
    settings = from_environment()
    wiring.require_policy(wiring.load_policies(settings), policy)
    well_ended = wiring.well_ended_turns(settings, policy, limit=most)
    payloads = wiring.trajectories(settings).read([(turn.segment, turn.inference_id) for turn in well_ended])
    turns = [
        SourceTurn(inference_id=t.inference_id, person=t.person, messages=payloads[t.inference_id].messages, ended_up_with=t.ended_up_with)
        for t in well_ended
        if t.inference_id in payloads
    ]
    tasks = cut_product_suite(turns, most=most, judged=judged)
    if not tasks:
        raise Refused(
            f"no turn of a held-out person of {policy} ended with a text to compare with: wait for demonstrations or edit reports, "
            "or raise policies.NAME.held_out_share"
        )
    out.write_bytes(b"".join(msgspec.json.encode(task) + b"\n" for task in tasks))
    click.echo(
        f"{len(tasks)} tasks of {len({task.cluster for task in tasks})} people in {out}; check some by hand, then name it as a source"
    )


@suite.command()
@click.argument("policy")
@click.argument("candidate")
@click.argument("champion")
def run(policy: str, candidate: str, champion: str) -> None:
    """Run the configured suites of POLICY on CANDIDATE against CHAMPION (names or digests that an engine holds)."""
    settings = from_environment()
    gate = offline_gate(settings, loop_config(read_toml(settings.config)).offline)
    digests = [wiring.digest_of_version(settings, name) for name in (candidate, champion)]
    result = gate.decide(policy=policy, candidate=digests[0], champion=digests[1])
    click.echo(f"{result.verdict.value}: {result.reason}")


@suite.command()
@click.argument("policy")
def sealed(policy: str) -> None:
    """Read the sealed split: the champion of POLICY against its anchor. The anchor moves on a pass, recorded with the release."""
    settings = from_environment()
    config = loop_config(read_toml(settings.config))
    gate = offline_gate(settings, config.offline, sealed=True)
    if not gate.suites:
        raise Refused("no suite has a sealed split: set sealed_share of one in [[offline.suites]]")
    desk = wiring.release_desk(settings)
    pointer = desk.pointer(policy)
    if pointer.release_id is None or pointer.digest == pointer.anchor:
        raise Refused(f"the champion of {policy} is its anchor: there is nothing to compare it with")
    result = gate.decide(policy=policy, candidate=pointer.digest, champion=pointer.anchor, learned=wiring.learned_answers(settings, policy))
    desk.record(pointer.release_id, result)
    click.echo(f"{result.verdict.value}: {result.reason}")


@suite.command()
@click.argument("policy")
@click.option("--newest", default=5000, show_default=True, help="Turns that were trained on, the newest first.")
def probe(policy: str, newest: int) -> None:
    """Look for the suites' solutions in what versions of POLICY were trained on; exit code 2 where some are there."""
    settings = from_environment()
    config = loop_config(read_toml(settings.config)).offline
    gates = [offline_gate(settings, config), offline_gate(settings, config, sealed=True)]
    tasks = [task for gate in gates for suite in gate.suites for task in suite.tasks]
    learned = wiring.learned_answers(settings, policy, newest=newest)
    found = contaminated(tasks, learned)
    for task, words in found.items():
        click.echo(f"{task}: … {words} …")
    if found:
        raise Refused(f"{len(found)} of {len(tasks)} tasks have their solution in what was learned: take them out of the suites")
    click.echo(f"none of {len(tasks)} tasks has its solution in {len(learned)} answers that were trained on")
