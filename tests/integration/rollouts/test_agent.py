"""The harness that comes with us, in this process: its tools, and how it comes to an end, against a service that answers by a script."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pipelines.rollouts.boxed import agent
from pipelines.rollouts.harness import RUNNER

Message = dict[str, Any]


class Service:
    """Answers each request with the next of its messages; a number is a refusal."""

    def __init__(self, answers: list[Message | int]) -> None:
        self.answers, self.asked, self.keys = answers, list[Message](), list[str | None]()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                outer.keys.append(self.headers["authorization"])
                said = outer.answers.pop(0)
                self.send_response(said if isinstance(said, int) else 200)
                self.end_headers()
                self.wfile.write(b"too many" if isinstance(said, int) else json.dumps({"choices": [{"message": said}]}).encode())

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


Work = Callable[..., tuple[int, Service]]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    """Let the agent work in a fresh folder on a task; its exit code and what it asked for."""
    services: list[Service] = []

    def worked(*answers: Message | int, **task: Any) -> tuple[int, Service]:
        services.append(Service([*answers]))
        for name, value in (("BASE_URL", services[-1].url), ("API_KEY", "secret"), ("MODEL", "composer")):
            monkeypatch.setenv(f"OPENAI_{name}", value)
        given = {"instruction": "Mend it.", "answer_file": None, "most_turns": 3, "max_tokens": 77, "test_command": None}
        file = tmp_path.with_name(f"{tmp_path.name}-task.json")
        file.write_text(json.dumps(given | task))
        return agent.main(str(file)), services[-1]

    monkeypatch.chdir(tmp_path)
    yield worked
    for service in services:
        service.close()


def call(name: str, **arguments: Any) -> Message:
    return {"content": None, "tool_calls": [{"id": f"call-{name}", "function": {"name": name, "arguments": json.dumps(arguments)}}]}


def use(name: str, **arguments: Any) -> str:
    return agent.use(name, json.dumps(arguments), {"test_command": None})


def test_it_does_what_calls_say_tells_what_came_of_it_and_ends_with_an_answer_without_any(work: Work, tmp_path: Path) -> None:
    code, service = work(call("edit", path="a.py", old="", new="A = 1\n"), {"content": "Done."})
    assert code == 0
    assert (tmp_path / "a.py").read_text() == "A = 1\n"
    first, second = service.asked
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert (first["model"], first["max_tokens"], len(first["tools"])) == ("composer", 77, 5)
    assert second["messages"][2:] == [
        {"role": "assistant", "content": "", "tool_calls": call("edit", path="a.py", old="", new="A = 1\n")["tool_calls"]},
        {"role": "tool", "tool_call_id": "call-edit", "content": "written"},
    ]
    assert service.keys == ["Bearer secret"] * 2


def test_it_gives_up_after_its_turns_and_where_the_service_refuses(work: Work, capsys: pytest.CaptureFixture[str]) -> None:
    assert work(*[call("search", pattern="x")] * 3)[0] == 3
    assert work(429)[0] == 4
    assert capsys.readouterr().err == "too many\n", "whoever reads the journal learns why"


def test_an_answer_file_gets_the_code_of_the_only_answer_and_no_tools_are_offered(work: Work, tmp_path: Path) -> None:
    code, service = work({"content": "Here:\n```python\ndef f():\n    return 1\n```\nGood luck."}, answer_file="answer.py")
    assert (code, (tmp_path / "answer.py").read_text()) == (0, "def f():\n    return 1\n")
    assert "tools" not in service.asked[0]
    assert [message["role"] for message in service.asked[0]["messages"]] == ["user"]
    assert work({"content": None}, answer_file="answer.py")[0] == 5, "nothing was answered"


@pytest.mark.parametrize(
    ("text", "code"),
    [("x = 1", "x = 1"), ("```\nx\n```\n```\ny\n```", "x\n"), ("```py\ncut off", "cut off")],
)
def test_the_code_of_an_answer_is_its_first_block_closed_or_not_or_all_of_it(text: str, code: str) -> None:
    assert agent.code_of(text) == code


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("".join(f"line {n}\n" for n in range(1, 301)))
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x").write_text("line 7\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt").write_text("one\none\n")
    return tmp_path


def test_a_file_is_read_by_lines_with_their_numbers_two_hundred_at_once(folder: Path) -> None:
    assert use("read", path="a.txt", first=299, last=999) == "299\tline 299\n300\tline 300"
    assert use("read", path="a.txt").splitlines()[-1] == "200\tline 200"


def test_an_edit_replaces_what_is_there_once_and_nothing_else(folder: Path) -> None:
    assert use("edit", path="sub/b.txt", old="one", new="two") == "error: `old` is there 2 times and has to be there once"
    assert use("edit", path="sub/b.txt", old="one\none", new="two") == "replaced"
    assert (folder / "sub" / "b.txt").read_text() == "two\n"
    assert use("edit", path="new/c.txt", old="", new="c") == "written"
    assert (folder / "new" / "c.txt").read_text() == "c"


def test_a_search_names_path_and_line_and_looks_into_no_hidden_folder(folder: Path) -> None:
    assert use("search", pattern=r"line 7$|^one") == "a.txt:7: line 7\nsub/b.txt:1: one\nsub/b.txt:2: one"
    assert len(use("search", pattern="line").splitlines()) == 100
    assert use("search", pattern="absent") == "nothing"


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("read", '{"path": "/etc/passwd"}', "error: ValueError: a path of this folder, please"),
        ("edit", '{"path": "sub/../../x", "old": "", "new": "x"}', "error: ValueError: a path of this folder, please"),
        ("read", '{"path": "absent"}', "error: FileNotFoundError"),
        ("read", "{}", "error: KeyError: 'path'"),
        ("read", "{cut off", "error: JSONDecodeError"),
        ("read", '["a.txt"]', "error: TypeError"),
        ("search", '{"pattern": "("}', "error: error: missing )"),
        ("edit", '{"path": "sub/b.txt", "old": "", "new": null}', "error: TypeError: `new` has to be a text"),
        ("fly", "{}", "error: there is no tool 'fly'"),
        ("test", "", "there are no tests to be seen"),
    ],
)
def test_what_goes_wrong_is_said_to_the_model(folder: Path, name: str, arguments: str, said: str) -> None:
    assert agent.use(name, arguments, {"test_command": None}).startswith(said)
    assert (folder / "sub" / "b.txt").read_text() == "one\none\n"


def test_commands_run_without_the_key_and_say_how_they_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert use("shell", command="echo out; echo err >&2; exit 3") == "exit code 3\nout\nerr\n"
    assert "secret" not in use("shell", command="env")
    assert len(use("shell", command="head -c 100000 /dev/zero | tr '\\0' x")) < 8100
    assert agent.command(["/bin/sleep", "600"], within_s=0.1) == "error: still running after 0.1 s"


SEEN = {
    "test_good.py": "def test_a():\n    assert 1\ndef test_b():\n    assert 1\ndef test_wants(fixture):\n    pass\n",
    "sub/seen_test_bad.py": "def test_c():\n    assert 1 == 2\n",
    "test_elsewhere.py": "import no_such_package\n",
    ".hidden/test_no.py": "def test_d():\n    assert 0\n",
    "other.py": "def test_e():\n    assert 0\n",
}


def test_tests_that_are_to_be_seen_are_run_and_failures_named(folder: Path) -> None:
    for path, text in SEEN.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    said = agent.use("test", "", {"test_command": [sys.executable, str(RUNNER)]})
    assert said.splitlines()[0] == "exit code 1"
    assert "./sub/seen_test_bad.py::test_c\nTraceback" in said
    assert str(folder) not in said, "where a workspace lies is nobody's business"
    assert said.splitlines()[-1] == "2 passed, 1 failed, 1 files want packages that are not here"
    (folder / "sub" / "seen_test_bad.py").unlink()
    done = subprocess.run([sys.executable, str(RUNNER)], capture_output=True, check=False)
    assert (done.returncode, done.stdout.decode().strip()) == (0, "2 passed, 0 failed, 1 files want packages that are not here")


# --- the step that another model does ----------------------------------------------------------------------------------------------


def answered(name: str, *given: Any) -> Message:
    return {"content": json.dumps({name: given})}


@pytest.fixture
def found(work: Work, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Work:
    """The same, with a search model; a hundred and two files, of which one is long."""
    monkeypatch.setenv("OPENAI_SEARCH_MODEL", "scout")
    for number in range(101):
        (tmp_path / f"f{number:03d}.py").write_text(f"Alpha {number}\n" + "x" * 200 + f" beta {number}\n")
    (tmp_path / "long.py").write_text("".join(f"gamma {number}\n" for number in range(1, 101)))
    return work


def test_the_search_model_is_asked_for_texts_and_then_for_places_before_the_first_turn(found: Work) -> None:
    place = {"path": "long.py", "first": 2, "last": 3}
    code, service = found(answered("texts", "ALPHA 1", " "), answered("places", place), {"content": "Done."})
    texts, places, turn = service.asked
    assert code == 0
    for asked in (texts, places):
        assert (asked["model"], asked["max_tokens"], asked["temperature"]) == ("scout", 200, 1.0)
        assert asked["messages"][1]["content"].startswith("Mend it.\n\nFiles:\n")
    assert texts["messages"][1]["content"].splitlines()[3:] == [f"f{number:03d}.py" for number in range(100)]
    assert texts["response_format"]["json_schema"]["schema"]["properties"]["texts"] == {
        "type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 1, "maxItems": 4,
    }  # fmt: skip
    hits = places["messages"][3]["content"].splitlines()
    assert hits[:3] == ["f001.py:1: Alpha 1", "f010.py:1: Alpha 10", "f011.py:1: Alpha 11"]
    named = places["response_format"]["json_schema"]["schema"]["properties"]["places"]
    assert (named["minItems"], named["maxItems"]) == (1, 4)
    assert named["items"]["properties"]["path"] == {"enum": ["f001.py", *(f"f{n:03d}.py" for n in range(10, 20)), "f100.py"]}
    assert named["items"]["properties"]["first"] == {"type": "integer", "minimum": 1, "maximum": 2}
    assert turn["messages"][1]["content"] == "Mend it.\n\nWhat a search found:\nlong.py:2-3\n2\tgamma 2\n3\tgamma 3"
    assert len(turn["tools"]) == 6


def test_texts_hits_and_places_beyond_the_most_are_left_out(found: Work) -> None:
    place = {"path": "long.py", "first": 30, "last": 99}
    _, service = found(answered("texts", "beta", "a", "b", "c", "gamma"), answered("places", *[place] * 5), {"content": "Done."})
    hits = service.asked[1]["messages"][3]["content"].split("\n\n")[0].splitlines()
    assert len(hits) == 60
    assert max(len(hit) for hit in hits) == len("f000.py:2: ") + 160
    assert not any("gamma" in hit for hit in hits)
    shown = service.asked[2]["messages"][1]["content"].splitlines()
    assert shown.count("long.py:30-89") == 4
    assert shown[-1] == "89\tgamma 89"


def test_texts_that_stand_nowhere_leave_all_files_to_choose_from_and_a_place_ends_with_its_file(found: Work) -> None:
    place = {"path": "long.py", "first": 99, "last": 50}
    _, service = found(answered("texts", "nowhere"), answered("places", place, {**place, "last": 200}), {"content": "Done."})
    asked = service.asked[1]
    assert asked["messages"][3]["content"] == "These texts stand nowhere.\n\nWhich places matter?"
    among = asked["response_format"]["json_schema"]["schema"]["properties"]["places"]["items"]["properties"]["path"]["enum"]
    assert among == [f"f{number:03d}.py" for number in range(100)]
    assert service.asked[2]["messages"][1]["content"].splitlines()[3:] == [
        "long.py:99-99", "99\tgamma 99", "long.py:99-100", "99\tgamma 99", "100\tgamma 100",
    ]  # fmt: skip


def test_a_search_model_that_refuses_or_says_nothing_costs_the_step_alone(found: Work, capsys: pytest.CaptureFixture[str]) -> None:
    for refusal in (503, {"content": "no JSON"}, {"content": None}):
        code, service = found(refusal, {"content": "Done."})
        assert (code, service.asked[-1]["messages"][1]["content"]) == (0, "Mend it.")
    assert capsys.readouterr().err.count("error:") == 3


def test_with_one_file_there_is_nothing_to_choose_from(work: Work, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPENAI_SEARCH_MODEL", "scout")
    (tmp_path / "only.py").write_text("x\n")
    assert len(work({"content": "Done."})[1].asked) == 1
    (tmp_path / "more.py").write_text("y\n")
    place = {"path": "more.py", "first": 1, "last": 1}
    assert len(work(answered("texts", "y"), answered("places", place), {"content": "Done."})[1].asked) == 3


def test_what_a_tool_says_is_cut_at_eight_thousand_characters_and_of_a_command_the_end_is_kept(work: Work, tmp_path: Path) -> None:
    (tmp_path / "wide.txt").write_text("x" * 9000 + "\n")
    _, service = work(call("read", path="wide.txt"), {"content": "Done."})
    assert len(service.asked[1]["messages"][-1]["content"]) == 8000
    said = agent.command([sys.executable, "-c", "import sys; sys.stdout.write('a' * 9000); sys.stderr.write('b' * 100)"])
    assert said == "exit code 0\n" + "a" * 7900 + "b" * 100


def test_lines_are_read_from_the_first_on(folder: Path) -> None:
    assert use("read", path="a.txt", first=0, last=1) == "1\tline 1"
    assert use("read", path="a.txt", first=10).splitlines()[-1] == "209\tline 209"
    assert use("read", path="a.txt", first=2, last=2) == "2\tline 2"
    assert use("read", path="a.txt", first=301) == ""
