"""How a process comes to a Ray cluster: one of its own that listens on loopback, or a named one whose machines may share no folder."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.domain.errors import BadConfig, Unavailable
from pipelines.training.elsewhere.storage import Storage
from pipelines.training.ray_cluster import join_cluster

EVERYWHERE = Storage(weights="s3://b/weights", states="s3://b/states")


class Ray:
    """Writes down how it was started."""

    def __init__(self, *, running: bool = False, listens: str = "127.0.0.1", nodes: tuple[str, ...] = ()) -> None:
        self.running, self.started, self.ended = running, list[dict[str, Any]](), 0
        self.util = SimpleNamespace(get_node_ip_address=lambda: listens)
        self._nodes = nodes

    def is_initialized(self) -> bool:
        return self.running

    def init(self, **options: Any) -> None:
        self.started.append(options)

    def shutdown(self) -> None:
        self.ended += 1

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeManagerAddress": node.rstrip("!"), "Alive": not node.endswith("!")} for node in self._nodes]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that was told already how to listen."""
    for name, value in (
        ("ENABLE_WINDOWS_OR_OSX_CLUSTER", "0"),
        ("AUTH_MODE", "token"),
        ("AUTH_TOKEN_PATH", "secret"),
        ("USAGE_STATS_ENABLED", "0"),
    ):
        monkeypatch.setenv(f"RAY_{name}", value)
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def joined(monkeypatch: pytest.MonkeyPatch, ray: Ray, *, address: str | None = None, storage: Storage | None = None) -> bool:
    monkeypatch.setitem(sys.modules, "ray", ray)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    return join_cluster(workers=3, token_file=Path("secret"), storage=storage or Storage())


def test_without_an_address_a_closed_one_is_started_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Ray()
    assert joined(monkeypatch, ray) is False
    assert ray.started == [
        {
            "address": "local", "_node_ip_address": "127.0.0.1", "num_cpus": 3, "include_dashboard": False,
            "object_store_memory": 83_886_080,
            "log_to_driver": False, "configure_logging": False,
        }
    ]  # fmt: skip
    assert ray.ended == 0


def test_one_that_runs_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for address in (None, "ray://head:1"):
        ray = Ray(running=True)
        assert joined(monkeypatch, ray, address=address) is False
        assert ray.started == []


def test_one_that_other_machines_would_reach_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Ray(listens="192.0.2.7")
    with pytest.raises(Unavailable, match=r"Ray listens on 192\.0\.2\.7, which other machines reach"):
        joined(monkeypatch, ray)
    assert ray.ended == 1


@pytest.mark.parametrize("mode", ["token", "none"])
def test_a_named_cluster_is_joined_and_one_that_asks_for_no_token_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    ray = Ray(nodes=("127.0.0.1",))
    assert joined(monkeypatch, ray, address="head:6379") is False, "all of its nodes are this machine"
    assert ray.started == [{"address": "head:6379", "log_to_driver": False}]
    assert [record.levelname for record in caplog.records] == ([] if mode == "token" else ["WARNING"])


def test_with_other_machines_everything_has_to_lie_where_they_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert joined(monkeypatch, Ray(), address="head:6379", storage=EVERYWHERE) is True, "whoever its nodes are"
    gone = Ray(nodes=("192.0.2.7!", "127.0.0.1"))
    assert joined(monkeypatch, gone, address="head:6379") is False
    ray = Ray(nodes=("192.0.2.8", "192.0.2.7", "127.0.0.1"))
    with pytest.raises(BadConfig, match=r"head:6379 trains on other machines \(192\.0\.2\.7, 192\.0\.2\.8\)"):
        joined(monkeypatch, ray, address="head:6379", storage=Storage(weights="s3://b/weights"))
    assert ray.ended == 1
