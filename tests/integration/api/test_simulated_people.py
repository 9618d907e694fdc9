"""The simulated product as a process of its own, on the far side of a real HTTP server."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from app.domain.telemetry.events import EventType, Observation
from app.domain.telemetry.turns import TurnServed
from app.main import create_app
from pipelines.simulation.diary import Diary
from tests.architecture.sources import ROOT
from tests.fakes.gateway import ScriptedEngines, collaborators, events_of, serving
from tests.fakes.inbox import MemoryInbox

TURNS, WORKERS = 6, 2


@pytest.mark.parametrize("panel", [False, True], ids=["people", "panel"])
def test_people_ask_edit_and_say_what_they_think_and_each_acknowledged_event_is_written_down(tmp_path: Path, panel: bool) -> None:
    inbox, diary, ledger = MemoryInbox(), Diary(tmp_path / "diary"), tmp_path / "ledger"
    with serving(create_app(collaborators(inbox=inbox, engines=ScriptedEngines(words=("    return", " None", "\n"))))) as url:
        command = [
            sys.executable, "-m", "pipelines.simulation", "--url", url, "--turns", str(TURNS), "--concurrency", str(WORKERS),
            "--people", "50", "--horizons", "0,0.05", "--ledger", str(ledger), "--diary", str(diary.path), *(["--panel"] if panel else []),
        ]  # fmt: skip
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    turns = [msgspec.json.decode(event.data, type=TurnServed) for event in events_of(inbox, EventType.TURN)]
    said = [msgspec.json.decode(event.data, type=Observation) for event in events_of(inbox, EventType.OBSERVATION)]
    assert TURNS <= len(turns) < TURNS + WORKERS, "whoever is being answered is answered to the end"
    assert len({turn.actor for turn in turns}) == len(turns), "everybody comes once"
    assert {turn.consent.train for turn in turns} == {not panel}
    told = Counter(one.name for one in said)
    assert (told["edit_persistence"], told["task_success"]) == (2 * len(turns), len(turns))
    assert {one.inference_id for one in said} == {turn.inference_id for turn in turns}
    acknowledged = ledger.read_text().splitlines()
    assert Counter(acknowledged) == Counter(one.id for one in said)
    noted, _ = diary.read()
    assert len(noted) == len(turns)
    assert all(bool(entry.question) == panel for entry in noted), "texts are noted of people who are held out alone"
    assert f"answers={len(turns)} events={len(said)} events_given_up=0" in ended.stderr
