"""Acts from pages: what one would do, spelled out before; done once, on what was seen; told afterwards in the same word.

The form carries the pointer's generation, the release's generation and evidence, and the request's id as they were shown. The desk checks
them in the act's own transaction (`app.release.basis`), for pages as for HTTP and the terminal, so what moved on meanwhile is refused with
what happened since, and what was done already is not done twice.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from app.console.views.asked import Asked
from app.console.wording import left, plural, short
from app.domain.errors import BadRequest, DoneAlready, NotFound, Refused
from app.domain.ids import uuid7
from app.domain.people import MAY, Action
from app.domain.release.releases import Pointer, Release, ReleaseState
from app.domain.release.versions import KEPT_CHAMPIONS
from app.release.acts import Desk
from app.release.basis import Basis

LONGEST = 1_900
"""Characters of a reason."""


@dataclass(frozen=True)
class Kind:
    """One act: the word on its button, and what it is done to."""

    word: str
    action: Action
    about: str
    """`release`, `policy` or `version`."""
    reason: str
    """What stands in the field before anybody types."""


KINDS = {
    "approve": Kind("Approve", Action.APPROVE, "release", "the evidence is good"),
    "reject": Kind("Reject", Action.REJECT, "release", ""),
    "abort": Kind("Abort", Action.ABORT, "release", ""),
    "roll_back": Kind("Roll back", Action.ROLL_BACK, "release", "rolled back by hand: it does harm"),
    "renew_anchor": Kind("Renew the anchor of", Action.RENEW_ANCHOR, "policy", ""),
    "unfreeze": Kind("Free promotions of", Action.UNFREEZE, "policy", "looked into it: promotions may go on"),
    "pin": Kind("Pin", Action.PIN, "version", ""),
    "unpin": Kind("Unpin", Action.PIN, "version", ""),
    "lift": Kind("Lift the quarantine of", Action.LIFT, "version", ""),
}


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What an act is about, as it is at this moment."""

    kind: Kind
    pointer: Pointer
    release: Release | None
    what: str
    """Its name."""


