"""The pages of deeds: one asks and spells the effect out, one does it and tells what came of it."""

from collections.abc import Mapping
from typing import Any

from app.console.acts import signing
from app.console.deeds.access import access_deeds
from app.console.deeds.asking import Deed, Form, Hands, Outcome
from app.console.deeds.data import data_deeds
from app.console.deeds.rules import rule_deeds
from app.console.views.asked import Asked
from app.domain.access import Order
from app.domain.errors import BadInput, BadRequest, DoneAlready, NotFound, Refused
from app.domain.ids import uuid7
from app.domain.people import MAY

LONGEST_SUBJECT = 150


class DeedPages:
    """Asks, and does."""

    def __init__(self, hands: Hands) -> None:
        self._deeds: Mapping[str, Deed] = {**access_deeds(hands), **data_deeds(hands), **rule_deeds(hands)}

    def confirm(self, asked: Asked, deed: str, subject: str, *, typed: Form | None = None, moved: str = "") -> dict[str, Any]:
        """Values of the page that asks. `typed` is what somebody filled in before; `moved` why it was not done."""
        found = self._found(asked, deed)
        asking = found.ask(asked, subject, typed)
        return {
            "deed": deed, "subject": subject, "word": found.word, "asking": asking, "stops": found.stops, "moved": moved,
            "seen": {"policy": asked.policy, "request_id": uuid7(), "seen": str(asked.sight.head()[0])},
            "named": asked.viewer.actor != "anonymous", "who": (typed or {}).get("who", ""),
            "allowed": asked.viewer.may(found.action, asked.policy), "who_may": ", ".join(sorted(MAY[found.action])),
            "title": f"{found.word} {asking.what}".strip(),
        }  # fmt: skip

    def do(self, asked: Asked, deed: str, subject: str, form: Form) -> dict[str, Any] | str:
        """Do it: where to go then, or values of the page that asks again (with `moved`), or of the one that tells (with `outcome`)."""
        found = self._found(asked, deed)
        try:
            if not asked.viewer.may(found.action, asked.policy):
                raise Refused(f"{asked.viewer.name} may not do this: {', '.join(sorted(MAY[found.action]))} may")
            outcome = found.do(asked, _order(asked, deed, subject, form), form)
        except DoneAlready as error:
            sentence = "What it showed is shown once: if it was lost, do it again from the start."
            outcome = Outcome(title="Done already", sentence=f"{error}. {sentence}")
        except (Refused, BadInput) as error:
            return self.confirm(asked, deed, subject, typed=form, moved=str(error))
        if outcome.to:
            return outcome.to
        return {"outcome": outcome, "title": outcome.title, "back": found.ask(asked, subject, form).back}

    def _found(self, asked: Asked, deed: str) -> Deed:
        found = self._deeds.get(deed)
        if found is None:
            raise NotFound(f"there is no deed {deed[:50]!r}; there are {', '.join(self._deeds)}")
        bound = found.everywhere and asked.viewer.policy is not None
        if bound or not asked.viewer.may(found.sees, asked.policy):
            raise NotFound(f"this is for {', '.join(sorted(MAY[found.sees]))}{' of every policy' if bound else ''} to see")
        return found


def _order(asked: Asked, deed: str, subject: str, form: Form) -> Order:
    seen = form.get("seen", "")
    if not seen.isdigit() or len(seen) > 18:
        raise BadRequest(f"seen is {seen[:40]!r}: open the form again", param="seen")
    if not 0 < len(form.get("request_id", "")) <= 100:
        raise BadRequest("the form has no request id: open it again", param="request_id")
    return Order(request_id=form["request_id"], actor=signing(asked, form), act=deed, subject=subject[:LONGEST_SUBJECT], seen=int(seen))
