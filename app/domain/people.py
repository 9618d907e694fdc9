"""People and what they may do: one table of roles and actions, which endpoints, pages and the command line ask.

A person is `user:<name>` wherever something is signed. What a person holds (a password, a browser session, personal tokens) speaks
for that person and can do what the person's roles allow at that moment. Keys of programs belong to nobody: they have scopes, and none
of them can do what takes a person.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from app.domain.access import Scope
from app.domain.errors import BadRequest, RatchetError


class Role(StrEnum):
    """What somebody is trusted with; a person has one or more."""

    VIEWER = "viewer"
    """Looks."""
    OPERATOR = "operator"
    """Approves, stops, rolls back, judges answers, mends data."""
    CONFIG_ADMIN = "config_admin"
    """Changes what releases are judged by, and where news goes; approves nothing."""
    AUDITOR = "auditor"
    """Looks, reads the audit chain and who has which access; changes nothing."""
    ADMIN = "admin"
    """Everything, with people and keys; four eyes bind admins as everybody."""


class Action(StrEnum):
    """What can be done."""

    SAMPLE = "sample"
    """Ask a policy for completions."""
    REPORT = "report"
    """Send observations and events."""
    LOOK = "look"
    """Read pages, releases, versions, labels, metrics."""
    READ_AUDIT = "read_audit"
    """Read and verify the audit chain."""
    SEE_ACCESS = "see_access"
    """Read who has which role, keys and tokens; never a secret."""
    APPROVE = "approve"
    REJECT = "reject"
    ABORT = "abort"
    ROLL_BACK = "roll_back"
    RENEW_ANCHOR = "renew_anchor"
    UNFREEZE = "unfreeze"
    LIFT = "lift"
    """Vote against a version's quarantine."""
    PIN = "pin"
    """Keep a version's weights, and a way back to it, until it is unpinned."""
    JUDGE = "judge"
    """Say which of two answers is better; label what the classifier abstained on."""
    MEND_DATA = "mend_data"
    """Replay dead letters, leave labels out."""
    ERASE = "erase"
    """Remove everything known about somebody."""
    CHANGE_RULES = "change_rules"
    """Activate reward rules."""
    NOTIFY = "notify"
    """Say where news of releases goes."""
    MANAGE_KEYS = "manage_keys"
    """Make and end keys of programs."""
    MANAGE_PEOPLE = "manage_people"
    """Add people, give and take roles, reset credentials."""


A, R = Action, Role
MAY: Mapping[Action, frozenset[Role]] = {
    A.SAMPLE: frozenset(),
    A.REPORT: frozenset(),
    A.LOOK: frozenset(Role),
    A.READ_AUDIT: frozenset({R.OPERATOR, R.CONFIG_ADMIN, R.AUDITOR, R.ADMIN}),
    A.SEE_ACCESS: frozenset({R.AUDITOR, R.ADMIN}),
    A.APPROVE: frozenset({R.OPERATOR, R.ADMIN}),
    A.REJECT: frozenset({R.OPERATOR, R.ADMIN}),
    A.ABORT: frozenset({R.OPERATOR, R.ADMIN}),
    A.ROLL_BACK: frozenset({R.OPERATOR, R.ADMIN}),
    A.RENEW_ANCHOR: frozenset({R.OPERATOR, R.ADMIN}),
    A.UNFREEZE: frozenset({R.OPERATOR, R.ADMIN}),
    A.LIFT: frozenset({R.OPERATOR, R.ADMIN}),
    A.PIN: frozenset({R.OPERATOR, R.ADMIN}),
    A.JUDGE: frozenset({R.OPERATOR, R.ADMIN}),
    A.MEND_DATA: frozenset({R.OPERATOR, R.ADMIN}),
    A.ERASE: frozenset({R.ADMIN}),
    A.CHANGE_RULES: frozenset({R.CONFIG_ADMIN, R.ADMIN}),
    A.NOTIFY: frozenset({R.CONFIG_ADMIN, R.ADMIN}),
    A.MANAGE_KEYS: frozenset({R.ADMIN}),
    A.MANAGE_PEOPLE: frozenset({R.ADMIN}),
}
"""Who may do what. Nobody's role lets them sample or report: products do that, with keys of their own."""

PERSONAL = frozenset({A.APPROVE, A.REJECT, A.RENEW_ANCHOR, A.UNFREEZE, A.LIFT, A.JUDGE, A.MANAGE_PEOPLE})
"""What takes a person: no program's key can do it, whatever its scopes."""
DEPLOYMENT_WIDE = frozenset({A.MANAGE_PEOPLE, A.ERASE})
"""What touches every policy: somebody bound to one policy may not do it."""

