"""How `ratchet release` acts: over HTTP, as whoever the key in RATCHET_KEY belongs to; in an emergency on the database itself.

Over HTTP the service says who acts, by the key. On the database nobody can: whoever may write there may write anything. So that
way is spelled `--break-glass`, is written into the audit chain before anything is done, acts as the user of the operating system
and nobody else, and never stands in for one of two people.
"""

import os
import pwd
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click
import httpx

from app import wiring
from app.domain.errors import Refused, Unavailable
from app.domain.releases import Release
from app.settings import Settings

F = TypeVar("F", bound=Callable[..., Any])
TIMEOUT_S = 30.0
UUID_CHARS = 36


def acting(command: F) -> F:
    """The options that say how to act."""
    url = click.option("--url", envvar="RATCHET_URL", help="The service; the configured one without it. Key: RATCHET_KEY.")
    glass = click.option("--break-glass", is_flag=True, help="Act on the database itself, as your operating system's user; audited.")
    return url(glass(command))


def os_user() -> str:
    """The person at this terminal, as the operating system knows them: no variable changes it."""
    return f"user:{pwd.getpwuid(os.getuid()).pw_name}"


def break_glass(settings: Settings, *, policy: str, subject: str, act: str, reason: str) -> str:
    """Write into the audit chain that somebody acts past the service; returns who."""
    who = os_user()
    detail = {"act": act, "reason": reason, "host": socket.gethostname()}
    with wiring.release_ledger(settings).transaction(policy) as tx:
        tx.note(actor=who, action="release.break_glass", subject=subject, detail=detail)
    return who


def require_one_person(release: Release) -> None:
    """Refuse to be one of two people past the service. Raises `Refused`."""
    if (release.approvals_needed or 1) > 1:
        raise Refused(
            f"release {release.id} needs {release.approvals_needed} people, and the database cannot tell who is who: "
            "each of them approves with a key of their own (RATCHET_KEY), without --break-glass"
        )


@dataclass(frozen=True)
class Remote:
    """The running service."""

    url: str
    key: str | None

    @staticmethod
    def of(settings: Settings, url: str | None) -> "Remote":
        """The one at `url`, or at the configured host and port."""
        return Remote((url or f"http://{settings.host}:{settings.port}").rstrip("/"), os.environ.get("RATCHET_KEY"))

    def find(self, text: str) -> str:
        """The id of the release with this id, the beginning or the end of it, or this version's name. Raises `Refused`."""
        if len(text) == UUID_CHARS:
            return text
        known = self._send("GET", "/v1/releases?limit=1000", None)["data"]
        found = [r["id"] for r in known if r["id"].startswith(text) or r["id"].endswith(text) or r["version_name"] == text]
        if len(found) != 1:
            raise Refused(f"{len(found)} releases are called {text!r}: `ratchet release list` shows their ids")
        return str(found[0])

    def post(self, path: str, body: dict[str, Any]) -> Any:  # noqa: ANN401 - the service's answer
        """Do it. Raises `Refused` with the service's sentence, `Unavailable` where it does not answer."""
        return self._send("POST", path, {name: value for name, value in body.items() if value is not None})

    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> Any:  # noqa: ANN401 - the service's answer
        who = {"authorization": f"Bearer {self.key}"} if self.key else {"x-ratchet-user": os_user().removeprefix("user:")}
        try:
            answer = httpx.request(method, self.url + path, json=body, headers=who, timeout=TIMEOUT_S)
        except httpx.TransportError as error:
            raise Unavailable(
                f"{self.url} does not answer ({error}): name the service with --url; where it is down and this cannot wait, --break-glass"
            ) from error
        if answer.status_code >= 400:
            raise Refused(_sentence(answer))
        return answer.json()


def _sentence(answer: httpx.Response) -> str:
    try:
        said = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        said = answer.text[:200]
    return f"{said} (HTTP {answer.status_code})"
