"""Deeds on rule sets: see one over stored labels, then propose it. The labeller does both, because it alone knows what rule sets name."""

from collections.abc import Mapping
from dataclasses import replace

from app.console.deeds.asking import Asking, Deed, Field, Form, Hands, Outcome
from app.console.views.asked import Asked
from app.console.wording import clock_time
from app.domain.access import Order
from app.domain.errors import NotFound, Refused
from app.domain.learning.rule_sets import MOST_CHARS, AskedReplay, Proposal
from app.domain.people import Action

DEFAULT = "empty where the labeller's own default is in force, which `ratchet rules show POLICY --toml` prints"


def rule_deeds(hands: Hands) -> Mapping[str, Deed]:
    """By name."""
    rules = _Rules(hands)
    takes, sees = Action.CHANGE_RULES, Action.LOOK
    return {
        "replay_rules": Deed(word="Replay", action=takes, sees=sees, ask=rules.ask_replay, do=rules.replay, everywhere=False),
        "propose_rules": Deed(word="Propose", action=takes, sees=sees, ask=rules.ask_propose, do=rules.propose, everywhere=False),
    }


class _Rules:
    """Deeds on rule sets; their subject is the policy, or the replay that was looked at."""

    def __init__(self, hands: Hands) -> None:
        self._hands = hands

    def ask_replay(self, asked: Asked, subject: str, typed: Form | None) -> Asking:
        """A rule set, as text."""
        _require_policy(asked, subject)
        text = self._starting(asked) if typed is None else typed.get("toml", "")
        return Asking(
            what="a rule set over stored labels", back=asked.link("/rewards"),
            effect=(
                "The labeller scores the newest labels anew by it, within seconds, and writes none: you see how many would "
                "move, what each term would pay, and the labels that would move most. Nothing is paid by it before it is in force."
            ),
            fields=[Field(name="toml", label="The rule set (TOML)", value=text, kind="area", required=True, note=DEFAULT)],
        )  # fmt: skip

    def _starting(self, asked: Asked) -> str:
        """The one that is named, else the one in force."""
        wanted = asked.word("digest")
        known = next((one.toml for one in asked.sight.rule_sets(asked.policy) if one.digest == wanted), None)
        return self._hands.rules.active(asked.policy) if known is None else known

    def replay(self, asked: Asked, order: Order, form: Form) -> Outcome:
        """Ask the labeller."""
        _require_policy(asked, order.subject)
        wanted = AskedReplay(
            id=order.request_id, policy=asked.policy, toml=_toml(form), asked_by=order.actor, asked_at=self._hands.clock(),
        )  # fmt: skip
        self._hands.replays.ask(wanted, replace(order, seen=None))
        return Outcome(to=asked.link(f"/replays/{wanted.id}"))

    def ask_propose(self, asked: Asked, subject: str, typed: Form | None) -> Asking:
        """What was replayed."""
        found = asked.sight.replay(asked.policy, subject)
        if found is None:
            raise NotFound(f"no replay {subject[:80]} of {asked.policy}: replay the rule set first, from /console/rewards")
        outcome, newest = found.outcome, next(iter(asked.sight.rule_sets(asked.policy)), None)
        seen = "it was not replayed yet" if outcome is None else f"{outcome.changed:,} of {outcome.turns:,} labels would move"
        since = "the labeller's default is in force" if newest is None else (
            f"{newest.name} is in force since {clock_time(newest.activated_at)} UTC, by {newest.activated_by}"
        )  # fmt: skip
        return Asking(
            what=outcome.name if outcome is not None else "a rule set", back=asked.link(f"/replays/{found.id}"), shown=found.toml[:20_000],
            effect=(
                f"Replayed, {seen}; {since}. The labeller puts it in force within seconds, in your name, or says what is wrong with it. "
                "Labels that exist keep what they were made by, and rewards of two rule sets are never compared within a batch."
            ),
        )  # fmt: skip

    def propose(self, asked: Asked, order: Order, form: Form) -> Outcome:
        """Propose it, once."""
        found = asked.sight.replay(asked.policy, order.subject)
        if found is None:
            raise NotFound(f"no replay {order.subject[:80]} of {asked.policy}")
        if found.refused is not None:
            raise Refused(f"the labeller cannot score by it: {found.refused}")
        rests_on = replace(order, subject=asked.policy, moves="rule_set.activate")
        self._hands.requests.refuse_done(rests_on)
        mine = Proposal(id=order.request_id, policy=asked.policy, toml=found.toml, proposed_by=order.actor, proposed_at=self._hands.clock())
        self._hands.rules.propose(mine)
        self._hands.requests.done(rests_on)
        return Outcome(to=asked.link("/rewards") + "#proposals")


def _toml(form: Form) -> str:
    text = form.get("toml", "").replace("\r\n", "\n")
    if not text.strip() or len(text) > MOST_CHARS or "\x00" in text:
        raise Refused(f"a rule set is TOML of 1 to {MOST_CHARS:,} characters without a NUL, and this has {len(text):,}")
    return text if text.endswith("\n") else f"{text}\n"


def _require_policy(asked: Asked, subject: str) -> None:
    if subject != asked.policy:
        raise NotFound(f"there is no policy {subject[:80]!r} here: open this from /console/rewards")
