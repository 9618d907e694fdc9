"""Access: who there is, with which roles, which keys there are and whose; and which role may do what."""

from typing import Any

from app.console.sheets import Sheet, cell
from app.console.views.asked import Asked
from app.console.wording import clock_time
from app.domain.access import ApiKey
from app.domain.errors import NotFound
from app.domain.ids import utc_now
from app.domain.people import CREDENTIAL_REST, MAY, Action, Person, Role


def access(asked: Asked) -> dict[str, Any]:
    """Values of the page. Raises `NotFound` for who may not see it."""
    _require_seeing(asked)
    people = asked.sight.people()
    return {
        "sheets": {"people": _people(asked, people), "keys": _keys(asked, asked.sight.every_key(), _names(people)), "roles": _roles()},
        "may_manage": asked.viewer.may(Action.MANAGE_PEOPLE), "may_make": asked.viewer.may(Action.MANAGE_KEYS),
    }  # fmt: skip


def person(asked: Asked, name: str) -> dict[str, Any]:
    """Values of somebody's page."""
    _require_seeing(asked)
    found = next((one for one in asked.sight.people() if one.name == name), None)
    if found is None:
        raise NotFound(f"nobody is called {name[:80]!r}; /console/access lists everybody")
    keys = [key for key in asked.sight.every_key() if key.person_id == found.id]
    facts = [
        ("roles", ", ".join(sorted(found.roles))), ("policy", found.policy or "all"), ("e-mail", found.email or "none"),
        ("user on the machine", found.os_user or "none"), ("signs in with", _ways(found)),
        ("added", f"{clock_time(found.created_at)} UTC by {found.made_by}"),
        ("state", "active" if found.disabled_at is None else f"disabled since {clock_time(found.disabled_at)} UTC"),
    ]  # fmt: skip
    return {
        "title": found.name, "facts": facts, "acts": _acts_on(asked, found),
        "sheets": {"sessions": _sessions(asked, found), "keys": _keys(asked, keys, {found.id: found.name}), "hands": _hands(asked, found)},
    }  # fmt: skip


def key(asked: Asked, prefix: str) -> dict[str, Any]:
    """Values of a key's page."""
    _require_seeing(asked)
    found = next((one for one in asked.sight.every_key() if one.prefix == prefix), None)
    if found is None:
        raise NotFound(f"no key begins with {prefix[:40]!r}; /console/access lists them")
    names, rate = _names(asked.sight.people()), found.rate_per_s
    facts = [
        ("name", found.name), ("speaks for", _speaks_for(found, names)), ("scopes", _scopes(found)), ("policy", found.policy or "all"),
        ("rate", "no limit" if rate is None else f"{rate:g} a second"),
        ("made", f"{clock_time(found.created_at)} UTC by {found.made_by or 'nobody known'}"),
        ("ends", f"{clock_time(found.expires_at)} UTC" if found.expires_at else "when it is revoked"),
        ("last used", f"{clock_time(found.last_used_at)} UTC" if found.last_used_at else "never"),
        ("state", _state(found)),
    ]  # fmt: skip
    acts: list[tuple[str, str, bool]] = []
    if asked.viewer.may(Action.MANAGE_KEYS) and found.revoked_at is None:
        acts = [(asked.link(f"/do/revoke_key/{found.prefix}"), "Revoke", True)]
        if found.person_id is None:
            acts.insert(0, (asked.link(f"/do/rotate_key/{found.prefix}"), "Rotate", False))
    return {"title": f"Key {found.prefix}", "facts": facts, "acts": acts, "sheets": {}}


def _state(key: ApiKey) -> str:
    if key.revoked_at is not None:
        return f"revoked at {clock_time(key.revoked_at)} UTC"
    return "good" if key.usable_at(utc_now()) else "its time is over"


def _require_seeing(asked: Asked) -> None:
    if not asked.viewer.may(Action.SEE_ACCESS) or asked.viewer.policy is not None:
        raise NotFound("who has access is for auditors and admins of every policy to see")


