"""Deeds on stored data: apply dead letters after all, and forget somebody."""

import time
from collections.abc import Mapping
from dataclasses import replace

from app.console.deeds.asking import Asking, Deed, Field, Form, Hands, Outcome, text
from app.console.views.asked import Asked
from app.console.wording import clock_time, plural
from app.domain.access import Order
from app.domain.errors import BadRequest, NotFound, Refused
from app.domain.people import Action
from app.domain.telemetry.dead_letters import letter_of, replay

ALL = "all"
LONGEST_S = 20.0
"""One request replays so long; what is left is asked for again."""
SHOWN = 20_000
"""Characters of a letter."""
MOST_LINES = 50
COUNTED = 1_000


def data_deeds(hands: Hands) -> Mapping[str, Deed]:
    """By name."""
    letters, people = _Letters(hands), _Forgetting(hands)
    return {
        "replay_letter": Deed(word="Replay", action=Action.MEND_DATA, sees=Action.MEND_DATA, ask=letters.ask_one, do=letters.replay_one),
        "replay_letters": Deed(word="Replay", action=Action.MEND_DATA, sees=Action.MEND_DATA, ask=letters.ask_all, do=letters.replay_all),
        "erase": Deed(word="Erase", action=Action.ERASE, sees=Action.ERASE, ask=people.ask, do=people.erase, stops=True),
    }


class _Letters:
    """Dead letters."""

    def __init__(self, hands: Hands) -> None:
        self._hands = hands

    def ask_one(self, asked: Asked, subject: str, typed: Form | None) -> Asking:
        """One of them, whole."""
        stored = letter_of(self._hands.letters, _id(subject))
        letter = stored.letter
        was = (
            f"It was replayed at {clock_time(stored.replayed_at)} UTC already; what was applied is not applied twice. "
            if stored.replayed_at
            else ""
        )
        said = letter.payload.decode(errors="backslashreplace")
        headers = "\n".join(f"{name}: {value}" for name, value in sorted(letter.headers.items()))
        return Asking(
            what=f"dead letter {stored.id}", back=asked.link("/data"), shown=_cut(f"{headers}\n\n{said}"),
            effect=(
                f"{was}It lay at {letter.topic}:{letter.partition}:{letter.offset} and made no sense: {letter.reason[:500]}. It is read "
                "again and applied if it makes sense by now; where it does not, it stays here."
            ),
        )  # fmt: skip

    def replay_one(self, asked: Asked, order: Order, form: Form) -> Outcome:
        """Apply it."""
        id_ = letter_of(self._hands.letters, _id(order.subject)).id
        self._hands.requests.refuse_done(order)
        done = replay(self._hands.letters, self._hands.store(), ids=[id_], clock=self._hands.clock)
        self._note(order, applied=done.applied, still=len(done.still), ids=[id_], reason=None)
        if done.still:
            raise Refused(f"it makes no sense even now: {done.still[id_]}")
        return Outcome(to=asked.link("/data"))

    def ask_all(self, asked: Asked, subject: str, typed: Form | None) -> Asking:
        """All that wait, or those whose reason has certain words."""
        if subject != ALL:
            raise NotFound(f"there is nothing to replay that is called {subject[:40]!r}: one letter has a page of its own")
        reason = (asked.word("reason") or "") if typed is None else typed.get("reason", "")
        waiting = len(self._hands.letters.find(reason=reason[:200] or None, limit=COUNTED + 1))
        count = f"more than {COUNTED:,} letters" if waiting > COUNTED else plural(waiting, "letter")
        those = f"whose reason has the words {reason[:200]!r}" if reason else "that wait"
        return Asking(
            what="dead letters", back=asked.link("/data"),
            effect=f"{count} {those}, the oldest first: each is applied if it makes sense by now, and nothing is applied twice.",
            fields=[Field(name="reason", label="Only those whose reason has these words", value=reason, note="nothing: all that wait")],
        )  # fmt: skip

    def replay_all(self, asked: Asked, order: Order, form: Form) -> Outcome:
        """Apply page after page, so long as one may wait for it."""
        if order.subject != ALL:
            raise NotFound("only all of them are replayed together")
        reason = text(form, "reason") or None
        self._hands.requests.refuse_done(order)
        until, after, applied, still = time.monotonic() + LONGEST_S, 0, 0, dict[int, str]()
        while True:
            done = replay(self._hands.letters, self._hands.store(), reason=reason, after=after, clock=self._hands.clock)
            applied, still = applied + done.applied, still | dict(done.still)
            if done.after is None or time.monotonic() > until:
                break
            after = done.after
        self._note(order, applied=applied, still=len(still), ids=[], reason=reason)
        more = "" if done.after is None else f" Behind number {done.after} others wait: replay again."
        sentence = f"{plural(applied, 'letter')} applied, {len(still)} make no sense even now.{more}"
        lines = [f"{id_}: {why[:300]}" for id_, why in list(still.items())[:MOST_LINES]]
        on = asked.link(f"/do/replay_letters/{ALL}", **({"reason": reason} if reason else {}))
        further = None if done.after is None else (on, "Go on")
        return Outcome(title="Replayed", sentence=sentence, lines=lines, further=further)

    def _note(self, order: Order, **detail: object) -> None:
        self._hands.requests.done(order, action="dead_letters.replay", about="dead letters", detail=dict(detail))


class _Forgetting:
    """Erasures."""

    def __init__(self, hands: Hands) -> None:
        self._hands = hands

    def ask(self, asked: Asked, subject: str, typed: Form | None) -> Asking:
        """Whom."""
        if subject != "person":
            raise NotFound("a person is named in the form, never in an address: /console/do/erase/person")
        said = typed or {}
        return Asking(
            what="a person", back=asked.link("/data") + "#erasures",
            effect=(
                "Every turn, observation, label and exposure of theirs goes, and their words in segments, the inbox and dead letters; it "
                "cannot be undone. Versions that were trained on them are named in the report and stay. What comes of them later is "
                "forgotten when this is asked again. You are led to the proof: every place is looked into for what is left."
            ),
            fields=[
                Field(name="actor", label="Their id as the product sends it", value=said.get("actor", ""), note="or"),
                Field(name="pseudonym", label="The 32 hex digits under which they are stored", value=said.get("pseudonym", "")),
            ],
        )  # fmt: skip

    def erase(self, asked: Asked, order: Order, form: Form) -> Outcome:
        """Forget them."""
        actor, pseudonym = text(form, "actor", most=2_000) or None, text(form, "pseudonym") or None
        if (actor is None) == (pseudonym is None):
            raise Refused("name the person by their id, or by the pseudonym, not by both")
        known = self._hands.pseudonym_of(actor=actor, pseudonym=pseudonym)
        named = replace(order, subject=known, seen=None)
        self._hands.requests.refuse_done(named)
        self._hands.forget(known, by=order.actor)
        self._hands.requests.done(named)
        return Outcome(to=asked.link(f"/erasures/{known}"))


def _id(subject: str) -> int:
    if not subject.isdecimal() or len(subject) > 15:
        raise BadRequest(f"{subject[:40]!r} is no number of a dead letter: /console/data lists them", param="id")
    return int(subject)


def _cut(words: str) -> str:
    return words if len(words) <= SHOWN else f"{words[:SHOWN]}\n[cut after {SHOWN:,} characters]"
