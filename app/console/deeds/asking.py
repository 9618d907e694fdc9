"""What a deed is: a question with its effect and fields, and what came of it.

The form carries the request's id and the newest audit entry as it was shown, so that what moved on since is refused with what happened,
and what was done already is not done twice (`app.domain.access.Order`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from app.console.views.asked import Asked
from app.domain.access import ApiKey, Order, Scope
from app.domain.errors import Refused
from app.domain.learning.rule_sets import AskedReplay, Proposal
from app.domain.people import Action, Person, Role
from app.domain.ports import Clock
from app.domain.telemetry.dead_letters import Letters
from app.domain.telemetry.streams import EffectStore, ErasureReport

LONGEST = 200
"""Characters of a field, but where it says more."""
Form = Mapping[str, str]


class PeopleBook(Protocol):
    """Where people are kept."""

    def find(self, name: str) -> Person: ...
    def add(
        self, name: str, *, roles: Collection[Role], policy: str | None = None, email: str | None = None, os_user: str | None = None,
        by: str, order: Order | None = None,
    ) -> Person: ...  # fmt: skip
    def change(
        self, name: str, *, by: str, roles: Collection[Role] | None = None, policy: Any = ..., email: Any = ..., os_user: Any = ...,  # noqa: ANN401 - None is a value
        disabled: bool | None = None, order: Order | None = None,
    ) -> Person: ...  # fmt: skip
    def invite(self, name: str, *, lasts: Any, by: str, order: Order | None = None) -> str: ...  # noqa: ANN401 - a timedelta
    def sign_out(self, name: str, *, by: str, order: Order | None = None) -> Person: ...


class KeyBook(Protocol):
    """Where keys are kept."""

    def history(self) -> list[ApiKey]: ...
    def create(
        self, *, name: str, scopes: Collection[Scope], policy: str | None = None, rate_per_s: float | None = None,
        expires_at: datetime | None = None, by: str = "", order: Order | None = None,
    ) -> tuple[ApiKey, str]: ...  # fmt: skip
    def revoke(self, prefix: str, *, by: str = "", order: Order | None = None) -> ApiKey: ...


class RuleBook(Protocol):
    """Where rule sets are kept."""

    def active(self, policy: str) -> str:
        """TOML of the one in force; empty where the labeller's own default is."""
        ...

    def propose(self, proposal: Proposal) -> Proposal: ...


class ReplayBook(Protocol):
    """Rule sets that people want to see over stored labels."""

    def ask(self, asked: AskedReplay, order: Order) -> None:
        """Raises `DoneAlready`, `Refused`."""
        ...


class Requests(Protocol):
    """Requests that were carried out, for acts that are no single transaction."""

    def refuse_done(self, order: Order) -> None:
        """Raises `DoneAlready`, `Refused`, `StaleGeneration`."""
        ...

    def carrying_out(self, order: Order) -> AbstractContextManager[None]:
        """Written down before what is done within, and taken back where that fails: two of the same at once do it once.

        Raises `DoneAlready`, `Refused`, `StaleGeneration`.
        """
        ...

    def done(self, order: Order, *, action: str = "", about: str = "", detail: Mapping[str, Any] = ...) -> None:
        """Write it down, and what the audit chain says of it where nothing else does; nothing where it is written down already."""
        ...


@dataclass(frozen=True, kw_only=True)
class Hands:
    """What deeds act through."""

    people: PeopleBook
    keys: KeyBook
    requests: Requests
    rules: RuleBook
    replays: ReplayBook
    letters: Letters
    store: Callable[[], EffectStore]
    """Opened by the first replay."""
    pseudonym_of: Callable[..., str]
    """Of `actor` or `pseudonym`; raises `BadInput`."""
    forget: Callable[..., ErasureReport]
    """Everything of `pseudonym`, as asked `by` somebody."""
    rotate: Callable[..., object]
    """A fresh secret that signs keys of sessions, as asked `by` somebody."""
    policies: Collection[str]
    """Declared ones."""
    address: str
    """Where links lead to."""
    clock: Clock


@dataclass(frozen=True, kw_only=True)
class Field:
    """One thing to fill in."""

    name: str
    label: str
    value: str = ""
    kind: str = "text"
    """`text`, `number`, `email`, `area` (many lines), `check` (its value is `on` or nothing), `choice`."""
    choices: Sequence[tuple[str, str]] = ()
    """(value, what it is called) of a choice."""
    required: bool = False
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Asking:
    """A deed, before it is done."""

    what: str
    """To what, as people call it."""
    effect: str
    fields: Sequence[Field] = ()
    shown: str = ""
    """What it is about, where that has to be read first."""
    back: str = ""
    """Where one goes who leaves it."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of it: on to an address, or something that is told at once."""

    to: str = ""
    title: str = ""
    secret: str = ""
    """Shown this once, and nowhere kept."""
    sentence: str = ""
    lines: Sequence[str] = field(default_factory=tuple[str, ...])
    further: tuple[str, str] | None = None
    """(address, word) of what is left to do."""


@dataclass(frozen=True, kw_only=True)
class Deed:
    """One deed."""

    word: str
    """On its button."""
    action: Action
    sees: Action
    """Who may not do this does not see what it is about."""
    ask: Callable[[Asked, str, Form | None], Asking]
    """About a subject; with what was typed before. Raises `NotFound`."""
    do: Callable[[Asked, Order, Form], Outcome]
    """Raises `Refused`, `BadInput`, `DoneAlready`."""
    stops: bool = False
    """Whether it takes something away."""
    everywhere: bool = True
    """Whether it is about every policy at once: who is there for one does not see it."""


def text(form: Form, name: str, *, most: int = LONGEST) -> str:
    """What a field says. Raises `Refused` where it says too much."""
    said = form.get(name, "").strip()
    if len(said) > most or "\x00" in said:
        raise Refused(f"{name.replace('_', ' ')} has {most} characters at most, and no NUL: say it shorter")
    return said


def number(form: Form, name: str, *, most: float) -> float | None:
    """A number above 0; None for an empty field. Raises `Refused`."""
    said = text(form, name)
    if not said:
        return None
    try:
        value = float(said)
    except ValueError:
        value = 0.0
    if not 0 < value <= most:
        raise Refused(f"{name.replace('_', ' ')} is {said[:40]!r}: a number above 0 and at most {most:g}, or nothing")
    return value


def one_of_policies(form: Form, hands: Hands) -> str | None:
    """The policy that is named; None for all. Raises `Refused`."""
    said = text(form, "for_policy")
    if said and said not in hands.policies:
        raise Refused(f"no policy is named {said[:80]!r} (declared: {', '.join(sorted(hands.policies))})")
    return said or None


def policy_field(hands: Hands, value: str | None) -> Field:
    """Which policy somebody or something is for."""
    choices = [("", "all policies"), *((name, name) for name in sorted(hands.policies))]
    return Field(name="for_policy", label="For", value=value or "", kind="choice", choices=choices)
