"""Data: how far the stream is, what makes no sense, what waits, who was forgotten; and trust: what batches left out for their raters."""

from collections.abc import Callable, Sequence
from typing import Any

from app.console.sheets import Sheet, cell
from app.console.views.asked import Asked
from app.domain.errors import NotFound
from app.domain.learning.rewards import Exclusion
from app.domain.people import Action
from app.domain.retention import Retention, days
from app.domain.views.pages import CutRow, ErasureRow, LetterRow, Page, StreamRow, Trace

COUNTED = ("early", "late", "orphaned", "duplicate", "conflict", "retracted", "dead_lettered")


def data(asked: Asked, *, kept: Retention) -> dict[str, Any]:
    """Values of the page. What is about every policy at once is for those who may see every policy."""
    sight = asked.sight
    if asked.viewer.policy is not None:
        raise NotFound("the stream carries every policy: a key for one policy does not see it")
    needs = sight.needs(asked.policy)
    return {
        "parked": sight.parked(), "counters": [(name, needs.counters.get(name, 0)) for name in COUNTED], "troubles": needs.troubles,
        "may_mend": asked.viewer.may(Action.MEND_DATA), "may_erase": asked.viewer.may(Action.ERASE),
        "sheets": {
            "streams": _stream_sheet(sight.streams()), "letters": _letter_sheet(asked, sight.letters(after=asked.word("after"))),
            "retention": _retention_sheet(kept), "erasures": _erasure_sheet(asked, sight.erasures()),
        },
    }  # fmt: skip


def proof(asked: Asked, actor: str, *, left_of: Callable[[str], Sequence[Trace]] | None) -> dict[str, Any]:
    """What is left of somebody who was forgotten, in every place there is: it reads everything, so whoever may erase may ask."""
    if asked.viewer.policy is not None or not asked.viewer.may(Action.ERASE) or left_of is None:
        raise NotFound("the proof of an erasure is for admins of every policy to ask for")
    if all(row.actor != actor for row in asked.sight.erasures(newest=1_000)):
        raise NotFound(f"nobody with the pseudonym {actor[:64]} was erased; /console/data lists who was")
    traces = left_of(actor)
    left = sum(trace.found for trace in traces)
    rows = [(cell(trace.place), cell(trace.found), cell(trace.cure if trace.found else "")) for trace in traces]
    title = f"{actor}: {'nothing is left' if not left else f'{left} traces are left'} in {len(traces)} places"
    sheet = Sheet(name="proof", title="Every place that was looked into", columns=("place", "found", "what helps"), rows=rows)
    return {"title": title, "sheets": {"proof": sheet}}


def trust(asked: Asked) -> dict[str, Any]:
    """Values of the page about raters."""
    cuts = asked.sight.cuts(asked.policy)
    waiting = sum(cut.left_out.get(Exclusion.QUARANTINED, 0) for cut in cuts[:1])
    return {"waiting": waiting, "sheets": {"cuts": _cut_sheet(cuts)}}


def _stream_sheet(streams: list[StreamRow]) -> Sheet:
    rows = [
        (
            cell(row.consumer_group), cell(row.topic), cell(row.partition), cell(row.next_offset), cell(row.high_water),
            cell(None if row.high_water is None else max(0, row.high_water - row.next_offset)), cell(row.updated_at),
        )
        for row in streams
    ]  # fmt: skip
    columns = ("consumer", "topic", "partition", "next offset", "end", "lag", "as of")
    return Sheet(name="streams", title="Lag", columns=columns, rows=rows, empty="nothing was consumed yet")


def _letter_sheet(asked: Asked, page: Page[LetterRow]) -> Sheet:
    mends = asked.viewer.may(Action.MEND_DATA)
    rows = [
        (
            cell(str(row.id), href=asked.link(f"/do/replay_letter/{row.id}") if mends else None), cell(row.reason),
            cell(f"{row.topic}:{row.partition}:{row.offset}", kind="code"), cell(row.attempts),
            cell(row.last_seen_at), cell(row.replayed_at),
        )
        for row in page.rows
    ]  # fmt: skip
    columns = ("number", "why", "where it lay", "attempts", "last seen", "replayed")
    return Sheet(name="letters", title="Dead letters", columns=columns, rows=rows, after=page.after, empty="none: everything made sense")


KEPT = (
    ("inbox_days", "bodies of accepted events, after they were applied"), ("dedupe_days", "identities of events"),
    ("segments_days", "prompts, answers, tokens and log-probabilities"),
    ("turns_days", "turns with their answers and what was said about them"),
    ("observations_days", "observations about no turn that is known"), ("labels_days", "labels that no batch took"),
    ("exposures_days", "who was shown which arm"), ("dead_letters_days", "dead letters, since they were last seen"),
)  # fmt: skip
"""(setting under `[retention]`, what it is about)."""


def _retention_sheet(kept: Retention) -> Sheet:
    limits = [(name, what, days(getattr(kept, name))) for name, what in KEPT]
    rows = [
        (cell(what), cell("for ever" if limit is None else f"{limit.days:,} days"), cell(name, kind="code")) for name, what, limit in limits
    ]
    return Sheet(name="retention", title="Retention", columns=("what", "kept for", "under [retention]"), rows=rows)


def _erasure_sheet(asked: Asked, erasures: list[ErasureRow]) -> Sheet:
    counted = ("turns", "observations", "labels", "exposures", "inbox_payloads", "dead_letters", "segments")
    rows = [
        (
            cell(row.actor, kind="code", href=asked.link(f"/erasures/{row.actor}") if asked.viewer.may(Action.ERASE) else None),
            cell(row.requested_by), cell(row.erased_at),
            *(cell(int(row.report.get(name, 0))) for name in counted),
            cell(", ".join(row.report.get("trained_versions", []))),
        )
        for row in erasures
    ]  # fmt: skip
    columns = ("who, as stored", "asked by", "when", *(name.replace("_", " ") for name in counted), "versions trained on them")
    return Sheet(name="erasures", title="Erasures, and what went", columns=columns, rows=rows, empty="nobody asked to be forgotten")


def _cut_sheet(cuts: list[CutRow]) -> Sheet:
    told = (Exclusion.QUARANTINED, Exclusion.RATER_CAP, Exclusion.ACTOR_CAP)
    rows = [
        (
            cell(cut.id, kind="code"), cell(cut.created_at), cell(cut.items), *(cell(int(cut.left_out.get(name, 0))) for name in told),
            cell(sum(int(count) for count in cut.left_out.values())),
        )
        for cut in cuts
    ]  # fmt: skip
    columns = ("batch", "cut", "turns in it", "quarantined", "over the rater's cap", "over the actor's cap", "left out in all")
    return Sheet(name="cuts", title="Batches, and what their raters cost", columns=columns, rows=rows, empty="no batch was cut yet")