def _acts_on(asked: Asked, found: Person) -> list[tuple[str, str, bool]]:
    if not asked.viewer.may(Action.MANAGE_PEOPLE):
        return []
    gone = found.disabled_at is not None
    words = [("change_person", "Change", False)]
    words += [("enable_person", "Enable", False)] if gone else [
        ("invite_person", "Reset the credential", False), ("sign_out_person", "Sign out", True), ("disable_person", "Disable", True),
    ]  # fmt: skip
    return [(asked.link(f"/do/{deed}/{found.name}"), word, stops) for deed, word, stops in words]


def _names(people: list[Person]) -> dict[str, str]:
    return {person.id: person.name for person in people}


def _ways(person: Person) -> str:
    ways = [way for way, has in (("a password", person.has_password), ("an account at the provider", person.subject is not None)) if has]
    return " and ".join(ways) or "nothing yet: the link was not used"


def _people(asked: Asked, people: list[Person]) -> Sheet:
    rows = [
        (
            cell(person.name, href=asked.link(f"/people/{person.name}")), cell(", ".join(sorted(person.roles))),
            cell(person.policy or "all"), cell(person.email or ""), cell("yes" if person.has_password else "no"),
            cell("yes" if person.subject is not None else "no"), cell(person.created_at), cell(person.made_by), cell(person.disabled_at),
        )
        for person in people
    ]  # fmt: skip
    columns = ("who", "roles", "policy", "e-mail", "password", "provider", "added", "by", "disabled")
    empty = "nobody was added yet: whoever reaches this machine may do everything"
    return Sheet(name="people", title="People", columns=columns, rows=rows, empty=empty)


def _keys(asked: Asked, keys: list[ApiKey], names: dict[str, str]) -> Sheet:
    now = utc_now()
    rows = [
        (
            cell(key.prefix, kind="code", href=asked.link(f"/keys/{key.prefix}")), cell(key.name), cell(_speaks_for(key, names)),
            cell(_scopes(key)), cell(key.policy or "all"), cell("yes" if key.usable_at(now) else "no"), cell(key.created_at),
            cell(key.last_used_at), cell(key.expires_at), cell(key.revoked_at),
        )
        for key in keys
    ]  # fmt: skip
    columns = ("begins with", "name", "speaks for", "scopes", "policy", "good", "made", "last used", "ends", "revoked")
    return Sheet(name="keys", title="Keys and tokens", columns=columns, rows=rows, empty="no key was ever made")


def _speaks_for(key: ApiKey, names: dict[str, str]) -> str:
    return "a program" if key.person_id is None else names.get(key.person_id, "")


def _scopes(key: ApiKey) -> str:
    return ", ".join(sorted(key.scopes)) or "as the person"


def _sessions(asked: Asked, found: Person) -> Sheet:
    rows = [(cell(row.created_at), cell(row.seen_at), cell(row.expires_at)) for row in asked.sight.sessions(found.id)]
    columns = ("signed in", "last seen", "ends at the latest")
    return Sheet(name="sessions", title="Open sessions", columns=columns, rows=rows, empty="signed in nowhere")


def _hands(asked: Asked, found: Person) -> Sheet:
    rows = [
        (cell(row.what), cell(row.made_by), cell(row.at), cell(row.at + CREDENTIAL_REST if row.made_by != found.actor else None))
        for row in asked.sight.hands(found.actor)
    ]  # fmt: skip
    columns = ("credential", "made by", "when", "who does not count beside them until")
    return Sheet(name="hands", title="Whose hands made their credentials", columns=columns, rows=rows, empty="nobody's")


def _roles() -> Sheet:
    rows = [(cell(action.value.replace("_", " ")), *(cell("yes" if role in MAY[action] else "") for role in Role)) for action in Action]
    return Sheet(name="roles", title="Who may do what", columns=("act", *(role.value.replace("_", " ") for role in Role)), rows=rows)
