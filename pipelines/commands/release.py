"""`ratchet release`: list, explain, approve, abort and roll back releases. Reading is from the database, acting over HTTP (`operating`)."""

import json
from dataclasses import asdict
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from app import wiring
from app.domain.errors import NotFound, Refused
from app.domain.ids import utc_now
from app.domain.release.by_people import BY_PEOPLE
from app.domain.release.releases import Release
from app.release.desk import ReleaseDesk
from app.settings import Settings, from_environment, owner_of, read_toml
from pipelines.commands.operating import Remote, acting, os_user, require_one_person
from pipelines.commands.operating import break_glass as _break_glass
from pipelines.commands.terminal.holdout import tell_holdout
from pipelines.commands.terminal.shown import SHOWN_DIGITS

TOGETHER = "the database cannot tell who is who: each votes with a token of their own (`ratchet login`)"
ONE_VOTE = "one vote of two: a second person has to run the same command"
GENERATION = click.option("--generation", type=click.IntRange(min=1), help="Of the pointer, as you looked at it; as it is now without it.")


@click.group()
def release() -> None:
    """List, explain, approve, abort and roll back releases."""


@release.command("list")
@click.option("--policy", help="Only this policy.")
@click.option("--limit", default=20, show_default=True, help="How many, newest first.")
def list_releases(policy: str | None, limit: int) -> None:
    """List the newest releases."""
    table = Table("release", "policy", "version", "state", "stage", "why", "since")
    for row in wiring.release_ledger(from_environment()).list(policy=policy, limit=limit):
        stage = "" if row.stage is None else str(row.stage)
        table.add_row(row.id, row.policy, row.version_name, row.state.value, stage, row.reason or "", f"{row.changed_at:%Y-%m-%d %H:%M:%S}")
    _console().print(table)


@release.command()
@click.argument("release_id")
def show(release_id: str) -> None:
    """Show everything about a release, as JSON: its way, each gate's newest answer, the approvals that stand."""
    settings = from_environment()
    view = wiring.release_views(settings).release(_find(settings, release_id).id)
    click.echo(json.dumps(view, indent=2, default=str, ensure_ascii=False))


@release.command()
@click.argument("release_id")
def explain(release_id: str) -> None:
    """Tell its story, then decide every live decision again from its stored evidence; exit code 1 where anything comes out otherwise."""
    from pipelines.evaluation.live.explain import explain as explain_all

    settings = from_environment()
    found = _find(settings, release_id)
    explained = explain_all(found, wiring.evidence_book(settings))
    for told in wiring.release_story(settings, found):
        click.echo(told)
    if (why := found.config.get("by_people")) is not None:
        click.echo(f"{BY_PEOPLE}: {why}")
    for one in explained:
        mark = "" if not one.replayed else ("differs" if one.differences else "same again")
        click.echo(f"{one.decided_at:%Y-%m-%d %H:%M:%S} {one.gate} {one.action or ''} {one.verdict} {mark}".replace("  ", " "))
        click.echo(f"  {one.reason}\n  evidence {one.evidence_hash}\n  config {one.config_hash}")
        for line in one.differences:
            click.echo(f"  ! {line}")
        for name, value in one.numbers.items():
            click.echo(f"  {name}: {json.dumps(value, default=str, ensure_ascii=False)}")
    click.echo(f"judged blind: {wiring.release_views(settings).release(found.id)['preference']['told']}")
    if any(one.differences for one in explained):
        raise click.exceptions.Exit(1)


