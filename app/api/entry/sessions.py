"""Keys of one episode: signed, not stored. Whoever starts a session hands its key to the agent at work in it.

    rs_<base64url of {episode, parent, expires, source}>.<HMAC-SHA256 under the deployment's session secret>

Such a key may sample turns of its episode and nothing else, above all not reward them. It is good for as long as the key that it was
made with is (the parent; none on an open service) and for `SESSION_S` at most; its policy and its rate are the parent's, and it has a rate
of its own besides. The secret has no other use, is made by the deployment for itself, and is rotated with an overlap of one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from app.api.entry.signed import Ending, Signed
from app.domain.telemetry.events import GATEWAY

SESSION_PREFIX = "rs_"
SESSION_S = 86_400.0
"""A day: longer than any episode is trained on, short enough for a key that ends up in a log."""
RATE_PER_S = 20.0
"""Requests a second in one episode; an agent waits for its answer before it asks again."""


class Session(Ending, frozen=True, kw_only=True):
    """What a session's key says."""

    episode: str
    parent: str
    """Prefix of the key that it was made with; empty on an open service."""
    source: str = GATEWAY
    """What its turns are: somebody's, or an agent's at practice (`rollout:<taskset>`). Signed, so the agent cannot choose."""


@dataclass(frozen=True)
class Sessions:
    """Signs and reads the keys of sessions."""

    secrets: Callable[[], Sequence[str]]
    """Newest first: it signs, all of them are honoured."""

    def issue(self, episode: str, *, parent: str, now: datetime, source: str = GATEWAY) -> tuple[str, datetime]:
        """A key for one episode, and when it ends."""
        expires = now.timestamp() + SESSION_S
        key = self._signed().write(Session(episode=episode, parent=parent, expires=expires, source=source))
        return key, datetime.fromtimestamp(expires, tz=now.tzinfo)

    def read(self, token: str, *, now: datetime) -> Session | None:
        """What a key says; None where we did not sign it or its time is over."""
        return self._signed().read(token, now=now)

    def _signed(self) -> Signed[Session]:
        return Signed(prefix=SESSION_PREFIX, purpose="session", kind=Session, secrets=self.secrets)
