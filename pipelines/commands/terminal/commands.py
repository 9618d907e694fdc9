"""`ratchet status`, `top`, `releases`, `diff`, `slots`, `tail` over HTTP; `logs` from the files of `ratchet up`.

Exit codes: 0 fine · 1 somebody is needed, or two things differ · 2 wrong arguments or refused · 3 not signed in, or not with the role that
it takes · 4 the service does not answer · 5 it moved on since it was looked at.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlencode

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from app.domain.errors import NotFound
from app.settings import from_environment
from pipelines.commands.operating import Remote, Silent, remote
from pipelines.commands.terminal.shown import SHOWN_DIGITS, needs_of, plain, show, uncut

AS_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON document (a line each where it goes on).")
POLICY = click.option("--policy", help="Only this policy.")
FLIGHT = ("CANARY", "JUDGING", "READY", "APPROVED", "PROMOTING")
POLL_S = 1.0
NEWEST_LINES = 20
BLOCK_BYTES = 1 << 16


@click.command()
@POLICY
@AS_JSON
@remote
def status(policy: str | None, as_json: bool, url: str | None) -> None:
    """Say how the deployment is and what needs you; exit code 1 where something does."""
    found = _status(Remote.of(from_environment(), url), policy)
    if as_json:
        show(found, as_json=True)
    else:
        _console().print(_drawn(found))
    if found["needs"] or found["unwell"]:
        raise click.exceptions.Exit(1)


@click.command()
@POLICY
@AS_JSON
@click.option("--every", default=2.0, show_default=True, type=click.FloatRange(min=0.2), help="Seconds between looks.")
@click.option("--count", type=click.IntRange(min=1), help="Looks before it ends; until interrupted without it.")
@remote
def top(policy: str | None, as_json: bool, every: float, count: int | None, url: str | None) -> None:
    """Show the status live; with --json a line for each look."""
    service = Remote.of(from_environment(), url)
    looks = _looks(service, policy, every=every, count=count)
    if as_json:
        for found in looks:
            show(found, as_json=True)
        return
    with Live(console=_console(), auto_refresh=False, screen=count is None) as live:
        for found in looks:
            live.update(_drawn(found), refresh=True)


@click.command()
@POLICY
@click.option("--state", help="Only those in this state, such as READY.")
@click.option("--limit", default=20, show_default=True, type=click.IntRange(min=1, max=1000), help="How many, newest first.")
@AS_JSON
@remote
def releases(policy: str | None, state: str | None, limit: int, as_json: bool, url: str | None) -> None:
    """List the newest releases, with the digest of evidence that an approval has to name."""
    asked = {"policy": policy, "state": state, "limit": str(limit)}
    found = Remote.of(from_environment(), url).get("/v1/releases" + _query(asked))["data"]
    table = Table("release", "policy", "version", "state", "stage", uncut("evidence"), "why", "since")
    for row in found:
        stage = "" if row["stage"] is None else str(row["stage"])
        evidence = (row["evidence_digest"] or "")[:SHOWN_DIGITS]
        cells = (row["id"], row["policy"], row["version_name"], row["state"], stage, evidence, row["reason"], row["changed_at"][:19])
        table.add_row(*(plain(cell) for cell in cells))
    show(found, as_json=as_json, table=table)


@click.command()
@click.argument("one")
@click.argument("other")
@AS_JSON
@remote
def diff(one: str, other: str, as_json: bool, url: str | None) -> None:
    """Compare two releases: state, champion, terms, and each gate's figures; exit code 1 where they differ."""
    service = Remote.of(from_environment(), url)
    pair = [_flat(service.get(f"/v1/releases/{service.find(name)['id']}")) for name in (one, other)]
    names = sorted(pair[0].keys() | pair[1].keys())
    found = [{"what": n, "one": pair[0].get(n), "other": pair[1].get(n)} for n in names if pair[0].get(n) != pair[1].get(n)]
    table = Table("what", plain(one), plain(other))
    for row in found:
        table.add_row(plain(row["what"]), plain(row["one"]), plain(row["other"]))
    show(found, as_json=as_json, table=table)
    if found:
        raise click.exceptions.Exit(1)


