"""The agent that comes with us from its first question to its exit code, with a service that answers from a script."""

import io
import json
import urllib.request
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.response import addinfourl

import pytest

from pipelines.rollouts.boxed import agent

main: Any = agent.main


class Scripted(urllib.request.BaseHandler):
    """Answers `scripted:` addresses: with a message, or with a status and what it says."""

    def __init__(self) -> None:
        self.answers: list[dict[str, Any] | tuple[int, str]] = []
        self.asked: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}
        self.timeouts: set[float | None] = set()

    def scripted_open(self, request: urllib.request.Request) -> addinfourl:
        assert isinstance(request.data, bytes)
        self.asked.append(json.loads(request.data))
        self.headers = {name.lower(): value for name, value in request.header_items()} | {"url": request.full_url}
        self.timeouts.add(request.timeout)
        answer = self.answers.pop(0)
        if isinstance(answer, tuple):
            raise HTTPError(request.full_url, answer[0], "refused", Message(), io.BytesIO(answer[1].encode()))
        said = {"choices": [{"message": answer}, {"message": {"content": "another"}}]}
        return addinfourl(io.BytesIO(json.dumps(said).encode()), Message(), request.full_url, 200)


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripted]:
    scripted = Scripted()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_SEARCH_MODEL", raising=False)
    for name, value in (("BASE_URL", "scripted://gateway/v1"), ("API_KEY", "k1"), ("MODEL", "coder")):
        monkeypatch.setenv(f"OPENAI_{name}", value)
    urllib.request.install_opener(urllib.request.build_opener(scripted))
    yield scripted
    urllib.request.install_opener(urllib.request.build_opener())


def worked(*, answer_file: str | None = None, most_turns: int = 3) -> int:
    task = {"instruction": "Mend it.", "answer_file": answer_file, "most_turns": most_turns, "max_tokens": 64, "test_command": None}
    Path(".harness").mkdir()
    Path(".harness/task.json").write_text(json.dumps(task))
    return main(".harness/task.json")


