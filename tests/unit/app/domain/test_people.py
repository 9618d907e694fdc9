"""The table of roles and actions is the one that people are told, and holds what it must."""

import re
from pathlib import Path

from app.access import FormTokens
from app.domain.access import Scope
from app.domain.people import MAY, OF_SCOPE, PERSONAL, Action, Role, Visitor, actions_of

TOLD = Path(__file__).resolve().parents[4] / "docs" / "access.md"


def test_the_table_is_the_one_in_the_documents() -> None:
    lines = TOLD.read_text().splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("| | viewer |"))
    columns = [Role(cell) for cell in cells(lines[start])[1:]]
    said: dict[Action, frozenset[Role]] = {Action.SAMPLE: frozenset(), Action.REPORT: frozenset()}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        names, *marks = cells(line)
        for name in names.split(", "):
            said[Action(name)] = frozenset(role for role, mark in zip(columns, marks, strict=True) if mark == "yes")
    assert said == dict(MAY)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.findall(r"\|([^|]*)", line)][:-1]


def test_who_changes_what_releases_are_judged_by_decides_on_none_and_an_auditor_changes_nothing() -> None:
    deciding = {Action.APPROVE, Action.REJECT, Action.UNFREEZE, Action.LIFT, Action.RENEW_ANCHOR}
    assert not deciding & actions_of([Role.CONFIG_ADMIN])
    assert actions_of([Role.AUDITOR]) == {Action.LOOK, Action.READ_AUDIT, Action.SEE_ACCESS}
    assert actions_of([Role.VIEWER]) == {Action.LOOK}
    assert not any(actions & PERSONAL for actions in OF_SCOPE.values())
    assert OF_SCOPE[Scope.ADMIN] | PERSONAL == frozenset(Action)


def test_who_is_bound_to_a_policy_may_nothing_elsewhere_and_manages_nobody() -> None:
    visitor = Visitor(actor="user:ada", actions=actions_of([Role.ADMIN]), policy="tab")
    assert visitor.may(Action.APPROVE)
    assert visitor.may(Action.APPROVE, "tab")
    assert not visitor.may(Action.APPROVE, "composer")
    assert not visitor.may(Action.MANAGE_PEOPLE)
    assert (visitor.sees("tab"), visitor.sees("composer")) == (True, False)


def test_a_forms_token_fits_who_it_was_made_for_and_outlives_one_rotation_of_the_secret() -> None:
    secrets = ["one"]
    forms = FormTokens(lambda: tuple(secrets))
    token = forms.of("session a")
    assert forms.fits(token, "session a")
    assert not forms.fits(token, "session b")
    secrets.insert(0, "two")
    assert forms.fits(token, "session a")
    secrets.pop()
    assert not forms.fits(token, "session a")
