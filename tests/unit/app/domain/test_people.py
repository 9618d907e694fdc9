"""The table of roles and actions is the one that people are told, and holds what it must."""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from app.access import FormTokens
from app.domain.access import Scope
from app.domain.errors import BadRequest
from app.domain.people import (
    CREDENTIAL_REST,
    FIRST_LINK_LASTS,
    INVITATION_LASTS,
    MAY,
    OF_SCOPE,
    PERSONAL,
    SESSION_IDLE,
    SESSION_LASTS,
    TOKEN_LASTS_DAYS,
    TOKEN_LONGEST_DAYS,
    Action,
    Person,
    Role,
    Visitor,
    actions_of,
    actions_of_scopes,
    checked_name,
)

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


def test_scopes_together_let_a_program_do_what_each_lets_it_and_nothing_that_takes_a_person() -> None:
    assert actions_of_scopes([Scope.SAMPLE]) == {Action.SAMPLE}
    assert actions_of_scopes([Scope.INGEST, Scope.RELEASE]) == {Action.SAMPLE, Action.REPORT, Action.ABORT, Action.ROLL_BACK}
    assert actions_of_scopes([]) == frozenset()
    assert not actions_of_scopes(list(Scope)) & PERSONAL


def test_who_was_only_named_has_no_password_no_address_and_signs_as_a_user() -> None:
    ada = Person(
        id="p", name="ada", roles=frozenset({Role.VIEWER}), policy=None, created_at=datetime(2026, 11, 27, tzinfo=UTC), made_by="b"
    )
    assert ada.actor == "user:ada"
    assert (ada.has_password, ada.email, ada.os_user, ada.subject, ada.disabled_at) == (False, None, None, None, None)


@pytest.mark.parametrize(("actor", "name"), [("user:ada", "ada"), ("service:ci", "ci"), ("anonymous", "anonymous"), ("user:a:b", "a:b")])
def test_a_page_greets_a_visitor_by_what_stands_behind_the_first_colon(actor: str, name: str) -> None:
    assert Visitor(actor=actor, actions=frozenset(), policy=None).name == name


def test_what_somebody_may_not_is_said_with_a_plain_no_and_a_form_token_is_never_printed() -> None:
    bound = Visitor(actor="user:ada", actions=actions_of([Role.ADMIN]), policy="tab", csrf="s3cret")
    assert bound.may(Action.ERASE) is False
    assert bound.may(Action.LOOK, "composer") is False
    assert "s3cret" not in repr(bound)
    assert Visitor(actor="user:ada", actions=frozenset(), policy=None).csrf == ""
    everywhere = Visitor(actor="user:bob", actions=actions_of([Role.ADMIN]), policy=None)
    assert everywhere.may(Action.ERASE) is True
    assert everywhere.sees("composer") is True


@pytest.mark.parametrize("name", ["a", "7", "ada.l@example.org", "a" * 64, "a_b+c-d", "robot", "botany"])
def test_a_name_of_a_person_is_taken_as_it_is(name: str) -> None:
    assert checked_name(name) == name


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "is no name"), ("a" * 65, "is no name"), ("Ada", "is no name"), (".ada", "is no name"), ("a b", "is no name"),
        ("ci-bot", "a program's name"), ("ci_bot", "a program's name"), ("ci-bot-2", "a program's name"),
    ],
)  # fmt: skip
def test_what_is_no_name_or_a_programs_is_refused_and_the_field_is_named(name: str, why: str) -> None:
    with pytest.raises(BadRequest, match=why) as refused:
        checked_name(name)
    assert refused.value.param == "name"


def test_credentials_last_as_long_as_the_documents_promise() -> None:
    told = " ".join(TOLD.read_text().split())
    assert f"within {FIRST_LINK_LASTS // timedelta(minutes=1)} minutes" in told
    assert f"does not count beside them for {CREDENTIAL_REST // timedelta(hours=1)} hours" in told
    assert f"Sessions last {SESSION_LASTS // timedelta(hours=1)} hours, two without use" in told
    assert timedelta(hours=2) == SESSION_IDLE
    assert f"({TOKEN_LASTS_DAYS} days unless said otherwise, a year at most)" in told
    assert TOKEN_LONGEST_DAYS == 366, "a leap year"
    assert timedelta(days=1) == INVITATION_LASTS
