"""A sight of the console that says what a test tells it to: views are asked for their values without any database."""

from typing import Any, cast

from app.console.sheets import Sheet
from app.console.views.asked import Asked
from app.domain.people import Role, Visitor, actions_of
from app.domain.views.pages import Sight


class Canned:
    """As much of a sight as it was given answers for; `heard` holds what was asked. An answer that is a function is called."""

    def __init__(self, **answers: Any) -> None:
        self._answers = answers
        self.heard: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._answers:
            raise AttributeError(name)
        answer = self._answers[name]

        def said(*words: Any, **named: Any) -> Any:
            self.heard.append((name, words, named))
            return answer(*words, **named) if callable(answer) else answer

        return said


def canned(**answers: Any) -> Any:
    """The same, in the place of whatever port."""
    return Canned(**answers)


def looking(
    *roles: Role, actor: str = "user:ada", of: str | None = None, query: dict[str, str] | None = None, sight: Canned | None = None,
    **answers: Any,
) -> Asked:  # fmt: skip
    """Somebody of these roles (an admin, where none is named) who looks at the policy `tab` and may see the policy `of`, or all of them."""
    viewer = Visitor(actor=actor, actions=actions_of(roles or (Role.ADMIN,)), policy=of)
    return Asked(sight=cast("Sight", sight or Canned(**answers)), viewer=viewer, policy="tab", query=query or {})


def texts(sheet: Sheet) -> list[list[str]]:
    """What stands in the rows of a table."""
    return [[cell.text for cell in row] for row in sheet.rows]
