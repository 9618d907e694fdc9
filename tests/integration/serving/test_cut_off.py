"""An engine whose control plane does not answer serves what it holds, says so, and takes up what it missed afterwards."""

import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.domain.errors import Unavailable
from app.domain.ports import EngineState, Way
from app.policy.storage import remote_files
from app.policy.storage.remote import RemoteWeights
from app.policy.storage.store import LocalWeights
from tests.integration.serving.running import engine, until
from tests.integration.serving.test_patched_versions import Loads, moved


def cut_off(url: str) -> dict[str, Any] | None:
    said: dict[str, Any] = httpx.get(f"{url}/health", trust_env=False).json()
    return said["cut_off"]


def silent_s(url: str) -> list[str]:
    lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
    return [line for line in lines if line.startswith("ratchet_control_plane_silent_seconds")]


class Weights(LocalWeights):
    """A folder behind a line that can be cut, or is slow."""

    fault: Exception | None = None
    slow: threading.Event | None = None

    def way(self, digest: str, held: Collection[str]) -> Way | None:
        if self.fault is not None:
            raise self.fault
        if self.slow is not None:
            self.slow.wait(20)
        return super().way(digest, held)


def test_without_its_ledger_an_engine_says_since_when_and_what_may_be_old(tiny_model: Path, tmp_path: Path) -> None:
    store = LocalWeights(tmp_path / "w")
    digest = store.publish(tiny_model)
    with engine(store, digest, load=Loads()) as running:
        until(lambda: bool(silent_s(running.url)))
        assert cut_off(running.url) is None
        assert 'part="database",region=""} 0.0' in silent_s(running.url)[0]
        running.ledger.fault = Unavailable("the database does not answer")
        until(lambda: cut_off(running.url) is not None)
        said = cut_off(running.url)
        assert said is not None
        assert said["says"].startswith("cut off from the database since ")
        assert said["may_be_old"] == [digest]
        assert said["since"]["database"]["why"] == "the database does not answer"
        assert running.residency.alive
        running.ledger.fault = None
        until(lambda: cut_off(running.url) is None)


def test_without_its_storage_an_engine_lives_and_takes_the_version_up_later(tiny_model: Path, tmp_path: Path) -> None:
    store = Weights(tmp_path / "w")
    old, new = store.publish(tiny_model), store.publish(moved(tiny_model, tmp_path / "new"))
    with engine(store, old, load=Loads(), retry_s=0.1) as running:
        store.fault = Unavailable("s3://ratchet does not answer")
        running.ledger.wants.add(("composer", new))
        until(lambda: (cut_off(running.url) or {"since": {}})["since"].keys() == {"storage"})
        assert running.ledger.states[("composer", old)][0] is EngineState.READY
        running.ledger.wants.remove(("composer", new))
        until(lambda: cut_off(running.url) is None)  # nobody needs it
        running.ledger.wants.add(("composer", new))
        until(lambda: cut_off(running.url) is not None)
        store.fault = None
        until(lambda: running.ledger.states[("composer", new)][0] is EngineState.READY)
        assert cut_off(running.url) is None


def test_an_engine_goes_on_reporting_while_it_fetches(tiny_model: Path, tmp_path: Path) -> None:
    store = Weights(tmp_path / "w")
    old, new = store.publish(tiny_model), store.publish(moved(tiny_model, tmp_path / "new"))
    with engine(store, old, load=Loads(), report_every_s=0.05) as running:
        store.slow = threading.Event()
        running.ledger.wants.add(("composer", new))
        until(lambda: running.ledger.states.get(("composer", new), (None,))[0] is EngineState.LOADING)
        del running.ledger.states[("composer", old)]
        until(lambda: ("composer", old) in running.ledger.states)
        store.slow.set()
        until(lambda: running.ledger.states[("composer", new)][0] is EngineState.READY)


class EndpointConnectionError(Exception):
    """As botocore has it: no `OSError`."""


EndpointConnectionError.__module__ = "botocore.exceptions"


@pytest.mark.parametrize("fault", [EndpointConnectionError("could not connect"), ConnectionRefusedError("refused"), TimeoutError("late")])
def test_storage_that_does_not_answer_is_unavailable_and_not_damaged(fault: Exception, tiny_model: Path, tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/weights"
    digest = RemoteWeights(url, cache=tmp_path / "publisher").publish(tiny_model)

    class Cut:
        def __init__(self, files: Any) -> None:
            self.files = files

        def __getattr__(self, name: str) -> Any:
            def fails(*_: Any, **__: Any) -> Any:
                raise fault

            return fails if name in ("ls", "cat_file", "get_file") else getattr(self.files, name)

    with pytest.raises(Unavailable, match=f"{url} does not answer"):
        RemoteWeights(url, cache=tmp_path / "engine", wrap=Cut).path(digest)


def test_on_s3_a_connection_is_given_up_soon_and_what_the_machine_says_goes_before(monkeypatch: pytest.MonkeyPatch) -> None:
    assert remote_files.patient("memory://bucket") == {}
    assert remote_files.patient("s3://bucket/w")["config_kwargs"]["connect_timeout"] == 5
    monkeypatch.setitem(remote_files.fsspec_config, "s3", {"config_kwargs": {"connect_timeout": 60}})
    assert remote_files.patient("s3://bucket/w")["config_kwargs"]["connect_timeout"] == 60
