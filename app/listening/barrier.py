"""What a page on somebody else's web site could make a browser send is stopped here, on every port of ours, before any route looks at it.

| what                                     | stops                                                                                       |
|------------------------------------------|---------------------------------------------------------------------------------------------|
| the Host is one of ours                  | DNS rebinding: a foreign name that points at this machine's address                          |
| an Origin is this service or configured  | scripts and forms of other sites, which browsers sign with where they come from              |
| a body says that it is JSON (or OTLP)    | what a browser sends without asking first: forms, `text/plain`, bodies without a type        |

Nothing is said to other origins (no CORS header) unless `RATCHET_ORIGINS` names them: those are answered, preflights included.
Not covered: a program on this machine, which can set any header. That is what API keys are for.
"""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

from app.listening.errors import HttpError
from app.listening.headers import Headers, header

LOOPBACK_NAMES = frozenset({"localhost"})
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
PAGES = "/console/"
"""Below this path forms are taken; `app.api.entry.doorkeeper` checks the token of each."""
FORM = "application/x-www-form-urlencoded"
_TYPES = re.compile(r"application/(?:json|jsonl|x-jsonlines|x-ndjson|ndjson|x-protobuf|[\w.\-]+\+json)")


@dataclass(frozen=True, kw_only=True)
class Barrier:
    """Who may be addressed, and from where."""

    hosts: frozenset[str] = frozenset()
    """Names under which this service is reached, beyond `localhost` and addresses; `*` is any."""
    origins: frozenset[str] = frozenset()
    """Origins of other sites' pages that may call it, such as `https://app.example.com`."""
    loopback: bool = True
    """Whether it listens on this machine alone: then a Host that is another machine's address is foreign too."""

    def check(self, method: str, headers: Headers, *, path: str = "") -> None:
        """Raise `HttpError` 421, 403 or 415 where the request could be another site's."""
        host = header(headers, b"host") or ""
        if not self._is_ours(_name_of(host)):
            raise HttpError(
                421, f"this service is not called {host!r}: use its own address, or add the name to RATCHET_HOSTS", code="host",
            )  # fmt: skip
        origin = header(headers, b"origin")
        if origin is not None and origin not in self.origins and _authority(origin) != _without_port_80(host):
            raise HttpError(403, f"pages of {origin} may not call this service: add the origin to RATCHET_ORIGINS", code="origin")
        if origin is None and _is_elsewhere(headers) and (method not in SAFE or header(headers, b"sec-fetch-mode") != "navigate"):
            raise HttpError(403, "pages of other sites may not call this service", code="origin")
        if method not in SAFE and _has_body(headers):
            _check_type(header(headers, b"content-type") or "", forms=path.startswith(PAGES))

    def _is_ours(self, name: str) -> bool:
        if name in LOOPBACK_NAMES or name in self.hosts or "*" in self.hosts:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or not self.loopback


def reached_as(host: str) -> frozenset[str]:
    """The name in RATCHET_HOST, where it is one that others can ask for."""
    return frozenset({host.lower()}) - {"0.0.0.0", "::", ""}


@lru_cache(maxsize=1024)
def _name_of(host: str) -> str:
    """The name or address in a Host header: `[::1]:8400` is `::1`."""
    bracketed = re.fullmatch(r"\[([^\]]*)\](?::\d+)?", host)
    return (bracketed[1] if bracketed else re.sub(r":\d*\Z", "", host)).lower().rstrip(".")


def _authority(origin: str) -> str | None:
    """Host and port of an origin as a Host header writes them; None for `null` and what is no origin."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return None
    return _without_port_80(parts.netloc) if parts.scheme in ("http", "https") and parts.netloc else None


def _without_port_80(host: str) -> str:
    return re.sub(r":(?:80|443)\Z", "", host.lower())


def _is_elsewhere(headers: Headers) -> bool:
    """Whether a browser says that another site's page asks."""
    return header(headers, b"sec-fetch-site") in ("cross-site", "same-site")


def _has_body(headers: Mapping[bytes, bytes]) -> bool:
    return headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers


def _check_type(kind: str, *, forms: bool) -> None:
    """`forms`: whether the path takes what a browser's form sends, each with a token of its own."""
    if forms and kind.partition(";")[0].strip().lower() == FORM:
        return
    if kind != "application/json" and not _TYPES.fullmatch(kind.partition(";")[0].strip().lower()):
        raise HttpError(415, f"send `content-type: application/json`, not {kind or 'a body without a type'!r}", code="content_type")
