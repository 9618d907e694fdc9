"""How the command line acts: over HTTP, as whoever the token belongs to; in an emergency on the database itself.

Over HTTP the service says who acts, by the token (`RATCHET_TOKEN`, or the one that `ratchet login` kept; a program's key in `RATCHET_KEY`).
Each act carries a request id of its own and what was seen: where the answer gets lost it is asked for again, and is then done already.
On the database nobody can say who acts: whoever may write there may write anything. So that way is spelled `--break-glass`, is written
into the audit chain before anything is done, acts as the user of the operating system, and never stands in for one of two people.
"""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlencode

import click
import httpx

from app import wiring
from app.domain.errors import Refused, Unavailable
from app.domain.ids import uuid7
from app.domain.release.releases import Release
from app.settings import Settings, user_of
from pipelines.commands.terminal.kept import kept_token

F = TypeVar("F", bound=Callable[..., Any])
TIMEOUT_S = 30.0
TRIES, PAUSE_S = 4, 0.25
"""Of an act whose answer got lost; the pauses between double."""
UUID_CHARS = 36
LOST = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError, httpx.ReadTimeout)
"""The request may have arrived."""
OFTEN_LOST = (502, 503, 504)
"""What a proxy says for a service that restarts."""


class NotAllowed(Refused):
    """Not signed in, or not with the role that it takes."""

    exit_code = 3


class MovedOn(Refused):
    """What it was about has changed since it was looked at, or does not allow it."""

    exit_code = 5


class Silent(Unavailable):
    """The service does not answer."""

    exit_code = 4


def acting(command: F) -> F:
    """The options that say how to act."""
    glass = click.option("--break-glass", is_flag=True, help="Act on the database itself, as your operating system's user; audited.")
    return remote(glass(command))


def remote(command: F) -> F:
    """The option that says where the service is."""
    return click.option("--url", envvar="RATCHET_URL", help="The service; the configured one without it.")(command)


def os_user() -> str:
    """The person at this terminal, as the operating system knows them: no variable changes it."""
    return user_of(os.getuid())


def break_glass(settings: Settings, *, act: str, subject: str, reason: str = "", policy: str | None = None) -> str:
    """Write into the audit chain that somebody acts past the service; returns who. `policy` where the act is on its releases."""
    who = os_user()
    detail = {"act": act, "reason": reason, "host": socket.gethostname()}
    if policy is None:
        wiring.write_audit(settings, actor=who, action="break_glass", subject=subject, detail=detail)
        return who
    with wiring.release_ledger(settings).transaction(policy) as tx:
        tx.note(actor=who, action="release.break_glass", subject=subject, detail=detail)
    return who


def require_one_person(release: Release) -> None:
    """Refuse to be one of two people past the service. Raises `Refused`."""
    if (release.approvals_needed or 1) > 1:
        raise Refused(
            f"release {release.id} needs {release.approvals_needed} people, and the database cannot tell who is who: "
            "each of them approves with a token of their own (`ratchet login`), without --break-glass"
        )


@dataclass(frozen=True)
class Remote:
    """The running service."""

    url: str
    token: str | None

    @staticmethod
    def of(settings: Settings, url: str | None) -> "Remote":
        """The one at `url`, or at the configured address; as whoever RATCHET_TOKEN, RATCHET_KEY or `ratchet login` says, in this order."""
        where = (url or f"http://{settings.host}:{settings.port}").rstrip("/")
        return Remote(where, os.environ.get("RATCHET_TOKEN") or os.environ.get("RATCHET_KEY") or kept_token(where))

    def find(self, text: str) -> dict[str, Any]:
        """The release with this id, the beginning or the end of it, or this version's name. Raises `Refused`."""
        if len(text) == UUID_CHARS:
            return self.get(f"/v1/releases/{text}")
        known = self.get("/v1/releases?limit=1000")["data"]
        found = [r for r in known if r["id"].startswith(text) or r["id"].endswith(text) or r["version_name"] == text]
        if len(found) != 1:
            raise Refused(f"{len(found)} releases are called {text!r}: `ratchet releases` shows their ids")
        return found[0]

    def generation(self, policy: str) -> int | None:
        """Of the policy's pointer, as it is now."""
        pointer = self.get(f"/v1/policies/{policy}/deployment")["pointer"]
        return None if pointer is None else int(pointer["generation"])

    def health(self) -> dict[str, str]:
        """What the service says of itself, well or not. Raises `Unavailable` where it does not answer."""
        try:
            return httpx.get(f"{self.url}/health", timeout=TIMEOUT_S).json()
        except (httpx.TransportError, ValueError) as error:
            raise Silent(f"{self.url} does not answer ({error or type(error).__name__}): name the service with --url") from error

    def get(self, path: str, **asked: str | int | None) -> Any:  # noqa: ANN401 - the service's answer
        """Read. Raises `Refused` with the service's sentence, `Unavailable` where it does not answer."""
        named = urlencode({name: value for name, value in asked.items() if value is not None})
        return self._send("GET", f"{path}?{named}" if named else path, None)

    def send(self, method: str, path: str, body: dict[str, Any] | None = None, *, patience_s: float = TIMEOUT_S) -> Any:  # noqa: ANN401 - the service's answer
        """Do something that is not an act on a release."""
        return self._send(method, path, body, patience_s=patience_s)

    def act(self, path: str, body: dict[str, Any]) -> Any:  # noqa: ANN401 - the service's answer
        """Do it, once however often the answer gets lost. Raises `Refused`, `Unavailable`."""
        named = {name: value for name, value in body.items() if value is not None} | {"request_id": uuid7()}
        return self._send("POST", path, named, tries=TRIES)

    def _send(self, method: str, path: str, body: dict[str, Any] | None, *, tries: int = 1, patience_s: float = TIMEOUT_S) -> Any:  # noqa: ANN401 - the service's answer
        who = {"authorization": f"Bearer {self.token}"} if self.token else {"x-ratchet-user": os_user().removeprefix("user:")}
        for attempt in range(1, tries + 1):
            try:
                answer = httpx.request(method, self.url + path, json=body, headers=who, timeout=patience_s)
            except httpx.TransportError as error:
                if isinstance(error, LOST) and attempt < tries:
                    time.sleep(PAUSE_S * 2**attempt)
                    continue
                raise Silent(
                    f"{self.url} does not answer ({error or type(error).__name__}): name the service with --url; where it is down and this "
                    "cannot wait, some commands take --break-glass"
                ) from error
            if answer.status_code in OFTEN_LOST and attempt < tries:
                time.sleep(PAUSE_S * 2**attempt)
                continue
            return _told(answer)
        raise AssertionError("the last try returned or raised")


def _told(answer: httpx.Response) -> Any:  # noqa: ANN401 - the service's answer
    if answer.status_code < 400:
        return answer.json()
    said = _sentence(answer)
    if answer.status_code in (401, 403):
        raise NotAllowed(said)
    if answer.status_code == 409:
        raise MovedOn(said)
    if answer.status_code >= 500:
        raise Silent(said)
    raise Refused(said)


def _sentence(answer: httpx.Response) -> str:
    try:
        said = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        said = answer.text[:200]
    return f"{said} (HTTP {answer.status_code})"
