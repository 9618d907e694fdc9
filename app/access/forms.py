"""What keeps another site's page from filling in a form of ours: a token in the form that fits what the browser is known by.

Signed in, that is the session; before, a cookie of the page with the form, so that nobody can be signed in to a stranger's account (login
CSRF); on an open loopback deployment nothing, and the token is then a secret that other sites' pages cannot read. The barrier
(`app.listening.barrier`) refuses what a browser says comes from another site besides.
"""

import hmac
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

FORM_COOKIE = "ratchet_form"
SESSION_COOKIE = "ratchet_session"
HOME = "/console"


@dataclass(frozen=True)
class FormTokens:
    """Makes and checks the tokens of forms."""

    secrets: Callable[[], Sequence[str]]
    """Newest first, as at each call."""

    @staticmethod
    def fresh_cookie() -> str:
        """For a browser that has none."""
        return secrets.token_urlsafe(24)

    def of(self, known_by: str) -> str:
        """The token for whoever is known by this."""
        return self._mac(self.secrets()[0], known_by)

    def fits(self, token: str, known_by: str) -> bool:
        """Whether a form that came back was ours, made for them."""
        return token.isascii() and any(hmac.compare_digest(token, self._mac(secret, known_by)) for secret in self.secrets())

    def _mac(self, secret: str, known_by: str) -> str:
        return hmac.new(secret.encode(), f"form\n{known_by}".encode(), "sha256").hexdigest()


def local_path(asked: str | None) -> str:
    """Where to go after signing in: a path of the console, whatever was asked for.

    `//host`, `/\\host`, `https:host` and what browsers make of control characters leave this site: they end at the first page.
    """
    if not asked or not asked.isascii() or not asked.isprintable() or "\\" in asked:
        return HOME
    parts = urlsplit(asked)
    if parts.scheme or parts.netloc or not (parts.path == HOME or parts.path.startswith(f"{HOME}/")) or "//" in parts.path:
        return HOME
    return asked
