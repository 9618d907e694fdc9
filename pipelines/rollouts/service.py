"""The gateway as practice meets it, over HTTP like any client: a session for an episode, and what came of it."""

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import httpx

from app.domain.errors import NotFound, Refused, Unavailable
from app.domain.learning.rollouts import Closed, Rollout
from pipelines.rollouts.permits import Pressure


@dataclass(frozen=True)
class Session:
    """An episode and the key that samples it."""

    episode: str
    key: str


def client_of(
    url: str, headers: Mapping[str, str], *, transport: httpx.BaseTransport | None = None, timeout_s: float = 5.0
) -> httpx.Client:
    """A client to an address. A rollout opens several, and reading the certificates for each took a quarter of its processor time."""
    return httpx.Client(base_url=url, headers=dict(headers), transport=transport, timeout=timeout_s, verify=_certificates())


@cache
def _certificates() -> ssl.SSLContext:
    return httpx.create_ssl_context()


@dataclass
class Service:
    """One gateway."""

    connect: Callable[[Mapping[str, str]], httpx.Client]
    """A client to its address with these headers."""
    policy: str
    key: str | None = None
    """One that may ingest; None for an open service."""

    def begin(self, rollout: Rollout) -> Session:
        """A session of practice. Raises `Unavailable`, `Refused`."""
        said = self._post("/rl/start_session", {"task_id": f"{rollout.taskset}/{rollout.task}"[:200], "rollout": rollout.taskset})
        return Session(episode=said["session_id"], key=said["api_key"])

    def sampling(self, session: Session) -> httpx.Client:
        """A client that may do what the session's key may."""
        return self.connect({"authorization": f"Bearer {session.key}"})

    def pressure(self) -> Pressure | None:
        """What people at the engines feel now, as far as this replica of the gateway knows; None where it does not say."""
        try:
            with self._client() as client:
                answered = client.get("/v1/pressure", params={"policy": self.policy}, timeout=1.0)
            if answered.status_code != 200:
                return None
            said = answered.json()
            return Pressure(first_token_p95_s=said["first_token_p95_s"], waiting=said["waiting"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return None

    def _client(self) -> httpx.Client:
        return self.connect({} if self.key is None else {"authorization": f"Bearer {self.key}"})

    def report(self, rollout: Rollout, episode: str, closed: Closed) -> None:
        """What came of it; said again it changes nothing, so whoever resumes may say it once more."""
        if closed.outcome.is_of_the_model:
            self._post("/feedback", {**_about(rollout, episode, "task_success", closed.reward), "policy": self.policy})
        else:  # whoever's turns they are
            self._post("/feedback", _about(rollout, episode, "environment_fault", closed.outcome.value))

    def report_component(self, rollout: Rollout, episode: str, policy: str, reward: float) -> None:
        """What another policy's step in it was worth, about that policy's turns alone."""
        about = _about(rollout, episode, "task_success", reward)
        self._post("/feedback", {**about, "id": f"{about['id']}:{policy}", "policy": policy})

    def _post(self, path: str, body: dict[str, object]) -> dict[str, str]:
        try:
            with self._client() as client:
                answered = client.post(path, json=body, timeout=30.0)
        except httpx.HTTPError as error:
            raise Unavailable(f"the gateway does not answer ({error}): check that it runs, and its address") from error
        status = answered.status_code
        if status == 400 and _is_conflict(answered):
            return {}  # another verdict was given before: the first one stands
        if status >= 400:
            kind = Unavailable if status == 429 or status >= 500 else NotFound if status == 404 else Refused
            raise kind(f"the gateway refused {path} with {status}: {answered.text[:300]}")
        return answered.json()


def _about(rollout: Rollout, episode: str, name: str, value: object) -> dict[str, object]:
    return {"id": f"rollout:{rollout.id}", "metric_name": name, "value": value, "episode_id": episode}


def _is_conflict(answered: httpx.Response) -> bool:
    try:
        return answered.json()["error"]["code"] == "conflict"
    except (ValueError, KeyError, TypeError):
        return False  # the gateway's own errors have a code
