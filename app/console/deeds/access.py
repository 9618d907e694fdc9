"""Deeds on people and keys, by the rules that hold over HTTP: whose hand made a credential counts for nothing beside its owner for a day.

Nobody signs for others here: on an open deployment there is nobody who could, and the first person closes it (`ratchet people first`).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from app.console.deeds.asking import Asking, Deed, Field, Form, Hands, Outcome, number, one_of_policies, policy_field, text
from app.console.views.asked import Asked
from app.domain.access import ApiKey, Order, Scope
from app.domain.errors import NotFound, Refused
from app.domain.people import INVITATION_LASTS, Action, Person, Role

NEW, OF_SESSIONS = "new", "keys of sessions"
"""The subject of what is not there yet; and as the audit chain calls what agents at work are given."""
HANDS = "For a day you do not count beside them where two people decide, because the link went through your hands."
GOOD_WITHIN = "Running services know it within two seconds."
LONGEST_DAYS, FASTEST = 36_500.0, 1e9


def access_deeds(hands: Hands) -> Mapping[str, Deed]:
    """By name."""
    people, keys = _People(hands), _Keys(hands)
    of_people, of_keys = partial(_deed, Action.MANAGE_PEOPLE), partial(_deed, Action.MANAGE_KEYS)
    return {
        "add_person": of_people("Add", people.ask_new, people.add),
        "change_person": of_people("Change", people.ask_change, people.change),
        "invite_person": of_people("Reset the credential of", people.ask_invite, people.invite),
        "sign_out_person": of_people("Sign out", people.ask_sign_out, people.sign_out, stops=True),
        "disable_person": of_people("Disable", people.ask_disable, people.disable, stops=True),
        "enable_person": of_people("Enable", people.ask_enable, people.enable),
        "make_key": of_keys("Make", keys.ask_new, keys.make),
        "rotate_key": of_keys("Rotate", keys.ask_rotate, keys.rotate),
        "revoke_key": of_keys("Revoke", keys.ask_revoke, keys.revoke, stops=True),
        "rotate_sessions": of_keys("Rotate", keys.ask_sessions, keys.rotate_sessions, stops=True),
    }


Ask = Callable[[Asked, str, Form | None], Asking]
Do = Callable[[Asked, Order, Form], Outcome]


def _deed(action: Action, word: str, ask: Ask, do: Do, *, stops: bool = False) -> Deed:
    return Deed(word=word, action=action, sees=Action.SEE_ACCESS, ask=ask, do=_signed(do), stops=stops)


def _signed(do: Do) -> Do:
    def signed(asked: Asked, order: Order, form: Form) -> Outcome:
        if asked.viewer.actor == "anonymous":
            raise Refused(
                "this service is open, and nobody proves who they are: `ratchet people first` makes the first admin, who signs in"
            )
        return do(asked, order, form)

    return signed


class _People:
    """Deeds on people."""

    def __init__(self, hands: Hands) -> None:
        self._hands = hands

    def ask_new(self, asked: Asked, subject: str, typed: Form | None) -> Asking:
        """Somebody new."""
        _require_new(subject)
        said = typed or {}
        return Asking(
            what="a person", back=asked.link("/access"),
            effect=f"They get a link with which they set a password, once, within a day; it is shown to you this once. {HANDS}",
            fields=[
                Field(name="name", label="Name", value=said.get("name", ""), required=True, note="a-z 0-9 . _ @ + -"),
                *self._about(said, _roles(said)),
            ],
        )  # fmt: skip

    def add(self, asked: Asked, order: Order, form: Form) -> Outcome:
        """Add them, and make their link."""
        name = text(form, "name")
        person = self._hands.people.add(name, roles=_roles(form), by=order.actor, order=order, **self._said(form))
        return self._link(person, self._hands.people.invite(person.name, lasts=INVITATION_LASTS, by=order.actor))

    def ask_change(self, asked: Asked, subject: str, typed: Form | None) -> Asking:
        """Other roles, another policy or address."""
        person = self._hands.people.find(subject)
        now = {"for_policy": person.policy or "", "email": person.email or "", "os_user": person.os_user or ""}
        roles = person.roles if typed is None else _roles(typed)
        return Asking(
            what=person.name, back=_page_of(asked, person.name), fields=self._about(now if typed is None else typed, roles),
            effect=f"What {person.name} may do changes at once. Another address is another way in. {HANDS}",
        )  # fmt: skip

    def change(self, asked: Asked, order: Order, form: Form) -> Outcome:
        """Change what is different."""
        before = self._hands.people.find(order.subject)
        changed: dict[str, Any] = {name: value for name, value in self._said(form).items() if value != getattr(before, name)}
        roles = _roles(form)
        if not changed and roles == before.roles:
            raise Refused(f"nothing of {before.name} is different: change a field first")
        self._hands.people.change(before.name, by=order.actor, roles=None if roles == before.roles else roles, order=order, **changed)
        return Outcome(to=_page_of(asked, before.name))

    def ask_invite(self, asked: Asked, subject: str, typed: Form | None) -> Asking:
        """A new link."""
        person = self._hands.people.find(subject)
        return Asking(
            what=person.name, back=_page_of(asked, person.name),
            effect=(
                f"{person.name} gets a new link to set a password with, once, within a day; links given before end now, and with the new "
                f"password every session and token of theirs. {HANDS}"
            ),
        )  # fmt: skip

    def invite(self, asked: Asked, order: Order, form: Form) -> Outcome:
        """Make it."""
        person = self._hands.people.find(order.subject)
        return self._link(person, self._hands.people.invite(person.name, lasts=INVITATION_LASTS, by=order.actor, order=order))

    def ask_sign_out(self, asked: Asked, subject: str, typed: Form | None) -> Asking:
        """End sessions and tokens."""
        person = self._hands.people.find(subject)
        open_ = len(asked.sight.sessions(person.id))
        tokens = sum(key.person_id == person.id and key.usable_at(self._hands.clock()) for key in asked.sight.every_key())
        return Asking(
            what=person.name, back=_page_of(asked, person.name),
            effect=f"{open_} open sessions and {tokens} tokens of {person.name} end at once. They may sign in again.",
        )  # fmt: skip

    def sign_out(self, asked: Asked, order: Order, form: Form) -> Outcome:
        """End them."""
        self._hands.people.sign_out(order.subject, by=order.actor, order=order)
        return Outcome(to=_page_of(asked, order.subject))

    def ask_disable(self, asked: Asked, subject: str, typed: Form | None) -> Asking:
        """Nobody gets in as them any more."""
        person = self._hands.people.find(subject)
        effect = f"Every session and token of {person.name} ends at once, and nobody gets in as them until they are enabled."
        return Asking(what=person.name, back=_page_of(asked, person.name), effect=effect)

    def disable(self, asked: Asked, order: Order, form: Form) -> Outcome:
        """Shut them out."""
        return self._let(asked, order, disabled=True)

    def ask_enable(self, asked: Asked, subject: str, typed: Form | None) -> Asking:
        """They may get in again."""
        person = self._hands.people.find(subject)
        effect = f"{person.name} may sign in again with the password or account they had, as {', '.join(sorted(person.roles))}."
        return Asking(what=person.name, back=_page_of(asked, person.name), effect=effect)

    def enable(self, asked: Asked, order: Order, form: Form) -> Outcome:
        """Let them in."""
        return self._let(asked, order, disabled=False)

    def _let(self, asked: Asked, order: Order, *, disabled: bool) -> Outcome:
        person = self._hands.people.find(order.subject)
        self._hands.people.change(person.name, by=order.actor, disabled=disabled, order=order)
        return Outcome(to=_page_of(asked, person.name))

    def _about(self, said: Form, roles: frozenset[Role]) -> list[Field]:
        checks = [
            Field(name=f"role_{role}", label=role.value.replace("_", " "), value="on" if role in roles else "", kind="check")
            for role in Role
        ]
        return [
            *checks, policy_field(self._hands, said.get("for_policy")),
            Field(name="email", label="E-mail", value=said.get("email", ""), kind="email", note="for news, and a provider's account"),
            Field(name="os_user", label="User on the machine", value=said.get("os_user", ""), note="counted as the same person"),
        ]  # fmt: skip

    def _said(self, form: Form) -> dict[str, str | None]:
        """All about somebody but name and roles."""
        return {
            "policy": one_of_policies(form, self._hands), "email": text(form, "email") or None, "os_user": text(form, "os_user") or None,
        }  # fmt: skip

    def _link(self, person: Person, secret: str) -> Outcome:
        return Outcome(
            title=f"The link for {person.name}", secret=f"{self._hands.address}/console/welcome?link={secret}",
            sentence=f"Give it to {person.name} alone: it sets their password, once, within a day. {HANDS}",
        )  # fmt: skip


class _Keys:
    """Deeds on keys of programs."""

    def __init__(self, hands: Hands) -> None:
        self._hands = hands

    def ask_new(self, asked: Asked, subject: str, typed: Form | None) -> Asking:
        """A key for a program."""
        _require_new(subject)
        said = typed or {}
        scopes = [
            Field(name=f"scope_{scope}", label=scope.value, value=said.get(f"scope_{scope}", ""), kind="check", note=WHAT_SCOPES_DO[scope])
            for scope in Scope
        ]
        return Asking(
            what="a key", back=asked.link("/access"),
            effect=f"A program that has it may do what its scopes say. Its text is shown to you this once. {GOOD_WITHIN}",
            fields=[
                Field(name="name", label="What it is for", value=said.get("name", ""), required=True), *scopes,
                policy_field(self._hands, said.get("for_policy")), *_limits(said.get("rate_per_s", ""), said.get("expires_days", "")),
            ],
        )  # fmt: skip

    def make(self, asked: Asked, order: Order, form: Form) -> Outcome:
        """Make it."""
        scopes = [scope for scope in Scope if form.get(f"scope_{scope}")]
        name = text(form, "name", most=150)
        if not name or not scopes:
            raise Refused("a key has a name and at least one scope: say what it is for, and what it may do")
        key, secret = self._hands.keys.create(
            name=name, scopes=scopes, policy=one_of_policies(form, self._hands), rate_per_s=number(form, "rate_per_s", most=FASTEST),
            expires_at=self._ends(form), by=order.actor, order=order,
        )  # fmt: skip
        return Outcome(
            title=f"The key {key.prefix}", secret=secret, sentence=f"Hand it to {key.name}: it is shown this once. {GOOD_WITHIN}"
        )

    def ask_rotate(self, asked: Asked, subject: str, typed: Form | None) -> Asking:
        """Another one like it."""
        key, said = self._key(asked, subject), typed or {}
        return Asking(
            what=f"{key.name} ({key.prefix})", back=_key_page(asked, key.prefix),
            effect=(
                f"A new key is made with the name, scopes, policy and rate of {key.prefix}, and shown to you this once. Hand it out, then "
                f"revoke {key.prefix}: until then both are good."
            ),
            fields=_limits("", said.get("expires_days", ""))[1:],
        )  # fmt: skip

    def rotate(self, asked: Asked, order: Order, form: Form) -> Outcome:
        """Make the one that follows it."""
        key = self._key(asked, order.subject)
        if key.person_id is not None:
            raise Refused("this is somebody's own token: they make another themselves (`ratchet login`), and it can be revoked here")
        fresh, secret = self._hands.keys.create(
            name=key.name, scopes=sorted(key.scopes), policy=key.policy, rate_per_s=key.rate_per_s, expires_at=self._ends(form),
            by=order.actor, order=order,
        )  # fmt: skip
        sentence = f"Hand it to {key.name}, then revoke {key.prefix}: until then both are good. {GOOD_WITHIN}"
        return Outcome(
            title=f"The key {fresh.prefix}",
            secret=secret,
            sentence=sentence,
            further=(asked.link(f"/do/revoke_key/{key.prefix}"), f"Revoke {key.prefix}"),
        )

    def ask_revoke(self, asked: Asked, subject: str, typed: Form | None) -> Asking:
        """End it for good."""
        key = self._key(asked, subject)
        effect = f"Whoever uses {key.prefix} is turned away within two seconds, for good."
        if key.revoked_at is not None:
            effect = f"{key.prefix} was revoked at {key.revoked_at:%Y-%m-%d %H:%M:%S} UTC already."
        return Asking(what=f"{key.name} ({key.prefix})", back=_key_page(asked, key.prefix), effect=effect)

    def revoke(self, asked: Asked, order: Order, form: Form) -> Outcome:
        """End it."""
        key = self._key(asked, order.subject)
        self._hands.keys.revoke(key.prefix, by=order.actor, order=order)
        return Outcome(to=_key_page(asked, key.prefix))

    def ask_sessions(self, asked: Asked, subject: str, typed: Form | None) -> Asking:
        """A fresh secret for what agents at work are given."""
        if subject != "sessions":
            raise NotFound("keys of sessions are rotated together: /console/do/rotate_sessions/sessions")
        effect = "Keys of agents' sessions are signed with a fresh secret; those signed with the one before stay good, older ones end."
        return Asking(what="the secret of session keys", back=asked.link("/access"), effect=effect)

    def rotate_sessions(self, asked: Asked, order: Order, form: Form) -> Outcome:
        """Put it in front."""
        once = replace(order, subject=OF_SESSIONS)
        with self._hands.requests.carrying_out(once):
            self._hands.rotate(by=order.actor)
        return Outcome(to=asked.link("/access"))

    def _ends(self, form: Form) -> datetime | None:
        days = number(form, "expires_days", most=LONGEST_DAYS)
        return None if days is None else self._hands.clock() + timedelta(days=days)

    def _key(self, asked: Asked, prefix: str) -> ApiKey:
        found = next((key for key in self._hands.keys.history() if key.prefix == prefix), None)
        if found is None:
            raise NotFound(f"no key begins with {prefix[:40]!r}: /console/access lists them")
        return found


WHAT_SCOPES_DO = {
    Scope.SAMPLE: "asks for completions", Scope.INGEST: "asks, and reports what people did", Scope.READ: "looks, and reads the audit chain",
    Scope.RELEASE: "aborts and rolls back", Scope.ADMIN: "everything that takes no person",
}  # fmt: skip


def _limits(rate: str, days: str) -> list[Field]:
    return [
        Field(name="rate_per_s", label="Requests and events a second at most", value=rate, kind="number", note="nothing: no limit"),
        Field(name="expires_days", label="Good for so many days", value=days, kind="number", note="nothing: until it is revoked"),
    ]


def _roles(form: Form) -> frozenset[Role]:
    return frozenset(role for role in Role if form.get(f"role_{role}"))


def _require_new(subject: str) -> None:
    if subject != NEW:
        raise NotFound(f"what is not there yet is called {NEW!r}: open this from /console/access")


def _page_of(asked: Asked, name: str) -> str:
    return asked.link(f"/people/{name}")


def _key_page(asked: Asked, prefix: str) -> str:
    return asked.link(f"/keys/{prefix}")