class ActPages:
    """Confirms and carries out acts."""

    def __init__(self, sight: Any, desk: Desk) -> None:  # noqa: ANN401 - Sight, read without memory: an act rests on what is, not on what was
        self._sight = sight
        self._desk = desk

    def confirm(self, asked: Asked, act: str, subject: str, *, typed: dict[str, str] | None = None, moved: str = "") -> dict[str, Any]:
        """Values of the page that asks. `typed` is what somebody filled in before; `moved` why it was not done."""
        seen, typed = self._seen(asked, act, subject), typed or {}
        release = seen.release
        fields = {
            "policy": asked.policy, "generation": str(seen.pointer.generation), "request_id": uuid7(),
            "release_generation": "" if release is None else str(release.generation),
            "evidence": "" if release is None else release.evidence_digest or "",
        }  # fmt: skip
        allowed = asked.viewer.may(seen.kind.action, asked.policy)
        return {
            "act": act, "subject": subject, "word": seen.kind.word, "what": seen.what, "effect": self._effect(asked, act, seen, subject),
            "seen": fields, "reason": typed.get("reason", seen.kind.reason), "who": typed.get("who", ""), "moved": moved,
            "targets": self._targets(asked, act, seen), "to": typed.get("to", ""),
            "named": asked.viewer.actor != "anonymous", "allowed": allowed, "back": self.back(asked, act, subject),
            "who_may": ", ".join(sorted(MAY[seen.kind.action])), "title": f"{seen.kind.word} {seen.what}",
        }  # fmt: skip

    def do(self, asked: Asked, act: str, subject: str, form: dict[str, str]) -> bool:
        """Carry it out; True where it had been done already. Raises `Refused` with why not: nothing was done then."""
        kind = self._kind(act)
        if not asked.viewer.may(kind.action, asked.policy):
            raise Refused(f"{asked.viewer.name} may not do this: {', '.join(sorted(MAY[kind.action]))} may")
        actor, reason = signing(asked, form), form.get("reason", "").strip()[:LONGEST]
        if not reason:
            raise Refused("it needs a reason: the next person will ask why")
        basis = Basis(
            actor=actor, proven=asked.viewer.actor != "anonymous", act=act, subject=subject, generation=_number(form, "generation"),
            release_generation=_number(form, "release_generation"), evidence=form.get("evidence") or None,
            request_id=form.get("request_id", "")[:100] or None,
        )  # fmt: skip
        try:
            self._deeds(asked, self._desk.on(basis), subject, actor, reason, form)[act]()
        except DoneAlready:
            return True
        return False

    def _deeds(
        self, asked: Asked, desk: Desk, subject: str, actor: str, reason: str, form: Mapping[str, str]
    ) -> dict[str, Callable[[], object]]:
        evidence, to = form.get("evidence", ""), form.get("to", "")[:64]
        return {
            "approve": lambda: desk.approve(subject, approver=actor, evidence=evidence, reason=reason),
            "reject": lambda: desk.reject(subject, approver=actor, reason=reason),
            "abort": lambda: desk.abort(subject, actor=actor, reason=reason),
            "roll_back": lambda: desk.roll_back(subject, actor=actor, reason=reason, to=to or None),
            "renew_anchor": lambda: desk.renew_anchor(asked.policy, actor=actor, reason=reason),
            "unfreeze": lambda: desk.unfreeze(asked.policy, actor=actor),
            "pin": lambda: desk.pin(asked.policy, subject, actor=actor, reason=reason),
            "unpin": lambda: desk.unpin(asked.policy, subject, actor=actor, reason=reason),
            "lift": lambda: desk.lift(asked.policy, subject, actor=actor, reason=reason),
        }

    def back(self, asked: Asked, act: str, subject: str) -> str:
        """Where one goes afterwards."""
        about = self._kind(act).about
        if act in ("pin", "unpin"):
            return asked.link(f"/versions/{subject}")
        return asked.link(f"/releases/{subject}") if about == "release" else asked.link("/versions" if about == "version" else "")

    def _kind(self, act: str) -> Kind:
        if act not in KINDS:
            raise NotFound(f"there is no act {act[:50]!r}; there are {', '.join(KINDS)}")
        return KINDS[act]

    def _seen(self, asked: Asked, act: str, subject: str) -> Seen:
        """As it is now. Raises `NotFound`, also for what belongs to a policy that whoever asks does not see."""
        kind, pointer, release = self._kind(act), self._sight.pointer(asked.policy), None
        if pointer is None:
            raise NotFound(f"nothing is deployed for {asked.policy}")
        what = subject
        if kind.about == "release":
            release = self._sight.release(subject)
            if release is None or release.policy != asked.policy:
                raise NotFound(f"no release {subject[:80]} of policy {asked.policy}; /console/releases lists those there are")
            what = release.version_name
        elif act in ("pin", "unpin") and self._sight.version(asked.policy, subject) is None:
            raise NotFound(f"no version {subject[:60]} of policy {asked.policy}; /console/versions lists those there are")
        elif kind.about == "version":
            what = self._sight.names(asked.policy, [subject]).get(subject, short(subject))
        elif subject != asked.policy:
            raise NotFound(f"there is no policy {subject[:80]}")
        return Seen(kind=kind, pointer=pointer, release=release, what=what)

    def _effect(self, asked: Asked, act: str, seen: Seen, subject: str) -> str:
        """What would happen, in a sentence or two."""
        release = seen.release
        match act:
            case "approve" if release is not None:
                return self._approval(asked, release)
            case "roll_back" if release is not None:
                return self._rollback(asked, release, seen.pointer)
            case "reject" | "abort" if release is not None:
                if release.state is ReleaseState.CANARY:
                    return f"{seen.what} ends for good; whoever is on it goes back to the champion, and the champion stays."
                return f"{seen.what} ends for good. The champion stays."
            case "unfreeze":
                return "Your vote is one of the two that free promotions again. What froze them ends with the second, and an incident."
            case "renew_anchor":
                name = self._sight.names(asked.policy, [seen.pointer.digest]).get(seen.pointer.digest, short(seen.pointer.digest))
                return f"{name} becomes the anchor that later versions are held against. What is live stays."
            case "pin":
                return self._pin(asked, seen, subject)
            case "unpin":
                return (
                    f"{seen.what} is kept from now on only while something else needs it: what is live, a holdback, the anchor, "
                    f"a candidate, or being among the newest {KEPT_CHAMPIONS}. Otherwise its "
                    "weights are removed within hours, and it cannot come back."
                )
            case _:
                return f"Your vote is one of the two with which {seen.what} may serve again, and rollbacks may go to it."

    def _pin(self, asked: Asked, seen: Seen, digest: str) -> str:
        """What pinning it means, and what it does not."""
        barred = any(row.digest == digest for row in self._sight.quarantined(asked.policy))
        served = digest == seen.pointer.digest or digest in self._sight.good_versions(asked.policy, besides="")
        back = "rollbacks may go to it" if served and not barred else "no rollback goes to it while it is quarantined" if barred else (
            "no rollback goes to it, because it was never champion"
        )  # fmt: skip
        return (
            f"The weights of {seen.what} are kept until somebody unpins it, however many versions come after it, and take room on disk: "
            f"{back}. Nobody is served by it for that, and no engine holds it for that. Weights that were removed before do not come back."
        )

    def _targets(self, asked: Asked, act: str, seen: Seen) -> list[tuple[str, str]]:
        """(digest, name) of versions that a rollback may go to and whose weights are kept, the next one first."""
        release = seen.release
        if act != "roll_back" or release is None or release.state is not ReleaseState.CHAMPION:
            return []
        good, pins = self._sight.good_versions(asked.policy, besides=release.digest), self._sight.pins(asked.policy)
        kept = [digest for at, digest in enumerate(good) if at < KEPT_CHAMPIONS or digest in pins]
        names = self._sight.names(asked.policy, kept)
        return [(digest, names.get(digest, short(digest)) + (", pinned" if digest in pins else "")) for digest in kept]

    def _approval(self, asked: Asked, release: Release) -> str:
        if release.state is not ReleaseState.READY:
            return f"{release.version_name} is {release.state}: only what is READY can be approved."
        yes = {w.approver for w in self._sight.approvals(release.id) if w.approved and w.evidence_digest == release.evidence_digest}
        needed, reach = release.approvals_needed or 1, self._sight.reach(asked.policy, release.champion_digest)
        if len(yes) + 1 < needed:
            return f"Yours is approval {len(yes) + 1} of {needed}: nothing is live before the others. {left(release.approval_expires_at)}."
        before = self._sight.names(asked.policy, [release.champion_digest]).get(release.champion_digest, short(release.champion_digest))
        return (
            f"Yours is the last approval needed: {before} → {release.version_name} for {plural(reach.people, 'person', 'people')}; "
            f"{plural(reach.episodes, 'open conversation')} finish where they are, and a holdback stays on {before}."
        )

    def _rollback(self, asked: Asked, release: Release, pointer: Pointer) -> str:
        if release.state is ReleaseState.CHAMPION and pointer.digest == release.digest:
            good = self._sight.good_versions(asked.policy, besides=release.digest)
            if not good:
                return f"There is no earlier good version to go back to: {release.version_name} would stay."
            target = self._sight.names(asked.policy, [good[0]]).get(good[0], short(good[0]))
            reach = self._sight.reach(asked.policy, release.digest)
            return (
                f"{release.version_name} → {target} for {plural(reach.people, 'person', 'people')}; "
                f"{plural(reach.episodes, 'open conversation')} go on with {target}, and {release.version_name} is quarantined."
            )
        if release.state is ReleaseState.SUPERSEDED:
            return f"{release.version_name} is quarantined: it serves nobody any more, and no rollback goes to it. What is live stays."
        return f"{release.version_name} is {release.state}: it is quarantined, and ends if it is under way. What is live stays."


def signing(asked: Asked, form: Mapping[str, str]) -> str:
    """Who signs. Where nothing says who asks (an open loopback deployment), they say so themselves. Raises `Refused`."""
    if asked.viewer.actor != "anonymous":
        return asked.viewer.actor
    named = form.get("who", "").strip().removeprefix("user:")[:150]
    if not named:
        raise Refused("nobody is named: say who you are")
    return f"user:{named}"


def _number(form: dict[str, str], name: str) -> int | None:
    text = form.get(name, "")
    if not text:
        return None
    if not text.isdigit() or len(text) > 12:
        raise BadRequest(f"{name} is {text[:40]!r}: open the form again", param=name)
    return int(text)