@click.command()
@POLICY
@click.option("--limit", default=48, show_default=True, type=click.IntRange(min=1, max=1000), help="How many, newest first.")
@AS_JSON
@remote
def slots(policy: str | None, limit: int, as_json: bool, url: str | None) -> None:
    """List the newest slots of the loop and what became of each; exit code 1 where the newest two were held or failed."""
    found = Remote.of(from_environment(), url).get("/v1/slots" + _query({"policy": policy, "limit": str(limit)}))["data"]
    table = Table("policy", "slot", "status", "step", "why", "started", "took")
    for row in found:
        cells = (row["policy"], row["slot"], row["status"], row["step"], row["reason"], row["started_at"][:19], _took(row))
        table.add_row(*(plain(cell) for cell in cells))
    show(found, as_json=as_json, table=table)
    by_policy: dict[str, list[str]] = {}
    for row in found:
        by_policy.setdefault(row["policy"], []).append(row["status"])
    if any(len(states) > 1 and all(state in ("held", "failed") for state in states[:2]) for states in by_policy.values()):
        raise click.exceptions.Exit(1)


@click.command()
@click.option("--subject", help="Only entries about this release, policy, version or person.")
@click.option("--lines", default=NEWEST_LINES, show_default=True, type=click.IntRange(min=0, max=1000), help="So many older ones first.")
@click.option("--follow/--no-follow", default=True, help="Go on with what is added, until interrupted.")
@AS_JSON
@remote
def tail(subject: str | None, lines: int, follow: bool, as_json: bool, url: str | None) -> None:
    """Show what is done as it is done: the audit chain's newest entries, and the next ones."""
    service, last = Remote.of(from_environment(), url), 0
    wanted = max(lines, 1)
    while True:
        newest = service.get("/v1/audit" + _query({"subject": subject, "limit": str(wanted)}))["data"]
        entries = [entry for entry in reversed(newest) if entry["seq"] > last]
        for entry in entries if last or lines else []:
            _say(entry, as_json=as_json)
        last = max([last, *(entry["seq"] for entry in entries)])
        if not follow:
            return
        wanted = 1000
        time.sleep(POLL_S)


@click.command()
@click.argument("process", required=False)
@click.option("--lines", default=NEWEST_LINES, show_default=True, type=click.IntRange(min=0), help="So many older ones first.")
@click.option("--follow", "-f", is_flag=True, help="Go on with what is added, until interrupted.")
@AS_JSON
def logs(process: str | None, lines: int, follow: bool, as_json: bool) -> None:
    """Show the logs that `ratchet up` keeps on this machine, of PROCESS or of all."""
    folder = from_environment().data / "logs"
    files = sorted(folder.glob("*.log"))
    if process is not None:
        chosen = [file for file in files if file.stem == process]
        if not chosen:
            raise NotFound(f"{folder} has no log of {process!r}; there are {', '.join(file.stem for file in files) or 'none'}")
        files = chosen
    elif not files:
        raise NotFound(f"{folder} has no logs: `ratchet up` writes them; processes that somebody else starts write where that says")
    places = {file: _last_lines(file, lines, whole=follow, as_json=as_json) for file in files}
    while follow:
        time.sleep(POLL_S / 2)
        places = {file: _lines_after(file, place, as_json=as_json) for file, place in places.items()}


def _looks(service: Remote, policy: str | None, *, every: float, count: int | None) -> Iterator[dict[str, Any]]:
    done = 0
    while count is None or done < count:
        try:
            yield _status(service, policy)
        except Silent as error:
            if count is not None:
                raise
            yield {"unwell": {"service": str(error)}, "policies": [], "needs": [], "flight": []}
        done += 1
        if count is None or done < count:
            time.sleep(every)


def _status(service: Remote, policy: str | None) -> dict[str, Any]:
    """What is live and in flight, who of the engines lags, and what needs somebody."""
    health, me = service.health(), service.get("/v1/me")
    names = [name for name in service.get("/v1/policies")["data"] if policy in (None, name)]
    if policy is not None and not names:
        raise NotFound(f"no policy is named {policy!r} here, or none that {me['actor']} sees")
    newest = service.get("/v1/releases" + _query({"policy": policy, "limit": "200"}))["data"]
    lags = {
        (engine["address"], held["policy"]): held["lag"]
        for engine in service.get("/v1/engines")["data"]
        for held in engine["policies"]
        if held["lag"] and held["lag"]["champions"] and held["policy"] in names
    }
    needs: list[str] = []
    rows: list[dict[str, Any]] = []
    for name in names:
        deployment = service.get(f"/v1/policies/{name}/deployment")
        pointer: dict[str, Any] = deployment["pointer"] or {}
        needs += [f"{name}: {need}" for need in needs_of(name, deployment, newest)]
        rows.append(
            {
                "policy": name, "champion": pointer.get("digest"), "generation": pointer.get("generation"),
                "since": pointer.get("changed_at"), "frozen": deployment["frozen"],
            }
        )  # fmt: skip
    needs += [f"{name}: the engine at {address} is {lag['champions']} champions behind" for (address, name), lag in lags.items()]
    return {
        "url": service.url, "actor": me["actor"], "unwell": {what: said for what, said in health.items() if said != "ok"},
        "policies": rows, "flight": [row for row in newest if row["state"] in FLIGHT and row["policy"] in names], "needs": needs,
    }  # fmt: skip