@release.command()
@click.argument("policy")
def plan(policy: str) -> None:
    """Show what canaries of POLICY would find with its own traffic of the last days, by their length."""
    from pipelines.config import loop_config
    from pipelines.evaluation.live.planning import traffic_of, uninformed, windows_of

    settings = from_environment()
    wiring.require_policy(wiring.load_policies(settings), policy)
    config, champion = loop_config(read_toml(settings.config)).gates, wiring.release_ledger(settings).pointer(policy).digest
    traffic = traffic_of(config, wiring.evidence_book(settings), policy=policy, champion=champion, now=utc_now())
    columns = ("canary", "people", "metric", "margin", "power", "attains", "finds harm of", "that lasts")
    table, windows = Table(*columns), windows_of(config)
    found = [traffic.window(lasts_s) for lasts_s in windows]
    for window in found:
        for r in traffic.requirements():
            figures = (r.margin, window.power[r.metric], window.attainable[r.metric], window.detectable[r.metric])
            shown = [f"{100 * margin:.2f} pp" if i != 1 else f"{margin:.0%}" for i, margin in enumerate(figures)]
            lasts = f"{100 * window.lasting[r.metric]:.2f} pp" if r.metric in window.lasting else "-"
            table.add_row(_length(window.lasts_s), f"{window.people:.0f}", r.metric, *shown, lasts)
    _console().print(table)
    if config.lasting_share > 0.0:
        click.echo(f"{config.lasting_share:.0%} of the people are the lasting cohort: they never get a candidate and are in no stage;")
        click.echo("what they find is harm that lasts, on average over everybody else, most of whom had the candidate late or not yet")
    if config.holdout.share > 0.0:
        found_by = ", ".join(f"{100 * difference:.2f} pp of {name}" for name, difference in traffic.held_finds().items())
        click.echo(f"{config.holdout.share:.1%} of the people are the long-term holdout; a week of it shows about {found_by or 'nothing'}")
    explained = {m.name: traffic.references[m.name].explained for m in config.required}
    click.echo("habits explain " + ", ".join(f"{share:.0%} of {name}'s variance" for name, share in explained.items()))
    refused = uninformed(config, traffic.references)
    chosen = next((window for window in found if window.answers(config)), None)
    if refused is None and chosen is not None:
        click.echo(f"a canary of this policy is planned for {_length(chosen.lasts_s)} at most")
        return
    none = f"no canary up to {_length(windows[-1])} answers: set margins that the last one attains, or raise canary_longest_s"
    click.echo(none if refused is None else f"refused: {refused.message}")
    cure = "or let people judge blind pairs: `enabled = true` under [gates.people] (docs/small-products.md)"
    click.echo(f"{BY_PEOPLE}: {config.people.told()}" if config.people.enabled else cure)


@release.command()
@click.argument("release_id")
@click.option("--evidence", help="`evidence_digest` of what you looked at (`ratchet release show`), or its first 12 digits or more.")
@GENERATION
@click.option("--reason", help="Anything the next person should know.")
@acting
def approve(release_id: str, evidence: str | None, generation: int | None, reason: str | None, url: str | None, break_glass: bool) -> None:
    """Say yes to a release that is READY, on exactly this evidence."""
    settings = from_environment()
    if not break_glass:
        service = Remote.of(settings, url)
        seen = service.find(release_id)
        if evidence is None:
            raise _unnamed(seen["evidence_digest"], seen["state"])
        basis = {
            "evidence_digest": _whole(evidence, seen["evidence_digest"]),
            "pointer_generation": generation or service.generation(seen["policy"]),
            "reason": reason,
        }
        _told(service.act(f"/v1/releases/{seen['id']}/approve", basis), basis)
        return
    found = _find(settings, release_id)
    if evidence is None:
        raise _unnamed(found.evidence_digest, found.state)
    require_one_person(found)
    who = _broken(settings, found, "approve", reason or "none given")
    named = _whole(evidence, found.evidence_digest)
    _tell(_desk(settings).approve(found.id, approver=who, evidence=named, reason=f"break glass: {reason or 'no reason given'}"))