OF_SCOPE: Mapping[Scope, frozenset[Action]] = {
    Scope.SAMPLE: frozenset({A.SAMPLE}),
    Scope.INGEST: frozenset({A.SAMPLE, A.REPORT}),
    Scope.READ: frozenset({A.LOOK, A.READ_AUDIT}),
    Scope.RELEASE: frozenset({A.ABORT, A.ROLL_BACK}),
    Scope.ADMIN: frozenset(Action) - PERSONAL,
}
"""What the scopes of a program's key let it do."""


def actions_of(roles: Collection[Role]) -> frozenset[Action]:
    """Everything that these roles together may do."""
    return frozenset(action for action, allowed in MAY.items() if not allowed.isdisjoint(roles))


def actions_of_scopes(scopes: Collection[Scope]) -> frozenset[Action]:
    """Everything that a program's key with these scopes may do."""
    return frozenset(action for scope in scopes for action in OF_SCOPE[scope])


NAMES = re.compile(r"[a-z0-9][a-z0-9._@+-]{0,63}")
BOT_MARKS = ("[bot]", "-bot", "_bot", "bot:")


def is_person(actor: str) -> bool:
    """A user whose name does not mark it as a program."""
    name = actor.removeprefix("user:")
    return actor.startswith("user:") and bool(name.strip()) and not any(mark in name.lower() for mark in BOT_MARKS)


@dataclass(frozen=True, kw_only=True)
class Person:
    """Somebody who may ask for something."""

    id: str
    name: str
    """Unique, and the same for ever: `user:<name>` signs what they do."""
    roles: frozenset[Role]
    policy: str | None
    """The one policy they are there for; None is all."""
    email: str | None = None
    """Where news goes, and how a provider's account is recognised."""
    os_user: str | None = None
    """Their user on the machine: `user:<os_user>` is the same person, where four eyes are counted."""
    has_password: bool = False
    subject: str | None = None
    """`<issuer> <sub>` of their account at a provider."""
    created_at: datetime
    made_by: str
    disabled_at: datetime | None = None

    @property
    def actor(self) -> str:
        """How what they do is signed."""
        return f"user:{self.name}"


@dataclass(frozen=True, kw_only=True)
class Visitor:
    """Who is asking, for pages and endpoints: what they may do, and the token that their forms carry."""

    actor: str
    """`user:<name>`, `service:<name>` for a program's key, `anonymous` on an open loopback deployment."""
    actions: frozenset[Action]
    policy: str | None
    """The one policy they see; None is all."""
    person: Person | None = None
    csrf: str = field(default="", repr=False)
    """For the hidden field `csrf` of every form, good for this browser and session alone."""

    @property
    def name(self) -> str:
        """As a page greets them."""
        return self.actor.partition(":")[2] or self.actor

    def may(self, action: Action, policy: str | None = None) -> bool:
        """Whether they may do this, to this policy where one is meant."""
        if self.policy is not None and (action in DEPLOYMENT_WIDE or policy not in (None, self.policy)):
            return False
        return action in self.actions

    def sees(self, policy: str) -> bool:
        """Whether that policy exists for them."""
        return self.policy in (None, policy)


class NotSignedIn(RatchetError):
    """Nobody is signed in, or the session has ended."""


class SignInRefused(RatchetError):
    """Name, password or link is not good; the sentence is the same for whatever was wrong."""


INVITATION_LASTS = timedelta(hours=24)
FIRST_LINK_LASTS = timedelta(minutes=15)
SESSION_LASTS = timedelta(hours=12)
SESSION_IDLE = timedelta(hours=2)
TOKEN_LASTS_DAYS, TOKEN_LONGEST_DAYS = 30, 366
CREDENTIAL_REST = timedelta(hours=24)
"""Who made or reset somebody's credential does not count beside them for this long."""


def checked_name(name: str) -> str:
    """A name that a person may have. Raises `BadRequest`."""
    if not NAMES.fullmatch(name):
        raise BadRequest(f"{name!r} is no name: use 1 to 64 of a-z 0-9 . _ @ + -, beginning with a letter or digit", param="name")
    if any(mark in name for mark in BOT_MARKS):
        raise BadRequest(f"{name!r} is a program's name, and people approve: give the program a key (`ratchet keys create`)", param="name")
    return name
