"""The inbox: what waits for whoever looks, then how the loop goes."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from app.console.charts import strip
from app.console.sheets import Sheet, cell
from app.console.views.asked import Asked
from app.console.wording import age, left, plural
from app.domain.ids import utc_now
from app.domain.people import Action, actions_of
from app.domain.release.by_people import BY_PEOPLE
from app.domain.release.releases import Release, ReleaseState, approvers
from app.domain.views.pages import Needs

CLOSE = 0.5
"""Share of the evidence that stops a canary from which on its harm is shown here."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One thing that waits for somebody."""

    kind: str
    """`ready`, `harm`, `frozen`, `alarm`, `held`, `engine`, `data`: its shape and colour."""
    title: str
    detail: str
    href: str
    act: str
    """What the link says."""
    id: str = ""


def inbox(asked: Asked) -> dict[str, Any]:
    """Values of the page."""
    needs = asked.sight.needs(asked.policy)
    pointer = asked.sight.pointer(asked.policy)
    names = asked.sight.names(asked.policy, [] if pointer is None else [pointer.digest])
    slots = [(slot.status.value, _told(slot)) for slot in reversed(needs.slots)]
    return {
        "items": items(asked, needs), "needs": needs, "pointer": pointer,
        "champion": "nothing yet" if pointer is None else names.get(pointer.digest, pointer.digest[:12]),
        "loop_": _loop(asked, needs), "strip": strip(slots, title=_summary(needs)), "strip_told": _summary(needs),
        "sheets": {"slots": _slot_sheet(needs)},
    }  # fmt: skip


def items(asked: Asked, needs: Needs) -> list[Item]:
    """Everything that waits, the most urgent first."""
    found = [*_harms(asked, needs), *_alarms(asked, needs)]
    found += [_ready(asked, release) for release in needs.ready]
    found += [_judging(asked, release) for release in needs.in_flight if release.state is ReleaseState.JUDGING]
    if needs.held:
        detail = f"since {_slot_time(needs.held[-1].slot)}: {needs.held[0].reason or 'no reason given'}"
        found.append(Item(kind="held", title=f"{len(needs.held)} slots in a row came to nothing", detail=detail, href="#slots", act="See"))
    for engine in needs.engines:
        said = engine.detail or f"not heard of since {age(engine.seen_at)}"
        title = f"Engine {engine.engine_id} is {engine.state}"
        found.append(Item(kind="engine", title=title, detail=said, href=asked.link("/data"), act="See"))
    for name, reason, since in needs.troubles:
        title = f"{name} waits, since {age(since)}"
        found.append(Item(kind="data", title=title, detail=reason, href=asked.link("/data"), act="See"))
    if needs.dead_letters and asked.viewer.policy is None:
        title = f"{plural(needs.dead_letters, 'dead letter')} not replayed"
        found.append(Item(kind="data", title=title, detail="events that make no sense as they came", href=asked.link("/data"), act="See"))
    return found


def _judging(asked: Asked, release: Release) -> Item:
    detail = f"{BY_PEOPLE}: {asked.sight.preference(release.id).sentence()}"
    return Item(
        kind="ready", title=f"{release.version_name} waits for blind votes", detail=detail, href=asked.link(f"/pairs/{release.id}"),
        act="Judge", id=release.id,
    )  # fmt: skip


def _harms(asked: Asked, needs: Needs) -> list[Item]:
    found: list[Item] = []
    for release in needs.in_flight:
        if release.state is not ReleaseState.CANARY:
            continue
        last = asked.sight.decisions(release.id, newest=1)
        harm = (last[0].evidence.get("harm") or {}) if last else {}
        reached, needed = harm.get("peak_log_e"), harm.get("needed")
        if isinstance(reached, float) and isinstance(needed, float) and reached >= CLOSE * needed:
            title = f"{release.version_name} may do harm on {harm.get('cause') or 'a metric'}"
            detail = f"log E {reached:.2f} of the {needed:.2f} that stop it; it is taken back without anybody at that point"
            found.append(
                Item(kind="harm", title=title, detail=detail, href=asked.link(f"/releases/{release.id}"), act="Look", id=release.id)
            )
    return found


def _alarms(asked: Asked, needs: Needs) -> list[Item]:
    found: list[Item] = []
    if needs.frozen is not None:
        votes = f"{plural(len(needs.unfreeze_votes), 'vote')} of 2 to free them"
        detail = f"{needs.frozen}; {votes}"
        found.append(
            Item(
                kind="frozen", title="Promotions are frozen", detail=detail, href=asked.link(f"/act/unfreeze/{asked.policy}"), act="Decide"
            )
        )
    for alarm in needs.alarms:
        where = asked.link(f"/releases/{alarm.release_id}") if alarm.release_id else asked.link("/versions")
        detail = f"{alarm.reason}; it ends when {alarm.until}"
        title = f"Alarm: {alarm.kind.value}, {age(alarm.raised_at)}"
        found.append(Item(kind="alarm", title=title, detail=detail, href=where, act="Look", id=alarm.id))
    return found


