"""Follow-ups for people to read: what the labeller's reader abstained on, and some that it was sure of, drawn by lot.

GET   /console/readings                     the newest that waits, in its conversation
GET   /console/readings?seen=TURN:MESSAGE   what the reader had made of it, for whoever looks after it was read
POST  /console/readings                     what somebody reads, stored as a gold observation; nothing is paid by it
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Protocol

from app.console.acts import signing
from app.console.views.asked import Asked
from app.domain.errors import BadRequest, DoneAlready, Refused
from app.domain.learning.readings import Asked as Message
from app.domain.learning.readings import Mood, Reading
from app.domain.people import MAY, Action
from app.release.people import is_person

CHOICES = (
    (Mood.SATISFIED, "Satisfied", "1"), (Mood.DISSATISFIED, "Dissatisfied", "2"), (Mood.REFINEMENT, "Neither: a next step", "3"),
    (Mood.NEUTRAL, "Neither: says nothing of it", "4"),
)  # fmt: skip
"""(what is sent, the button, its access key)."""


class Readings(Protocol):
    """Takes what people read."""

    def say(self, policy: str, inference_id: str, observation_id: str, mood: Mood, *, by: str, proven: bool) -> Reading: ...


def page(asked: Asked, *, moved: str = "") -> dict[str, Any]:
    """Values of the page: nothing in them says what the reader made of the message in question."""
    allowed = asked.viewer.may(Action.JUDGE, asked.policy)
    message = asked.sight.next_to_read(asked.policy, before=_moment(asked.word("before"))) if allowed else None
    agreed = asked.sight.agreed(asked.policy)
    return {
        "moved": moved, "allowed": allowed, "who_may": ", ".join(sorted(MAY[Action.JUDGE])), "message": message, "choices": CHOICES,
        "waiting": asked.sight.to_read(asked.policy),
        "later": "" if message is None else asked.link("/readings", before=message.labelled_at.isoformat()),
        "named": asked.viewer.actor != "anonymous", "who": asked.word("who") or "", "seen": _seen(asked) if allowed else None,
        "unsure": agreed.share(unsure=True), "sure": agreed.share(unsure=False), "kappa": agreed.kappa(),
    }  # fmt: skip


def say(asked: Asked, form: Mapping[str, str], readings: Readings) -> str:
    """Store it; returns where to go. What was sent before is there already and nothing is done twice. Raises `Refused`."""
    if not asked.viewer.may(Action.JUDGE, asked.policy):
        raise Refused(f"{asked.viewer.name} may not read follow-ups: {', '.join(sorted(MAY[Action.JUDGE]))} may")
    by = signing(asked, form)
    if not is_person(by):
        raise Refused(f"{by} may not read follow-ups: that takes a person (user:<name>), never a program")
    if form.get("mood") not in {mood.value for mood, _, _ in CHOICES}:
        raise BadRequest(f"there is no reading {form.get('mood', '')[:40]!r}: use one of the buttons", param="mood")
    turn, message = form.get("turn", "")[:64], form.get("message", "")[:200]
    more = {"seen": f"{turn}:{message}"}
    if asked.viewer.actor == "anonymous":
        more["who"] = by.removeprefix("user:")
    try:
        readings.say(asked.policy, turn, message, Mood(form["mood"]), by=by, proven=asked.viewer.actor != "anonymous")
    except DoneAlready:
        more["done"] = "again"
    return asked.link("/readings", **more)


def _seen(asked: Asked) -> Message | None:
    """What was read a moment ago, once it is read."""
    turn, _, message = (asked.query.get("seen", "")[:300]).partition(":")
    found = asked.sight.asked_about(asked.policy, turn, message) if turn and message else None
    return found if found is not None and found.reading is not None else None


def _moment(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise BadRequest(f"{text[:60]!r} is no place in the queue: open /console/readings", param="before") from error
    if moment.tzinfo is None:
        raise BadRequest(f"{text[:60]!r} has no time zone: open /console/readings", param="before")
    return moment
