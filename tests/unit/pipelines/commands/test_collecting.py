"""Edits that are followed and conversations that are imported: horizons, files that moved and bodies, each bound from both sides."""

import json
import logging
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.domain.errors import BadConfig, Unavailable
from pipelines.commands.collect import watch
from pipelines.commands.collecting.spool import Edit, Spool
from pipelines.commands.collecting.tree import Tree
from pipelines.commands.importer import batches, events_of, send

NOW = 1_800_000_000.0
EDIT = Edit(inference_id="i", path="a.py", before="one\ntwo\nthree\n", inserted="2\n", start=4, replaced=4)


def test_an_edit_replaces_so_many_characters_from_its_place_on() -> None:
    assert (EDIT.replaced_text, EDIT.edited) == ("two\n", "one\n2\nthree\n")
    put = Edit(inference_id="i", path="a.py", before="ab", inserted="x")
    assert (put.replaced_text, put.edited) == ("", "xab")


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    (tmp_path / "tree").mkdir()
    return Spool(tmp_path / "deep" / "spool", tmp_path / "tree", (1000.0, 10.0, 100.0))


def registered(spool: Spool, tmp_path: Path) -> Path:
    """An edit that was registered at `NOW`."""
    file = tmp_path / "deep" / "spool" / f"{spool.register(EDIT)}.json"
    os.utime(file, (NOW, NOW))
    return file


@pytest.mark.parametrize(
    ("age", "due"),
    [
        (-5.0, []), (9.9, []), (10.0, [10.0]), (40.0, [10.0]), (40.1, []), (100.0, [100.0]), (130.0, [100.0]), (130.1, []),
        (1000.0, [1000.0]), (1100.0, [1000.0]),
    ],
)  # fmt: skip
def test_a_horizon_is_due_when_it_has_come_and_may_be_late_by_half_a_minute_or_a_tenth(
    spool: Spool, tmp_path: Path, age: float, due: list[float]
) -> None:
    registered(spool, tmp_path)
    assert [report.horizon_s for report in spool.due(NOW + age)] == due


def test_an_edit_is_forgotten_after_its_last_horizon_and_when_all_have_passed_unwatched(spool: Spool, tmp_path: Path) -> None:
    file = registered(spool, tmp_path)
    for age in (10.0, 100.0, 1000.0):
        [report] = spool.due(NOW + age)
        assert (report.file, report.event["id"].endswith(f"-{age:g}"), report.event["value"]["ended"]) == (file, True, False)
        assert [again.horizon_s for again in spool.due(NOW + age)] == [age], "until it was accepted"
        assert file.exists()
        spool.done(report)
        assert spool.due(NOW + age) == []
    assert not file.exists()
    late = registered(spool, tmp_path)
    assert spool.due(NOW + 1100.1) == []
    assert not late.exists()


def test_what_nobody_looks_at_any_more_is_reported_at_its_age_and_is_over(spool: Spool, tmp_path: Path) -> None:
    file = registered(spool, tmp_path)
    assert not spool.end("nothing")
    assert spool.end(f"../spool/{file.stem}"), "the name alone counts"
    [report] = spool.due(NOW + 3.26)
    assert (report.horizon_s, report.event["value"]["ended"], report.event["source"]) == (3.3, True, "collector")
    spool.done(report)
    assert list(file.parent.iterdir()) == []


def test_a_path_that_leaves_the_folder_is_refused(spool: Spool) -> None:
    with pytest.raises(ValueError, match="leaves the watched folder"):
        spool.register(Edit(inference_id="i", path="../a.py", before="", inserted="x"))


@pytest.mark.parametrize(
    ("there", "found"),
    [
        ("a\nb\nc\n", True), ("a\nb\nx\n", True), ("a\nx\ny\n", False), ("a\nb\nc\nx\ny\nz\n", True), ("a\nb\nc\nx\ny\nz\nw\n", False),
        ("", False),
    ],
)  # fmt: skip
def test_a_file_is_the_moved_one_where_half_of_all_lines_are_common(tmp_path: Path, there: str, found: bool) -> None:
    (tmp_path / "new.py").write_text(there)
    assert Tree(tmp_path).text("old.py", like="  a\nb\n\nc\n") == (there if found else "")


