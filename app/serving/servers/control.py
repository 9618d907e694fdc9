"""The control side of one server of other make, as residency sees it; calls block."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import httpx

from app.domain.errors import NotFound, RatchetError, Refused
from app.domain.telemetry.turns import SamplingParams
from app.serving.servers.held import Held, Place
from app.serving.servers.wire import gone, refusal

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


class HttpControl(ABC):
    """What the control sides of all makes do alike, over HTTP: asking, and replacing weights so that the server never serves half of them.

    A make says how it pauses, updates and goes on, and how an update that failed is left.
    """

    name: str
    needs: str
    """Of its make, for whoever meets an older one."""
    swaps_by: tuple[str, ...]
    """Endpoints that replacing weights takes."""

    def __init__(self, url: str, *, api_key: str | None = None, client: httpx.Client | None = None) -> None:
        self.url = url.rstrip("/")
        # a connection for each question: servers close theirs after an answer of 500, and the next question on it would be lost just when
        # the old weights have to come back
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = client or httpx.Client(timeout=httpx.Timeout(TIMEOUT_S, connect=2.0), limits=limits, trust_env=False)
        self._client.headers.update({"authorization": f"Bearer {api_key}"} if api_key else {})

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def replace_weights(self, digest: str, folder: Path, *, back_to: tuple[str, Path] | None, pause: Pause = Pause.KEEP) -> None:
        """Replace the base's weights by a snapshot. Raises `Refused` when that failed and the server has `back_to` again; where not even
        that could be loaded it stays paused, because what it holds is no version at all."""
        self._require_endpoints()
        try:
            self._pause(pause)
        except RatchetError:
            with suppress(RatchetError):  # it may have been done, and only its answer lost
                self._end_pause()
            raise
        try:
            self._update(digest, folder)
        except RatchetError as error:
            self._restore(back_to, error)
            raise Refused(f"{self.url} did not take the weights {digest[:12]} and serves what it had ({error})") from error
        self._end_pause()

    def _require_endpoints(self) -> None:
        """Raises `NotFound` for a server of another version, before anything is touched. Where there is one, it says that it takes no such
        question (405), or answers it."""
        for path in self.swaps_by:
            found = self._send("OPTIONS", path)
            error = refusal(self.name, self.url, found.status_code, found.content, found.headers, needs=self.needs)
            if isinstance(error, NotFound):
                raise error

    def _end_pause(self) -> None:
        """Go on; asked once more where that got lost, because nobody else would."""
        try:
            self._go_on()
        except RatchetError:
            self._go_on()

    def _restore(self, back_to: tuple[str, Path] | None, error: RatchetError) -> None:
        if back_to is not None:
            try:
                self._leave_update()
                self._update(*back_to)
                self._end_pause()
            except RatchetError as worse:
                error = worse
            else:
                return
        raise Refused(f"the weights on {self.url} are half replaced and it stays paused: restart that server ({error})") from error

    @abstractmethod
    def _pause(self, pause: Pause) -> None:
        """Nothing is sampled from now on."""

    @abstractmethod
    def _update(self, digest: str, folder: Path) -> None:
        """The whole weights from a folder, called by their digest."""

    @abstractmethod
    def _go_on(self) -> None:
        """The end of the pause."""

    @abstractmethod
    def _leave_update(self) -> None:
        """Out of an update that failed, whatever is left of it."""

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        response = self._send(method, path, body)
        if response.status_code >= 400:
            raise refusal(self.name, self.url, response.status_code, response.content, response.headers, needs=self.needs)
        return response

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            return self._client.request(method, self.url + path, json=body)
        except httpx.HTTPError as error:
            raise gone(self.name, self.url, error) from error
