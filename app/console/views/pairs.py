"""Blind pairs: one question with two answers, of which nobody is told which is whose before they have voted.

GET   /console/pairs/RELEASE              the next pair for whoever looks, or why there is none
GET   /console/pairs/RELEASE?seen=PAIR    what a pair was, for whoever voted on it
POST  /console/pairs/RELEASE              a vote, stored before anything is revealed
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from app.console.acts import signing
from app.console.views.asked import Asked
from app.console.views.candidate import find
from app.domain.errors import BadRequest, DoneAlready, NotFound, Refused
from app.domain.people import MAY, Action
from app.domain.release.pairs import BlindPair, BlindVote, Choice, next_for, part_of
from app.domain.release.releases import Release
from app.domain.release.terms import Terms
from app.release.jury import Jury

LONGEST = 12_000
"""Characters of a question or an answer that are shown; what is cut off says so. The same for both answers."""
CHOICES = (
    (Choice.LEFT, "The left one", "1"), (Choice.RIGHT, "The right one", "2"), (Choice.SAME, "Both the same", "3"),
    (Choice.NEITHER, "Both bad", "4"),
)  # fmt: skip
"""(what is sent, the button, its access key)."""
SAID = {"candidate": "the candidate's", "champion": "the champion's", "neither": "neither", "same": "both the same"}


def page(asked: Asked, release_id: str, *, moved: str = "") -> dict[str, Any]:
    """Values of the page: nothing in them tells the sides apart before the vote."""
    release = find(asked, release_id)
    pairs, votes = asked.sight.judging(release.id)
    voter = _voter(asked)
    mine = [vote for vote in votes if vote.voter == voter]
    allowed = asked.viewer.may(Action.JUDGE, asked.policy)
    part = part_of(len(pairs), judges=msgspec.convert(release.config, Terms).judges)
    chosen = next_for(voter, pairs, votes, part=part) if allowed else None
    shown = None if chosen is None else asked.sight.pair(chosen)
    seen = asked.word("seen")
    return {
        "release": release, "moved": moved, "allowed": allowed, "who_may": ", ".join(sorted(MAY[Action.JUDGE])),
        "pair": None if shown is None else _blind(shown, asked.viewer.actor), "choices": CHOICES, "kept": len(pairs), "mine": len(mine),
        "named": asked.viewer.actor != "anonymous", "who": asked.word("who") or "",
        "revealed": None if seen is None else _revealed(asked, release, seen, mine), "title": "Blind pairs",
        "why_none": _why_none(len(pairs), len(mine)),
    }  # fmt: skip


def vote(asked: Asked, release_id: str, form: Mapping[str, str], jury: Jury) -> str:
    """Store a vote; returns where to go. A vote that was sent before is there already and nothing is done twice. Raises `Refused`."""
    if not asked.viewer.may(Action.JUDGE, asked.policy):
        raise Refused(f"{asked.viewer.name} may not judge answers: {', '.join(sorted(MAY[Action.JUDGE]))} may")
    release, voter, pair = find(asked, release_id), signing(asked, form), form.get("pair", "")[:64]
    if form.get("choice") not in {choice.value for choice, _, _ in CHOICES}:
        raise BadRequest(f"there is no choice {form.get('choice', '')[:40]!r}: use one of the buttons", param="choice")
    more = {"seen": pair} if asked.viewer.actor != "anonymous" else {"seen": pair, "who": voter.removeprefix("user:")}
    try:
        jury.vote(
            release.id, pair, Choice(form["choice"]), voter=voter, shown_to=asked.viewer.actor,
            proven=asked.viewer.actor != "anonymous",
        )  # fmt: skip
    except DoneAlready:
        more["done"] = "again"
    return asked.link(f"/pairs/{release.id}", **more)


def _voter(asked: Asked) -> str:
    """Who looks; on an open deployment whoever they said they are."""
    named = asked.word("who")
    return f"user:{named}" if asked.viewer.actor == "anonymous" and named else asked.viewer.actor


def _blind(pair: BlindPair, viewer: str) -> dict[str, Any]:
    left, right = pair.sides(viewer)
    return {"id": pair.id, "question": _question(pair), "left": cut(left), "right": cut(right)}


def _revealed(asked: Asked, release: Release, seen: str, mine: list[BlindVote]) -> dict[str, Any] | None:
    """What a pair was. Only for whoever voted on it."""
    said = next((vote for vote in mine if vote.pair_id == seen), None)
    if said is None:
        return None
    try:
        pair = asked.sight.pair(seen)
    except NotFound:  # its words went with their person, or with their time
        return None
    champion, candidate = cut(pair.champion_answer), cut(pair.candidate_answer)
    left, right = (
        (("candidate", candidate), ("champion", champion)) if said.candidate_left else (("champion", champion), ("candidate", candidate))
    )
    names = {"candidate": release.version_name, "champion": "the champion"}
    return {
        "said": SAID[said.favoured.value], "counted": said.counted, "question": _question(pair),
        "sides": [(whose, names[whose], text) for whose, text in (left, right)],
    }  # fmt: skip


def _question(pair: BlindPair) -> list[tuple[str, str]]:
    """(role, text) of its messages."""
    return [(str(message.get("role", ""))[:40], cut(_text(message.get("content", "")))) for message in pair.messages[-8:]]


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    parts: list[object] = content if isinstance(content, list) else []
    return "\n".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in parts)


def cut(text: str) -> str:
    """As much as is shown."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}\n[cut after {LONGEST:,} characters]"


def _why_none(kept: int, mine: int) -> str:
    if not kept:
        return "No pairs were kept for this release: the offline suites kept none, or both versions answered alike."
    if mine >= kept:
        return f"You have judged all {kept} pairs. Thank you."
    return f"You have judged {mine} of {kept} pairs. The rest waits for others: nobody has more than their part of the votes that count."
