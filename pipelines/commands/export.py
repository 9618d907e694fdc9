"""`ratchet export`: decisions and rewards as Vowpal Wabbit reads them (`dsjson`), or turns with their tokens as a data set (`parquet`)."""

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from app import wiring
from app.durable import replacing_file
from app.settings import from_environment

if TYPE_CHECKING:
    from collections.abc import Iterable

    from app.domain.learning.decisions import Decision

ARMS = {"champion": 1, "candidate": 2, "previous": 2}
"""Action numbers: what most people get, and what is compared with it."""


@click.group()
def export() -> None:
    """Export what was decided and what it earned."""


@export.command()
@click.option("--policy", help="Only this policy.")
@click.option("--since", type=click.DateTime(), help="Only turns that ended from then on (UTC).")
@click.option("--until", type=click.DateTime(), help="Only turns that ended before then (UTC).")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="File; standard output where none is named.")
def dsjson(policy: str | None, since: datetime | None, until: datetime | None, out: Path | None) -> None:
    """One line of VW DSJSON per labelled turn, oldest first."""
    settings = from_environment()
    if policy is not None:
        wiring.require_policy(wiring.load_policies(settings), policy)
    decided = wiring.decisions(settings, policy=policy, since=_utc(since), until=_utc(until))
    if out is None:
        click.echo(f"{_write(decided, sys.stdout)} decisions", err=True)
        return
    with replacing_file(out) as partial, partial.open("w") as file:
        written = _write(decided, file)
    click.echo(f"{written} decisions in {out}", err=True)


@export.command()
@click.option("--policy", help="Only this policy.")
@click.option("--since", type=click.DateTime(), help="Only turns that ended from then on (UTC).")
@click.option("--until", type=click.DateTime(), help="Only turns that ended before then (UTC).")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="A folder that is empty or absent.")
def parquet(policy: str | None, since: datetime | None, until: datetime | None, out: Path) -> None:
    """Turns with prompts, tokens, log-probabilities and rewards, in folders policy=…/day=…: for DuckDB, Spark, pyarrow, `datasets`.

    It is a copy of what people said: `ratchet erase` does not reach it. Delete it when its work is done.
    """
    settings = from_environment()
    if policy is not None:
        wiring.require_policy(wiring.load_policies(settings), policy)
    written = wiring.export_parquet(settings, out, policy=policy, since=_utc(since), until=_utc(until))
    click.echo(f"{written} turns in {out}")


def _utc(moment: datetime | None) -> datetime | None:
    return None if moment is None else moment.replace(tzinfo=UTC)


def _write(decided: "Iterable[Decision]", file: TextIO) -> int:
    written = 0
    for decision in decided:
        file.write(json.dumps(dsjson_record(decision), separators=(",", ":")) + "\n")
        written += 1
    return written


def dsjson_record(decision: "Decision") -> dict[str, Any]:
    """A decision in VW's format (`external_parser`, `log_converter.cc`): the chosen action first, costs are negative rewards.

    Outside an experiment there is one action, chosen with certainty.
    """
    chosen = ARMS.get(decision.arm, 1)
    alone = decision.probability >= 1.0
    actions, probabilities = ([chosen], [1.0]) if alone else ([chosen, 3 - chosen], [decision.probability, 1 - decision.probability])
    cost = -decision.reward
    return {
        "_label_cost": cost, "_label_probability": decision.probability, "_label_Action": chosen, "_labelIndex": chosen - 1,
        "_skipLearn": decision.exclusion is not None, "_original_label_cost": cost,
        "o": [{"v": cost, "EventId": decision.inference_id, "ActionTaken": False}],
        "Timestamp": decision.finished_at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f0Z"), "Version": "1",
        "EventId": decision.inference_id, "a": actions, "p": probabilities, "pdrop": 0.0, "VWState": {"m": decision.version},
        "c": {
            "policy": {decision.policy: 1}, "segment": _features(decision.segment),
            "_multi": [{"arm": {"champion": 1}}] + ([] if alone and chosen == 1 else [{"arm": {"challenger": 1}}]),
        },
    }  # fmt: skip


def _features(segment: str) -> dict[str, str]:
    """`language=python,task=edit` as features."""
    pairs = (tag.partition("=") for tag in segment.split(",") if "=" in tag)
    return {name: value for name, _, value in pairs}
