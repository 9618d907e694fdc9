"""Access: who there is, with which roles, which keys there are and whose; and which role may do what."""

from typing import Any

from app.console.sheets import Sheet, cell
from app.console.views.asked import Asked
from app.domain.access import ApiKey
from app.domain.errors import NotFound
from app.domain.ids import utc_now
from app.domain.people import MAY, Action, Person, Role


def access(asked: Asked) -> dict[str, Any]:
    """Values of the page. Raises `NotFound` for who may not see it."""
    if not asked.viewer.may(Action.SEE_ACCESS) or asked.viewer.policy is not None:
        raise NotFound("who has access is for auditors and admins of every policy to see")
    people = asked.sight.people()
    names = {person.id: person.name for person in people}
    return {
        "sheets": {"people": _people(people), "keys": _keys(asked.sight.keys(), names), "roles": _roles()},
        "may_manage": asked.viewer.may(Action.MANAGE_PEOPLE),
    }  # fmt: skip


def _people(people: list[Person]) -> Sheet:
    rows = [
        (
            cell(person.name), cell(", ".join(sorted(person.roles))), cell(person.policy or "all"), cell(person.email or ""),
            cell("yes" if person.has_password else "no"), cell("yes" if person.subject is not None else "no"), cell(person.created_at),
            cell(person.made_by), cell(person.disabled_at),
        )
        for person in people
    ]  # fmt: skip
    columns = ("who", "roles", "policy", "e-mail", "password", "provider", "added", "by", "disabled")
    empty = "nobody was added yet: whoever reaches this machine may do everything"
    return Sheet(name="people", title="People", columns=columns, rows=rows, empty=empty)


def _keys(keys: list[ApiKey], names: dict[str, str]) -> Sheet:
    now = utc_now()
    rows = [
        (
            cell(key.prefix, kind="code"), cell(key.name), cell("a program" if key.person_id is None else names.get(key.person_id, "")),
            cell(", ".join(sorted(key.scopes)) or "as the person"), cell(key.policy or "all"), cell("yes" if key.usable_at(now) else "no"),
            cell(key.created_at), cell(key.expires_at), cell(key.revoked_at),
        )
        for key in keys
    ]  # fmt: skip
    columns = ("begins with", "name", "speaks for", "scopes", "policy", "good", "made", "ends", "revoked")
    return Sheet(name="keys", title="Keys and tokens", columns=columns, rows=rows, empty="no key was ever made")


def _roles() -> Sheet:
    rows = [(cell(action.value.replace("_", " ")), *(cell("yes" if role in MAY[action] else "") for role in Role)) for action in Action]
    return Sheet(name="roles", title="Who may do what", columns=("act", *(role.value.replace("_", " ") for role in Role)), rows=rows)