@release.command()
@click.argument("release_id")
@click.option("--reason", required=True, help="What is wrong with it.")
@GENERATION
@acting
def reject(release_id: str, reason: str, generation: int | None, url: str | None, break_glass: bool) -> None:
    """Say no."""
    settings = from_environment()
    if not break_glass:
        _post(settings, url, release_id, "reject", reason, generation)
        return
    found = _find(settings, release_id)
    _tell(_desk(settings).reject(found.id, approver=_broken(settings, found, "reject", reason), reason=reason))


@release.command()
@click.argument("release_id")
@click.option("--reason", required=True, help="Why.")
@GENERATION
@acting
def abort(release_id: str, reason: str, generation: int | None, url: str | None, break_glass: bool) -> None:
    """Stop a release that is not live yet."""
    settings = from_environment()
    if not break_glass:
        _post(settings, url, release_id, "abort", reason, generation)
        return
    found = _find(settings, release_id)
    _tell(_desk(settings).abort(found.id, actor=_broken(settings, found, "abort", reason), reason=reason))


@release.command()
@click.argument("release_id")
@click.option("--reason", required=True, help="Why.")
@click.option("--to", help="Digest of the version that takes over; the newest good one without it.")
@GENERATION
@acting
def rollback(release_id: str, reason: str, to: str | None, generation: int | None, url: str | None, break_glass: bool) -> None:
    """Take a version back, whatever its state, and quarantine it."""
    settings = from_environment()
    if not break_glass:
        _post(settings, url, release_id, "rollback", reason, generation, to=to)
        return
    found = _find(settings, release_id)
    _tell(_desk(settings).roll_back(found.id, actor=_broken(settings, found, "rollback", reason), reason=reason, to=to))


@release.command()
@click.argument("policy")
@click.option("--reason", default="renewed by a person", show_default=True)
@acting
def anchor(policy: str, reason: str, url: str | None, break_glass: bool) -> None:
    """Make the champion of POLICY the anchor that later versions are held against."""
    settings = from_environment()
    wiring.require_policy(wiring.load_policies(settings), policy)
    if not break_glass:
        service = Remote.of(settings, url)
        basis = {"reason": reason, "pointer_generation": service.generation(policy)}
        renewed = service.act(f"/v1/policies/{policy}/anchor", basis).get("anchor", "renewed already")
    else:
        who = _break_glass(settings, policy=policy, subject=policy, act="anchor", reason=reason)
        renewed = _desk(settings).renew_anchor(policy, actor=who, reason=reason).anchor
    click.echo(f"the anchor of {policy} is {renewed}")


@release.command()
@click.argument("policy")
@acting
def unfreeze(policy: str, url: str | None, break_glass: bool) -> None:
    """One of the two votes that free the promotions of POLICY again, and end an open incident."""
    settings = from_environment()
    wiring.require_policy(wiring.load_policies(settings), policy)
    if break_glass:
        raise Refused(f"two people free {policy}, and {TOGETHER}")
    answer = Remote.of(settings, url).act(f"/v1/policies/{policy}/unfreeze", {"reason": "unfreeze"})
    click.echo(answer.get("already") or ("promotions are free" if answer["free"] else ONE_VOTE))


@release.command()
@click.argument("policy")
@click.argument("digest")
@click.option("--reason", required=True, help="Why the version was not to blame.")
@acting
def lift(policy: str, digest: str, reason: str, url: str | None, break_glass: bool) -> None:
    """One of the two votes that lift the quarantine of the version DIGEST of POLICY."""
    settings = from_environment()
    wiring.require_policy(wiring.load_policies(settings), policy)
    if break_glass:
        raise Refused(f"two people lift a quarantine, and {TOGETHER}")
    service = Remote.of(settings, url)
    barred = [row["digest"] for row in service.get(f"/v1/policies/{policy}/deployment")["quarantine"]]
    chosen = [known for known in barred if known.startswith(digest)]
    if len(chosen) != 1:
        raise NotFound(f"{len(chosen)} quarantined versions begin with {digest!r}: `ratchet release alarms {policy}` shows them")
    answer = service.act(f"/v1/policies/{policy}/quarantine/{chosen[0]}/lift", {"reason": reason})
    click.echo(answer.get("already") or ("it may serve again" if answer["lifted"] else ONE_VOTE))