def _ready(asked: Asked, release: Release) -> Item:
    said = asked.sight.approvals(release.id)
    yes = approvers(release, said)
    needed = release.approvals_needed or 1
    detail = f"{len(yes)} of {plural(needed, 'approval')}, {left(release.approval_expires_at)}; {who_can(asked, release, yes)}"
    href = asked.link(f"/releases/{release.id}")
    return Item(kind="ready", title=f"{release.version_name} is ready", detail=detail, href=href, act="Decide", id=release.id)


def who_can(asked: Asked, release: Release, yes: set[str]) -> str:
    """Whether whoever looks can approve now, if not, why not, and who else can. The desk asks more: whose credential is whose."""
    barred = {release.initiator, release.config.get("edited_by")} | yes
    others = [
        person.name for person in asked.sight.people()
        if person.disabled_at is None and person.policy in (None, release.policy) and person.actor not in barred
        and person.actor != asked.viewer.actor and Action.APPROVE in actions_of(person.roles)
    ]  # fmt: skip
    beside = f"; {', '.join(others[:5])}{' and others' if len(others) > 5 else ''} can as well" if others else ""
    viewer = asked.viewer
    if viewer.actor == "anonymous":
        return f"anybody but {release.initiator or 'who asked for it'} can approve"
    if viewer.may(Action.APPROVE, release.policy) and viewer.actor not in barred:
        return f"you can approve{beside}"
    why = "you cannot approve"
    if viewer.actor == release.initiator:
        why = "you asked for it: somebody else has to approve"
    elif viewer.actor == release.config.get("edited_by"):
        why = "you last edited the gates: somebody else has to approve"
    elif viewer.actor in yes:
        why = "you approved it: somebody else has to as well"
    return f"{why}{beside or '; nobody is there who can: add an operator'}"


def _loop(asked: Asked, needs: Needs) -> list[tuple[str, str, str]]:
    """The picture: (what, how much, how lately)."""
    day = asked.sight.totals(asked.policy, since=utc_now() - timedelta(days=1))
    reward = day.get("reward")
    excluded = sum(sums.n for name, sums in day.items() if name.startswith("excluded:"))
    states = [release.state for release in needs.in_flight]
    served, labelled = needs.turns
    last = needs.slots[0] if needs.slots else None
    tested = sum(s in (ReleaseState.TRAINED, ReleaseState.OFFLINE, ReleaseState.QUEUED) for s in states)
    canary = next((r for r in needs.in_flight if r.state is ReleaseState.CANARY), None)
    return [
        ("people use it", f"{served:,} turns", f"{served - labelled:,} wait for their label"),
        ("label", f"{reward.n if reward else 0:,} in a day", f"{excluded:,} not trained on"),
        ("update", "none yet" if last is None else last.status.value, "" if last is None else f"slot {_slot_time(last.slot)}"),
        ("gates", plural(tested, "candidate"), "in the offline gates"),
        ("canary", "none" if canary is None else canary.version_name, "" if canary is None else f"stage {canary.stage}"),
        ("approval", plural(len(needs.ready), "candidate"), "ready" if needs.ready else "nothing to decide"),
    ]


def _summary(needs: Needs) -> str:
    if not needs.slots:
        return "no slot was decided yet"
    counted = {name: sum(slot.status == name for slot in needs.slots) for name in ("done", "held", "failed", "skipped", "running")}
    return f"last {len(needs.slots)} slots: " + ", ".join(f"{n} {name}" for name, n in counted.items() if n)


def _slot_time(slot: int) -> str:
    return f"{datetime.fromtimestamp(slot, tz=UTC):%m-%d %H:%M}"


def _told(slot: Any) -> str:  # noqa: ANN401 - a Cycle
    return f"{_slot_time(slot.slot)} {slot.status.value}{': ' + slot.reason if slot.reason else ''}"


def _slot_sheet(needs: Needs) -> Sheet:
    rows = [
        (
            cell(_slot_time(slot.slot)), cell(slot.status.value, kind="state"), cell(slot.step), cell(slot.attempt),
            cell(" · ".join(f"{name} {seconds:.1f} s" for name, seconds in slot.timings.items())), cell(slot.started_at),
            cell(slot.reason or ""),
        )
        for slot in needs.slots
    ]  # fmt: skip
    columns = ("slot", "status", "last step", "attempt", "seconds per step", "started", "why")
    return Sheet(name="slots", title="The last 48 slots", columns=columns, rows=rows, empty="no slot was decided yet")