def _drawn(found: dict[str, Any]) -> Group:
    parts: list[Any] = []
    if found.get("url"):
        parts.append(Text(f"{found['url']} as {found['actor']}"))
    parts += [Text(f"! {what}: {said}") for what, said in found["unwell"].items()]
    live = Table("policy", "champion", "generation", "since", "promotions")
    for row in found["policies"]:
        state = "frozen" if row["frozen"] else "free"
        champion, since = (row["champion"] or "nothing yet")[:12], (row["since"] or "")[:19]
        live.add_row(plain(row["policy"]), champion, str(row["generation"] or ""), since, state)
    parts.append(live)
    if found["flight"]:
        flight = Table("release", "version", "state", "why", "since")
        for row in found["flight"]:
            flight.add_row(*(plain(row[name]) for name in ("id", "version_name", "state", "reason")), row["changed_at"][:19])
        parts.append(flight)
    parts += [Text(f"! {need}") for need in found["needs"]] or [Text("nothing needs you")]
    return Group(*parts)


def _flat(release: dict[str, Any]) -> dict[str, Any]:
    """What of a release can be compared, by dotted names."""
    flat: dict[str, Any] = {}
    for name in ("policy", "state", "champion_digest", "champion_generation", "approvals_needed", "initiator"):
        flat[name] = release[name]
    for name, value in _leaves("terms", release["terms"]):
        flat[name] = value
    for gate in release["gates"]:
        flat[f"{gate['gate']}.verdict"] = gate["verdict"]
        flat[f"{gate['gate']}.reason"] = gate["reason"]
        for name, value in _leaves(gate["gate"], gate["evidence"]):
            flat[name] = value
    return flat


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - JSON
    if isinstance(value, dict):
        for key, below in cast("dict[str, Any]", value).items():
            yield from _leaves(f"{name}.{key}", below)
    else:
        yield name, value


def _took(row: dict[str, Any]) -> str:
    seconds = row["took_s"]
    return "" if seconds is None else f"{seconds:.0f} s"


def _say(entry: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(entry, ensure_ascii=False))
        return
    detail = json.dumps(entry["detail"], ensure_ascii=False)
    line = f"{entry['seq']} {entry['occurred_at'][:19]} {entry['actor']} {entry['action']} {entry['subject']} {detail}"
    click.echo("".join(c if c.isprintable() else "�" for c in line))


def _last_lines(file: Path, lines: int, *, whole: bool, as_json: bool) -> int:
    """Show the last ones, read from the end: a log may be larger than memory. `whole`: none that is not. Returns where they end."""
    with file.open("rb") as opened:
        end, tail = opened.seek(0, os.SEEK_END), b""
        place = end
        while place > 0 and tail.count(b"\n") <= lines:
            size = min(BLOCK_BYTES, place)
            place = opened.seek(place - size)
            tail = opened.read(size) + tail
    unfinished = len(tail) - tail.rfind(b"\n") - 1 if whole else 0
    tail = tail[: len(tail) - unfinished]
    for line in tail.decode(errors="replace").splitlines()[-lines:] if lines else []:
        _say_line(file, line, as_json=as_json)
    return end - unfinished


def _lines_after(file: Path, place: int, *, as_json: bool) -> int:
    """What was written since; from the beginning where the file was begun anew. The last line waits until it is whole."""
    if file.stat().st_size < place:
        place = 0
    with file.open("rb") as opened:
        opened.seek(place)
        whole, _, _ = opened.read().rpartition(b"\n")
    for line in whole.decode(errors="replace").splitlines():
        _say_line(file, line, as_json=as_json)
    return place + (len(whole) + 1 if whole else 0)


def _say_line(file: Path, line: str, *, as_json: bool) -> None:
    shown = "".join(c if c.isprintable() or c == "\t" else "�" for c in line)
    click.echo(json.dumps({"process": file.stem, "line": line}, ensure_ascii=False) if as_json else f"{file.stem} {shown}")


def _query(asked: dict[str, str | None]) -> str:
    return "?" + urlencode({name: value for name, value in asked.items() if value is not None})


def _console() -> Console:
    return Console(soft_wrap=True)