@release.command()
@click.argument("policy")
@click.argument("version")
@click.option("--reason", required=True, help="What it is kept for.")
@acting
def pin(policy: str, version: str, reason: str, url: str | None, break_glass: bool) -> None:
    """Keep the weights of VERSION (name, digest, or the beginning of one) until it is unpinned: rollbacks may go to it if it was good."""
    click.echo(f"{_pinning('pin', policy, version, reason, url, break_glass)} is kept until it is unpinned")


@release.command()
@click.argument("policy")
@click.argument("version")
@click.option("--reason", required=True, help="Why it is no longer needed.")
@acting
def unpin(policy: str, version: str, reason: str, url: str | None, break_glass: bool) -> None:
    """Keep the weights of VERSION only while something else needs them."""
    click.echo(f"{_pinning('unpin', policy, version, reason, url, break_glass)} is kept only while something else needs it")


def _pinning(act: str, policy: str, version: str, reason: str, url: str | None, break_glass: bool) -> str:
    """Do it; returns the version's digest."""
    settings = from_environment()
    wiring.require_policy(wiring.load_policies(settings), policy)
    if break_glass:
        digest = _one_version(policy, version, [(v.digest, v.name) for v in wiring.version_book(settings).of_policy(policy)])
        who, desk = _break_glass(settings, policy=policy, subject=digest, act=act, reason=reason), _desk(settings)
        (desk.pin if act == "pin" else desk.unpin)(policy, digest, actor=who, reason=reason)
        return digest
    service = Remote.of(settings, url)
    known = service.get("/v1/versions", policy=policy, limit=1000)["data"]
    digest = _one_version(policy, version, [(row["digest"], row["name"]) for row in known])
    service.act(f"/v1/policies/{policy}/versions/{digest}/{act}", {"reason": reason, "pointer_generation": service.generation(policy)})
    return digest


def _one_version(policy: str, text: str, known: list[tuple[str, str]]) -> str:
    chosen = [digest for digest, name in known if digest.startswith(text) or name == text]
    if len(chosen) != 1:
        raise NotFound(f"{len(chosen)} versions of {policy} are called {text!r}: give one digest or name of `ratchet lineage`")
    return chosen[0]


@release.command()
@click.argument("policy")
@click.option("--all", "every", is_flag=True, help="Those that have ended too, newest first.")
@click.option("--json", "as_json", is_flag=True, help="As JSON, with every week.")
def holdout(policy: str, every: bool, as_json: bool) -> None:
    """Show what the releases of POLICY have brought so far: everybody else beside the people whom the long-term holdout keeps."""
    settings = from_environment()
    wiring.require_policy(wiring.load_policies(settings), policy)
    found = wiring.holdout_book(settings).newest(policy, limit=10 if every else 1)
    if as_json:
        click.echo(json.dumps([asdict(one) | {"readings": msgspec.to_builtins(one.readings)} for one in found], indent=2, default=str))
        return
    if not found:
        click.echo(f"no long-term holdout of {policy} was begun: set share under [gates.holdout] (docs/long-term-holdout.md)")
    for one in found:
        tell_holdout(one)


@release.command()
@click.argument("policy")
def alarms(policy: str) -> None:
    """Show the alarms of POLICY with what ends them, and its quarantined versions."""
    settings = from_environment()
    wiring.require_policy(wiring.load_policies(settings), policy)
    found = wiring.release_views(settings).deployment(policy)
    table = Table("alarm", "raised", "why", "until", "ended", "by")
    for one in found["alarms"]:
        ended = "" if one["ended_at"] is None else f"{one['ended_at']:%Y-%m-%d %H:%M:%S}"
        why = f"{one['reason']} ({one['raised_by']})"
        table.add_row(one["kind"], f"{one['raised_at']:%Y-%m-%d %H:%M:%S}", why, one["until"], ended, one["ended_by"] or "")
    _console().print(table)
    for row in found["quarantine"]:
        click.echo(f"quarantined {row['digest']} since {row['since']:%Y-%m-%d %H:%M:%S}: {row['reason']}")