def call(name: str, **given: Any) -> dict[str, Any]:
    return {"id": f"call-{name}", "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}


def test_an_answer_that_calls_no_tool_ends_the_work_well(service: Scripted) -> None:
    service.answers = [{"content": "Done."}]
    assert worked() == 0
    (asked,) = service.asked
    assert asked["messages"] == [{"role": "system", "content": agent.SYSTEM}, {"role": "user", "content": "Mend it."}]
    assert (asked["model"], asked["max_tokens"], asked["temperature"]) == ("coder", 64, 1.0)
    assert [tool["function"]["name"] for tool in asked["tools"]] == ["read", "edit", "search", "shell", "test"]
    assert service.headers["url"] == "scripted://gateway/v1/chat/completions"
    assert (service.headers["authorization"], service.headers["content-type"]) == ("Bearer k1", "application/json")
    assert service.timeouts == {3600.0}, "an hour: practice waits for leave to ask"


def test_every_tool_takes_its_own_arguments_and_no_others(service: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_SEARCH_MODEL", "scout")
    service.answers = [{"content": "Done."}]
    assert worked() == 0
    parameters = {tool["function"]["name"]: tool["function"]["parameters"] for tool in service.asked[-1]["tools"]}
    assert list(parameters) == ["read", "edit", "search", "shell", "test", "find"]
    assert {schema["additionalProperties"] for schema in parameters.values()} == {False}
    required = {name: schema.get("required", []) for name, schema in parameters.items()}
    assert required == {
        "read": ["path"], "edit": ["path", "old", "new"], "search": ["pattern"], "shell": ["command"], "test": [], "find": ["question"]
    }  # fmt: skip


def test_what_the_tools_say_is_said_back_cut_to_eight_thousand_characters(service: Scripted, tmp_path: Path) -> None:
    (tmp_path / "long").write_text("x" * 9000)
    calls = [call("read", path="long"), call("edit", path="b", old="", new="b")]
    service.answers = [{"content": None, "tool_calls": calls}, {"content": "Done.", "tool_calls": []}]
    assert worked() == 0
    said, first, second = service.asked[1]["messages"][2:]
    assert said == {"role": "assistant", "content": "", "tool_calls": calls}
    assert (first["role"], first["tool_call_id"], len(first["content"])) == ("tool", "call-read", 8000)
    assert second == {"role": "tool", "tool_call_id": "call-edit", "content": "written"}
    assert (tmp_path / "b").read_text() == "b"


def test_after_its_last_turn_it_gives_up_with_3(service: Scripted) -> None:
    service.answers = [{"content": "", "tool_calls": [call("test")]}] * 4
    assert worked(most_turns=2) == 3
    assert len(service.asked) == 2


def test_a_service_that_refuses_ends_it_with_4_and_its_words_are_kept(service: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    service.answers = [(429, "é" * 600)]
    assert worked() == 4
    assert capsys.readouterr().err == "é" * 500 + "\n"


@pytest.mark.parametrize(
    ("content", "code", "left"), [("```python\nx = 1\n```", 0, "x = 1\n"), ("", 5, ""), (None, 5, ""), ("x = 2", 0, "x = 2")]
)
def test_a_task_of_one_answer_has_no_tools_and_no_second_turn(
    service: Scripted, tmp_path: Path, content: str | None, code: int, left: str
) -> None:
    service.answers = [{"content": content, "tool_calls": [call("test")]}]
    assert worked(answer_file="answer.py") == code
    assert (tmp_path / "answer.py").read_text() == left
    (asked,) = service.asked
    assert asked["messages"] == [{"role": "user", "content": "Mend it."}]
    assert "tools" not in asked


def test_a_search_model_names_texts_then_places_and_the_lines_stand_below_the_task(
    service: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_SEARCH_MODEL", "scout")
    (tmp_path / "a.py").write_text("one\ntwo\n")
    (tmp_path / "b.py").write_text("three\n")
    place = {"path": "a.py", "first": 2, "last": 2}
    service.answers = [
        {"content": json.dumps({"texts": ["two", "x", "y", "z", "three"]})}, {"content": json.dumps({"places": [place] * 5})},
        {"content": "Done."},
    ]  # fmt: skip
    assert worked() == 0
    texts, places, first = service.asked
    assert [asked["model"] for asked in service.asked] == ["scout", "scout", "coder"]
    assert (texts["max_tokens"], texts["temperature"], "tools" in texts) == (200, 1.0, False)
    form = texts["response_format"]["json_schema"]
    assert (form["name"], form["schema"]["additionalProperties"], form["schema"]["properties"]["texts"]["maxItems"]) == ("texts", False, 4)
    assert form["schema"]["properties"]["texts"]["minItems"] == 1
    assert texts["messages"][1]["content"] == "Mend it.\n\nFiles:\na.py\nb.py"
    assert places["messages"][3]["content"] == "a.py:2: two\n\nWhich places matter?", "of the texts the first four count"
    schema = places["response_format"]["json_schema"]["schema"]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["places"]["items"]["additionalProperties"] is False
    assert schema["properties"]["places"]["items"]["properties"]["path"] == {"enum": ["a.py"]}
    shown = "\n".join(["a.py:2-2\n2\ttwo"] * 4)
    assert first["messages"][1]["content"] == f"Mend it.\n\nWhat a search found:\n{shown}"


def test_texts_that_stand_nowhere_leave_every_file_to_choose_from_and_a_search_that_fails_leaves_the_task_as_it_is(
    service: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_SEARCH_MODEL", "scout")
    (tmp_path / "a.py").write_text("one\n")
    (tmp_path / "b.py").write_text("")
    service.answers = [{"content": json.dumps({"texts": ["two"]})}, (503, "away"), {"content": "Done."}]
    assert worked() == 0
    _, places, first = service.asked
    assert places["messages"][3]["content"] == "These texts stand nowhere.\n\nWhich places matter?"
    assert places["response_format"]["json_schema"]["schema"]["properties"]["places"]["items"]["properties"]["path"] == {
        "enum": ["a.py", "b.py"]
    }
    assert first["messages"][1]["content"] == "Mend it."
    assert capsys.readouterr().err == "away\nerror: OSError: the search model does not answer\n"
