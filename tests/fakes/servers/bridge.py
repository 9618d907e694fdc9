"""A bridge in this process: its protocol, with tasks that are a few orders each. The real one runs in an environment of its own."""

import itertools
import json
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

Order = dict[str, Any]
Act = Generator[Order, dict[str, Any], dict[str, Any]]


@dataclass
class ScriptedBridge(httpx.BaseTransport):
    """Offers tasks whose acts are generators: each yields orders and is told what came of them."""

    acts: Mapping[str, Callable[[dict[str, Any]], Act]]
    """By `task/act`."""
    listed: dict[str, Any] = field(default_factory=dict[str, Any])
    talks: dict[int, Act] = field(default_factory=dict[int, Act])
    numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """One request."""
        path, body = request.url.path, json.loads(request.read() or b"{}")
        if path == "/tasks":
            return httpx.Response(200, json=self.listed)
        if path.startswith("/conversations/"):
            number = int(path.rpartition("/")[2])
            return self._next(number, lambda: self.talks[number].send(body))
        act = self.acts.get(path.removeprefix("/tasks/"))
        if act is None:
            return httpx.Response(404, json={"error": "no such task"})
        number = next(self.numbers)
        self.talks[number] = act(body)
        return self._next(number, lambda: next(self.talks[number]))

    def _next(self, number: int, go_on: Callable[[], Order]) -> httpx.Response:
        try:
            return httpx.Response(200, json={"id": number, "do": go_on()})
        except StopIteration as ended:
            return httpx.Response(200, json={"done": ended.value})
        except Exception as error:  # noqa: BLE001 - whatever a task raises is what a bridge says
            return httpx.Response(200, json={"error": f"{type(error).__name__}: {error}"})
