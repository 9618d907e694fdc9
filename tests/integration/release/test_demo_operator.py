"""The demo's operator on the demo's own configuration, over HTTP, where the deployment is open as the demo's is."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Engine

from app.domain.errors import Refused
from app.domain.release.gates import GateName
from app.domain.release.releases import Release, ReleaseState
from app.domain.release.terms import Terms
from app.settings import read_toml
from pipelines.commands.demonstration.operator import Operator
from pipelines.commands.demonstration.profiles import PROFILES, write_config
from pipelines.config import loop_config
from pipelines.evaluation.config import GatesConfig, terms_of
from tests.fakes.gateway import serving
from tests.fakes.releases import ReleaseRoom, answer, release_room
from tests.integration.release.service import release_service


def in_doubt(room: ReleaseRoom) -> Release:
    """READY, and a monitor has raised an alarm on the way."""
    return room.desk.mark_ready(room.canary("v2").id, replace(answer(GateName.CANARY, "v2"), evidence={"alarms": ["proxy_gold_gap"]}))


@contextmanager
def operating(engine: Engine, room: ReleaseRoom) -> Generator[Operator]:
    app = release_service(engine, room, loopback=True)
    app.state.access.load()
    with serving(app) as url:
        operator = Operator(url)
        yield operator
        operator.close()


def demo_terms(folder: Path) -> Terms:
    config = write_config(PROFILES["smollm2"], folder, slot_s=60)
    return terms_of(loop_config(read_toml(config)).gates)


def test_a_release_in_doubt_does_not_stop_the_demo(sqlite_engine: Engine, tmp_path: Path) -> None:
    room = release_room(sqlite_engine, terms=demo_terms(tmp_path / "demo"))
    release = in_doubt(room)
    with operating(sqlite_engine, room) as operator:
        assert "approved tiny-v2" in operator.approve(release)
    assert room.ledger.find(release.id).state is ReleaseState.APPROVED


def test_production_asks_two_and_the_operator_says_why_that_was_refused(sqlite_engine: Engine) -> None:
    room = release_room(sqlite_engine, terms=terms_of(GatesConfig()))
    release = in_doubt(room)
    with operating(sqlite_engine, room) as operator, pytest.raises(Refused, match="needs 2 people"):
        operator.approve(release)
    assert room.ledger.find(release.id).state is ReleaseState.READY