@release.command()
@click.argument("policy")
@click.argument("digest")
@click.option("--reason", required=True, help="Why the offline gates are skipped; stays with the release for ever.")
@click.option("--break-glass", is_flag=True, help="Needed: this acts on the database itself, as your system's user; audited.")
def plant(policy: str, digest: str, reason: str, break_glass: bool) -> None:
    """Put the known version DIGEST of POLICY into the canary's queue, past the offline gates; two people have to approve it."""
    settings = from_environment()
    wiring.require_policy(wiring.load_policies(settings), policy)
    if not break_glass:
        raise Refused(f"planting is done on the database itself, as {os_user()}, and audited: say --break-glass")
    known = {v.digest: v for v in wiring.version_book(settings).of_policy(policy)}
    chosen = known[_one_version(policy, digest, [(v.digest, v.name) for v in known.values()])]
    who = _break_glass(settings, policy=policy, subject=chosen.digest, act="plant", reason=reason)
    _tell(_desk(settings).plant(chosen, actor=who, reason=reason))


def _whole(evidence: str, known: str | None) -> str:
    """The digest that a person named by its beginning, as lists show it; anything else as it was given, for the desk to refuse."""
    return known if known is not None and len(evidence) >= SHOWN_DIGITS and known.startswith(evidence) else evidence


def _unnamed(digest: str | None, state: str) -> Refused:
    if digest is None:
        return Refused(f"there is no evidence to approve yet: the release is {state}")
    return Refused(f"name the evidence that you looked at: --evidence {digest} (`ratchet release show` shows it, and so does the console)")


def _post(settings: Settings, url: str | None, release_id: str, act: str, reason: str, generation: int | None, **more: str | None) -> None:
    service = Remote.of(settings, url)
    seen = service.find(release_id)
    generation = generation or service.generation(seen["policy"])
    basis = {"evidence_digest": seen["evidence_digest"], "pointer_generation": generation, "reason": reason, **more}
    _told(service.act(f"/v1/releases/{seen['id']}/{act}", basis), basis)


def _broken(settings: Settings, found: Release, act: str, reason: str) -> str:
    return _break_glass(settings, policy=found.policy, subject=found.id, act=act, reason=reason)


def _desk(settings: Settings) -> ReleaseDesk:
    from pipelines.config import loop_config
    from pipelines.evaluation.config import terms_of

    return wiring.release_desk(settings, terms=terms_of(loop_config(read_toml(settings.config)).gates, owner=owner_of(settings.config)))


def _length(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds < 86_400 else f"{seconds / 86_400:.1f} d"


def _find(settings: Settings, text: str) -> Release:
    """A release by its id, the beginning or the end of it, or its version's name."""
    known = wiring.release_ledger(settings).list(limit=10_000)
    found = [r for r in known if r.id.startswith(text) or r.id.endswith(text) or r.version_name == text]
    if len(found) != 1:
        raise NotFound(f"{len(found)} releases are called {text!r}: `ratchet release list` shows their ids")
    return found[0]


def _tell(found: Release) -> None:
    click.echo(f"{found.version_name} is {found.state}: {found.reason}")


def _told(answer: dict[str, Any], basis: dict[str, Any]) -> None:
    """What became of it, and what it rested on."""
    already = f" ({answer['already']})" if "already" in answer else ""
    seen = f"evidence {(basis['evidence_digest'] or 'none')[:12]}, pointer generation {basis['pointer_generation']}"
    click.echo(f"{answer['version_name']} is {answer['state']}: {answer['reason']}{already} [{seen}]")


def _console() -> Console:
    return Console(soft_wrap=True)
