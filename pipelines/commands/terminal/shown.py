"""What the terminal's commands say: JSON for scripts, a table for people; exit code 1 where somebody is needed."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import click
from rich.console import Console
from rich.table import Column, Table

HELD = ("held", "failed", "skipped")


SHOWN_DIGITS = 12
"""Of a digest, in a list: enough to tell one from all others, and to name it by."""


def show(found: object, *, as_json: bool, table: Table | None = None) -> None:
    """One JSON document on the standard output, or the table."""
    if as_json:
        click.echo(json.dumps(found, ensure_ascii=False, default=str))
    elif table is not None:
        Console(soft_wrap=True).print(table)


def uncut(name: str) -> Column:
    """A column of what people copy into the next command: the others give way where the terminal is narrow."""
    return Column(name, no_wrap=True)


def plain(text: object) -> str:
    """A cell as it may be shown in a terminal: no control characters, no direction overrides, whoever wrote it."""
    return "".join(c if c.isprintable() else "�" for c in str(text or "")).replace("[", r"\[")


def left(until: str | None, *, now: datetime | None = None) -> str:
    """How long there is until then, as `1 h 05 min`; `over` afterwards."""
    if until is None:
        return ""
    seconds = (datetime.fromisoformat(until) - (now or datetime.now(UTC))).total_seconds()
    if seconds <= 0:
        return "over"
    hours, minutes = divmod(int(seconds) // 60, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min"


def needs_of(policy: str, deployment: dict[str, Any], releases: Sequence[dict[str, Any]]) -> list[str]:
    """What of a policy needs somebody, a sentence each."""
    needs: list[str] = []
    for release in releases:
        if release["policy"] == policy and release["state"] == "READY":
            count, ends = release["approvals_needed"] or 1, left(release["approval_expires_at"])
            within = ", and the time for it is over" if ends == "over" else f" within {ends}"
            needs.append(
                f"{release['version_name']} is READY: {count} approval{'s' if count > 1 else ''}{within} "
                f"(ratchet release approve {release['id']} --evidence {release['evidence_digest']})"
            )
    if deployment["frozen"] is not None:
        votes = len(deployment["unfreeze_votes"])
        needs.append(f"promotions are frozen ({deployment['frozen']}): {votes} of 2 votes (ratchet release unfreeze {policy})")
    needs += [f"{alarm['kind']}: {alarm['reason']}, until {alarm['until']}" for alarm in deployment["alarms"] if alarm["ended_at"] is None]
    return needs