def test_of_several_files_the_one_with_most_lines_in_common_and_none_of_another_kind_hidden_or_large(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    lines = "".join(f"line {number}\n" for number in range(10))
    (tmp_path / ".hidden").mkdir()
    for name, text in (
        ("half.py", "".join(lines.splitlines(keepends=True)[:6])), ("whole.txt", lines), (".hidden/whole.py", lines),
        ("large.py", lines + "\n" * (1_000_001 - len(lines))),
    ):  # fmt: skip
        (tmp_path / name).write_text(text)
    assert tree.text("old.py", like=lines) == "".join(lines.splitlines(keepends=True)[:6])
    (tmp_path / "large.py").write_text(lines + "\n" * (1_000_000 - len(lines)))
    assert tree.text("old.py", like=lines).startswith(lines)
    assert tree.text("half.py", like=lines) == "".join(lines.splitlines(keepends=True)[:6]), "a file at its place is that"
    assert tree.text("old.py", like="\n \n") == ""
    assert (tree.holds("a/../b"), tree.holds("../b"), tree.branch()) == (True, False, None)


# --- conversations -----------------------------------------------------------------------------------------------------------------------


def conversation(*said: tuple[str, str]) -> dict[str, Any]:
    return {"id": 7, "conversations": [{"from": who, "value": text} for who, text in said]}


def test_each_answer_is_a_turn_and_a_person_s_next_message_its_follow_up() -> None:
    talk = conversation(("system", "be brief"), ("human", "hi"), ("gpt", "hello"), ("human", "bye"), ("user", "there?"), ("bard", "yes"))
    made = list(events_of(talk, policy="composer"))
    assert [event["type"] for event in made] == ["ratchet.turn.v1", "ratchet.observation.v1", "ratchet.turn.v1"]
    first, follow_up, second = (event["data"] for event in made)
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert [message["content"] for message in second["messages"]] == ["be brief", "hi", "hello", "bye", "there?"]
    assert (first["completion"], first["consent"], first["logprobs"]) == ("hello", {"train": False}, None)
    assert first["usage"] == {"prompt_tokens": 0, "completion_tokens": 0}
    assert follow_up == {"inference_id": first["inference_id"], "name": "follow_up", "value": "bye", "policy": "composer"}
    assert [event["time"] for event in made] == [f"2023-01-01T00:0{minute}:00+00:00" for minute in (2, 3, 5)]
    assert first["episode_id"] == second["episode_id"] != first["inference_id"]
    assert {len(event["data"]["inference_id"]) for event in made} == {32}
    assert list(events_of(talk, policy="composer")) == made
    assert {event["id"] for event in events_of(talk, policy="tab")}.isdisjoint(event["id"] for event in made)


def sized(*sizes: int) -> list[dict[str, Any]]:
    """Events that are so many bytes as JSON."""
    return [{"a": "x" * (size - len('{"a": ""}'))} for size in sizes]


@pytest.mark.parametrize(
    ("sizes", "parts", "too_large"),
    [
        ([250_000], [1], 0), ([250_001, 10], [1], 1), ([250_001], [], 1), ([10] * 100, [100], 0), ([10] * 101, [100, 1], 0),
        ([224_999] * 3 + [225_000], [4], 0), ([224_999] * 3 + [225_001], [3, 1], 0), ([], [], 0),
    ],
)  # fmt: skip
def test_a_body_has_a_hundred_events_and_nine_hundred_thousand_bytes_at_most(sizes: list[int], parts: list[int], too_large: int) -> None:
    counts = {"too_large": 0}
    made = [json.loads(body) for body in batches(sized(*sizes), counts)]
    assert [len(batch) for batch in made] == parts
    assert counts["too_large"] == too_large


def answering(answer: Callable[[httpx.Request], httpx.Response]) -> tuple[httpx.Client, list[httpx.Request]]:
    asked: list[httpx.Request] = []

    def heard(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return answer(request)

    return httpx.Client(base_url="http://service", transport=httpx.MockTransport(heard)), asked


@pytest.mark.parametrize("status", [202, 422])
def test_what_became_of_each_event_is_read_of_both_answers(status: int) -> None:
    client, asked = answering(lambda _: httpx.Response(status, json={"results": [{"status": "accepted"}]}))
    assert send(client, b"[]") == [{"status": "accepted"}]
    assert (asked[0].url.path, asked[0].headers["content-type"]) == ("/v1/events", "application/json")


@pytest.mark.parametrize("status", [429, 503])
def test_a_service_that_is_busy_twenty_times_is_asked_no_more(status: int) -> None:
    client, asked = answering(lambda _: httpx.Response(status, headers={"retry-after": "0"}))
    with pytest.raises(Unavailable, match="too busy"):
        send(client, b"[]")
    assert len(asked) == 20


@pytest.mark.parametrize("answer", [httpx.Response(400, text="x" * 301), httpx.Response(202, json={}), httpx.Response(500)])
def test_what_is_refused_is_told_with_its_first_three_hundred_characters(answer: httpx.Response) -> None:
    client, asked = answering(lambda _: answer)
    with pytest.raises(BadConfig) as refused:
        send(client, b"[]")
    assert str(refused.value) == f"the service refused: {answer.status_code} {answer.text[:300]}"
    assert len(asked) == 1


# --- reporting ---------------------------------------------------------------------------------------------------------------------------


class Rounds(threading.Event):
    """Lets so many rounds pass, and keeps how long each of them would have waited."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.waited: list[float | None] = []
        self._rounds = rounds

    def wait(self, timeout: float | None = None) -> bool:
        self.waited.append(timeout)
        if len(self.waited) >= self._rounds:
            self.set()
        return self.is_set()


def watched(spool: Spool, answer: Callable[[httpx.Request], httpx.Response], *, rounds: int) -> tuple[list[str], list[float | None]]:
    """The ids that were sent at the second horizon of two edits, and how long was waited between rounds."""
    client, asked = answering(answer)
    stop = Rounds(rounds)
    watch(spool, client, stop, poll_s=7.0, clock=lambda: NOW + 10.0)
    assert all((request.method, request.url.path) == ("POST", "/v1/events") for request in asked)
    return [json.loads(request.content)["id"] for request in asked], stop.waited


@pytest.mark.parametrize("status", [200, 202, 400, 404, 422])
def test_what_the_service_took_or_refuses_is_sent_once(spool: Spool, tmp_path: Path, status: int, caplog: pytest.LogCaptureFixture) -> None:
    files = [registered(spool, tmp_path), registered(spool, tmp_path)]
    with caplog.at_level(logging.INFO):
        sent, waited = watched(spool, lambda _: httpx.Response(status, text="y" * 301), rounds=2)
    assert (len(sent), waited) == (2, [7.0, 7.0])
    assert all(file.exists() for file in files), "later horizons are to come"
    for file in files:
        assert (f"refused file={file.name} status={status} answer={'y' * 300}" in caplog.messages) is (status >= 400)
    assert caplog.messages.count("reported turn=i horizon_s=10") == (0 if status >= 400 else 2)


@pytest.mark.parametrize("status", [429, 500, 502, 503, None])
def test_a_service_that_is_busy_or_away_is_asked_again_in_the_next_round_and_for_one_report_alone(
    spool: Spool, tmp_path: Path, status: int | None
) -> None:
    registered(spool, tmp_path)
    registered(spool, tmp_path)

    def answer(_: httpx.Request) -> httpx.Response:
        if status is None:
            raise httpx.ConnectError("refused")
        return httpx.Response(status)

    sent, waited = watched(spool, answer, rounds=3)
    assert (len(sent), len({*sent}), len(waited)) == (3, 1, 3)


def test_a_collector_that_was_told_to_stop_sends_nothing(spool: Spool, tmp_path: Path) -> None:
    registered(spool, tmp_path)
    client, asked = answering(lambda _: httpx.Response(202))
    stop = threading.Event()
    stop.set()
    watch(spool, client, stop, poll_s=7.0, clock=lambda: NOW + 10.0)
    assert asked == []


# --- a tree that git knows ----------------------------------------------------------------------------------------------------------------


def git(folder: Path, *arguments: str) -> str:
    surroundings = {"PATH": os.environ["PATH"], "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *who, *arguments], cwd=folder, env=surroundings, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_in_git_the_branch_is_what_head_names_and_ignored_files_are_no_place_to_move_to(tmp_path: Path) -> None:
    tree, lines = Tree(tmp_path), "".join(f"line {number}\n" for number in range(10))
    git(tmp_path, "init", "-q")
    (tmp_path / ".gitignore").write_text("ignored.py\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    assert tree.branch() == "refs/heads/main"
    git(tmp_path, "checkout", "-q", "--detach")
    assert tree.branch() == git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "ignored.py").write_text(lines)
    assert tree.text("old.py", like=lines) == ""
    (tmp_path / "new.py").write_text(lines)
    assert tree.text("old.py", like=lines) == lines, "git would know it"


def test_an_edit_ends_where_the_branch_is_changed_under_it(tmp_path: Path) -> None:
    folder = tmp_path / "tree"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "a.py").write_text(EDIT.edited)
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "one")
    spool = Spool(tmp_path / "deep" / "spool", folder, (10.0, 100.0))
    file = registered(spool, tmp_path)
    [report] = spool.due(NOW + 10.0)
    assert report.event["value"]["after"] == EDIT.inserted
    git(folder, "checkout", "-q", "-b", "other")
    assert spool.due(NOW + 10.0) == []
    assert not file.exists()


def test_what_is_no_edit_is_set_aside_and_complained_of_once(spool: Spool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = registered(spool, tmp_path)
    file.write_text('{"path": "../out.py"}')
    os.utime(file, (NOW, NOW))
    with caplog.at_level(logging.WARNING):
        assert [spool.due(NOW + 10.0), spool.due(NOW + 10.0)] == [[], []]
    assert sum("not an edit, set aside" in message for message in caplog.messages) == 1
    assert [path.suffix for path in file.parent.iterdir()] == [".rejected"]
