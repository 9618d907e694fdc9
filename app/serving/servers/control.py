"""The control side of one server of other make, as residency sees it; calls block."""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import httpx

from app.domain.errors import RatchetError, Refused
from app.domain.telemetry.turns import SamplingParams
from app.serving.servers.held import Held, Place

TIMEOUT_S = 300.0


class Pause(StrEnum):
    """What happens to answers being written while weights are replaced."""

    KEEP = "keep"
    """They go on afterwards; each token is labelled, and such a turn is not trained on."""
    ABORT = "abort"
    """They end; the gateway sends those again that had no token yet. (To wait for them is not offered: one long answer would hold all.)"""


class Control(Protocol):
    """Talks to one server."""

    url: str
    name: str
    """Of its make."""
    scheme: str
    cure: str
    """How a server is started whose log-probabilities are those of the sampled distribution."""

    def close(self) -> None:
        """Close the connections."""
        ...

    def held(self) -> Held:
        """What the server holds. Raises `Unavailable`."""
        ...

    def load_adapter(self, digest: str, folder: Path) -> None:
        """Load a LoRA adapter under its digest; the server must see the same folder."""
        ...

    def unload_adapter(self, digest: str) -> None:
        """Unload it."""
        ...

    def label(self, digest: str) -> None:
        """Have the server call the weights that it holds by their digest."""
        ...

    def replace_weights(self, digest: str, folder: Path, *, back_to: tuple[str, Path] | None, pause: Pause = Pause.KEEP) -> None:
        """Replace the base's weights by a snapshot. Raises `Refused` when that failed and the server has `back_to` again; where not even
        that could be loaded it stays paused, because what it holds is no version at all."""
        ...

    def sample(self, place: Place, prompt: Sequence[int], sampling: SamplingParams, *, top: int = 0) -> list[dict[str, Any]]:
        """Sampled tokens as `{"token_id", "logprob", "top_logprobs": [the same, most probable first]}`."""
        ...

    def score(self, place: Place, tokens: Sequence[int]) -> list[float]:
        """Log-probability of each token but the first, at temperature 1."""
        ...

    def tokenize(self, place: Place, text: str) -> list[int]:
        """Tokens of a text as it is."""
        ...


def http_client(api_key: str | None, client: httpx.Client | None) -> httpx.Client:
    """A client that opens a connection for each question: servers close theirs after an answer of 500, and the next question on it would be
    lost just when the old weights have to come back."""
    limits = httpx.Limits(max_keepalive_connections=0)
    found = client or httpx.Client(timeout=httpx.Timeout(TIMEOUT_S, connect=2.0), limits=limits, trust_env=False)
    found.headers.update({"authorization": f"Bearer {api_key}"} if api_key else {})
    return found


def half_replaced(url: str, error: RatchetError) -> Refused:
    """Where neither the new weights nor the old ones could be loaded."""
    return Refused(f"the weights on {url} are half replaced and it stays paused: restart that server ({error})")


def not_taken(url: str, digest: str, error: RatchetError) -> Refused:
    """Where the old weights are back."""
    return Refused(f"{url} did not take the weights {digest[:12]} and serves what it had ({error})")
