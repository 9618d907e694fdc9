"""The tools of the agent that comes with us, as it uses them in the folder it is started in."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from pipelines.rollouts.boxed import agent

TASK: dict[str, Any] = {"instruction": "Mend it.", "answer_file": None, "most_turns": 3, "max_tokens": 64, "test_command": None}
use: Any = agent.use
command: Any = agent.command


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_SEARCH_MODEL", raising=False)
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "a.py").write_text("one\ntwo\nthree\n")
    (tmp_path / "b.txt").write_text("Two more\n")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "two").write_text("two\n")
    return tmp_path


def said(name: str, **given: Any) -> str:
    return use(name, json.dumps(given), TASK)


@pytest.mark.parametrize(
    ("given", "lines"),
    [
        ({}, "1\tone\n2\ttwo\n3\tthree"), ({"first": 2}, "2\ttwo\n3\tthree"), ({"first": 2, "last": 2}, "2\ttwo"),
        ({"first": -4, "last": 1}, "1\tone"), ({"first": 3, "last": 99}, "3\tthree"), ({"first": 4}, ""),
    ],
    ids=str,
)  # fmt: skip
def test_lines_are_read_with_their_numbers_from_the_first_to_the_last(given: dict[str, int], lines: str) -> None:
    assert said("read", path="pkg/a.py", **given) == lines


def test_of_a_long_file_two_hundred_lines_are_read(folder: Path) -> None:
    (folder / "long").write_text("x\n" * 500)
    assert said("read", path="long").splitlines()[-1] == "200\tx"
    assert [line.partition("\t")[0] for line in said("read", path="long", first=7).splitlines()][::199] == ["7", "206"]


def test_a_text_is_replaced_where_it_stands_once_and_a_file_is_written_whole(folder: Path) -> None:
    assert said("edit", path="pkg/a.py", old="two", new="2") == "replaced"
    assert (folder / "pkg" / "a.py").read_text() == "one\n2\nthree\n"
    assert said("edit", path="pkg/a.py", old="e", new="E") == "error: `old` is there 3 times and has to be there once"
    assert said("edit", path="pkg/a.py", old="four", new="4") == "error: `old` is there 0 times and has to be there once"
    assert said("edit", path="new/deep/c.py", old="", new="c\n") == "written"
    assert said("edit", path="d.py", old="", new="d\n") == "written"
    assert said("edit", path="new/deep/c.py", old="", new="again\n") == "written"
    assert ((folder / "new/deep/c.py").read_text(), (folder / "d.py").read_text()) == ("again\n", "d\n")
    assert said("edit", path="d.py", old="", new=5) == "error: TypeError: `new` has to be a text"
    assert (folder / "pkg" / "a.py").read_text() == "one\n2\nthree\n"


def test_lines_of_all_files_are_found_but_of_hidden_ones_and_a_hundred_at_most(folder: Path) -> None:
    assert said("search", pattern="(?i)two") == "b.txt:1: Two more\npkg/a.py:2: two"
    assert said("search", pattern="four") == "nothing"
    assert said("search", pattern="(") == "error: error: missing ), unterminated subpattern at position 0"
    (folder / "long").write_text("hit\n" * 150)
    assert len(said("search", pattern="hit").splitlines()) == 100
    assert agent.paths() == ["b.txt", "long", "pkg/a.py"]


@pytest.mark.parametrize("path", ["/etc/passwd", "../secret", "pkg/../../x", "pkg/.."])
def test_no_path_leads_out_of_the_folder(path: str) -> None:
    for tool, more in (("read", {}), ("edit", {"old": "", "new": "x"})):
        assert said(tool, path=path, **more) == "error: ValueError: a path of this folder, please"


def test_what_goes_wrong_is_said_to_the_model() -> None:
    assert said("dig") == "error: there is no tool 'dig'"
    assert said("find", question="where") == "error: there is no tool 'find'", "without a search model it has none"
    assert use("read", "{", TASK).startswith("error: JSONDecodeError")
    assert use("read", "", TASK) == "error: KeyError: 'path'"
    assert said("read", path="gone").startswith("error: FileNotFoundError")
    assert said("test") == "there are no tests to be seen"
    assert use("test", "{}", {**TASK, "test_command": ["/bin/echo", "ran"]}) == "exit code 0\nran\n"


def test_a_command_speaks_with_its_code_and_without_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
    monkeypatch.setenv("OTHER", "seen")
    assert said("shell", command="echo out; echo err >&2; exit 7") == "exit code 7\nout\nerr\n"
    assert said("shell", command='echo "$OPENAI_API_KEY,$OTHER"') == "exit code 0\n,seen\n"
    assert command(["/bin/sleep", "9"], 0.05) == "error: still running after 0.05 s"
    assert said("shell", command="cat") == "exit code 0\n", "nobody answers what it asks"


def test_of_what_a_command_says_the_end_is_kept() -> None:
    told = said("shell", command="head -c 40000 /dev/zero | tr '\\0' x; echo; echo end")
    assert told.startswith("exit code 0\nxxx")
    assert told.endswith("x\nend\n")
    assert len(told) == len("exit code 0\n") + 8000
    wide = said("shell", command=f"'{sys.executable}' -c \"print('é' * 20000)\"")
    assert set(wide.removeprefix("exit code 0\n")) <= {"é", "\n"}, "four bytes a character are enough for any text"
    assert len(wide) == len("exit code 0\n") + 8000


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("Here:\n```python\nx = 1\n```\nand\n```\ny\n```", "x = 1\n"), ("```\nx\n", "x\n"), ("x = 1", "x = 1"), ("", ""),
        ("``` \nx\n```", "``` \nx\n```"),
    ],
)  # fmt: skip
def test_the_code_of_an_answer_is_its_first_block_or_all_of_it(text: str, code: str) -> None:
    assert agent.code_of(text) == code


def test_an_answer_without_code_ends_with_5(folder: Path) -> None:
    assert agent.answer("```\nx = 1\n```", "answer.py") == 0
    assert (folder / "answer.py").read_text() == "x = 1\n"
    assert agent.answer("```\n \n```", "answer.py") == 5


def test_places_where_texts_stand_are_found_whatever_their_case_and_sixty_at_most(folder: Path) -> None:
    where: Any = agent.where
    assert where(["TWO", " "], ["b.txt", "pkg/a.py"]) == [("b.txt", 1, "Two more"), ("pkg/a.py", 2, "two")]
    assert where([], ["b.txt"]) == []
    (folder / "long").write_text(("hit" + "x" * 300 + "\n") * 70)
    found = where(["hit"], ["long"])
    assert (len(found), {len(line) for _, _, line in found}) == (60, {160})


def test_a_search_model_can_name_only_lines_that_there_are(folder: Path) -> None:
    (folder / "none").write_text("")
    places_of: Any = agent.places_of
    schema = places_of(["pkg/a.py", "b.txt"])["properties"]["places"]
    assert (schema["minItems"], schema["maxItems"]) == (1, 4)
    place = schema["items"]["properties"]
    assert place["path"] == {"enum": ["pkg/a.py", "b.txt"]}
    assert place["first"] == place["last"] == {"type": "integer", "minimum": 1, "maximum": 3}
    assert places_of(["none", "none"])["properties"]["places"]["items"]["properties"]["first"]["maximum"] == 1


def test_the_lines_of_named_places_are_shown_sixty_of_each_at_most(folder: Path) -> None:
    shown: Any = agent.shown
    assert shown([{"path": "pkg/a.py", "first": 2, "last": 9}, {"path": "b.txt", "first": 1, "last": 1}]) == (
        "pkg/a.py:2-3\n2\ttwo\n3\tthree\nb.txt:1-1\n1\tTwo more"
    )
    assert shown([{"path": "pkg/a.py", "first": 2, "last": 1}]) == "pkg/a.py:2-2\n2\ttwo", "ends that are turned round are one line"
    (folder / "long").write_text("x\n" * 100)
    assert shown([{"path": "long", "first": 11, "last": 99}]).splitlines()[0] == "long:11-70"


def test_without_a_search_model_or_with_one_file_alone_nothing_is_searched_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found_first: Any = agent.found_first
    assert found_first(TASK) == ""
    monkeypatch.setenv("OPENAI_SEARCH_MODEL", "scout")
    (folder / "b.txt").unlink()
    assert found_first(TASK) == ""
    assert capsys.readouterr().err == ""
    (folder / "b.txt").write_text("b")
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    monkeypatch.setenv("OPENAI_BASE_URL", "nowhere")
    assert found_first(TASK) == "", "what went wrong is not shown to the model"
    assert re.match("error: ValueError: unknown url type", capsys.readouterr().err)
    (folder / "b.txt").unlink()
    (folder / "pkg" / "a.py").unlink()
    assert said("find", question="where") == "there are no files"
