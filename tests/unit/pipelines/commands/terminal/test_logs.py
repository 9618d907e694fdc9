"""The end of a log and what comes after it: so many lines as were asked for, whole ones alone while it is followed, and none twice."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from app.domain.errors import NotFound
from pipelines.__main__ import ratchet
from pipelines.commands.terminal.commands import BLOCK_BYTES, _last_lines, _leaves, _lines_after, _query, _took


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path / "logs"


def shown(logs: Path, *words: str) -> Result:
    return CliRunner(env={"RATCHET_DATA": str(logs.parent)}).invoke(ratchet, ["logs", *words])


def test_the_last_twenty_lines_of_each_process_are_shown_in_the_order_of_their_names(logs: Path) -> None:
    (logs / "relay.log").write_text("".join(f"r{number}\n" for number in range(25)))
    (logs / "api.log").write_text("one\ntwo")
    (logs / "notes.txt").write_text("no log\n")
    assert shown(logs).stdout.splitlines() == ["api one", "api two", *(f"relay r{number}" for number in range(5, 25))]
    assert shown(logs, "api").stdout.splitlines() == ["api one", "api two"]
    assert shown(logs, "relay", "--lines", "2").stdout.splitlines() == ["relay r23", "relay r24"]
    assert shown(logs, "relay", "--lines", "0").stdout == ""
    assert shown(logs, "relay", "--lines", "-1").exit_code == 2


def test_a_log_that_is_not_there_is_told_with_those_that_are(logs: Path) -> None:
    none = shown(logs)
    assert isinstance(none.exception, NotFound)
    assert "has no logs: `ratchet up` writes them" in str(none.exception)
    assert str(shown(logs, "api").exception).endswith("has no log of 'api'; there are none")
    (logs / "api.log").touch()
    (logs / "relay.log").touch()
    assert str(shown(logs, "loop").exception).endswith("has no log of 'loop'; there are api, relay")
    assert shown(logs).stdout == ""


def test_a_script_gets_each_line_as_it_is_and_a_terminal_what_moves_no_cursor(logs: Path) -> None:
    (logs / "api.log").write_bytes("a\tgrün \x1b[31m\n".encode() + b"\xff\n")
    assert shown(logs).stdout.splitlines() == ["api a\tgrün �[31m", "api �"]
    assert [json.loads(line) for line in shown(logs, "--json").stdout.splitlines()] == [
        {"process": "api", "line": "a\tgrün \x1b[31m"}, {"process": "api", "line": "�"},
    ]  # fmt: skip


@pytest.mark.parametrize("length", [10, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES])
def test_lines_longer_than_a_block_are_found_whole(logs: Path, length: int, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [letter * length for letter in "abc"]
    (logs / "api.log").write_text("\n".join(lines) + "\n")
    assert _last_lines(logs / "api.log", 2, whole=False, as_json=False) == 3 * (length + 1)
    assert capsys.readouterr().out.splitlines() == [f"api {line}" for line in lines[1:]]


def test_while_a_log_is_followed_a_line_waits_until_it_is_whole(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = logs / "api.log"
    log.write_text("one\ntwo\nhal")
    place = _last_lines(log, 5, whole=True, as_json=False)
    assert (place, capsys.readouterr().out) == (8, "api one\napi two\n")
    place = _lines_after(log, place, as_json=False)
    assert (place, capsys.readouterr().out) == (8, "")
    with log.open("a") as file:
        file.write("f\nnext\nthi")
    place = _lines_after(log, place, as_json=False)
    assert (place, capsys.readouterr().out) == (18, "api half\napi next\n")
    log.write_text("anew\n")
    assert (_lines_after(log, place, as_json=False), capsys.readouterr().out) == (5, "api anew\n")
    assert (_lines_after(log, 5, as_json=False), capsys.readouterr().out) == (5, "")


def test_only_whole_lines_are_kept_of_a_log_that_has_none_yet(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = logs / "api.log"
    log.write_text("begun")
    assert (_last_lines(log, 5, whole=True, as_json=False), capsys.readouterr().out) == (0, "")
    assert (_last_lines(log, 5, whole=False, as_json=False), capsys.readouterr().out) == (5, "api begun\n")


def test_what_is_asked_for_is_asked_for_and_nothing_else() -> None:
    assert _query({"policy": None, "state": "READY", "limit": "20"}) == "?state=READY&limit=20"
    assert [_took({"took_s": seconds}) for seconds in (None, 0.0, 0.4, 61.6)] == ["", "0 s", "0 s", "62 s"]


def test_figures_are_named_by_the_way_to_them() -> None:
    assert [*_leaves("gate", {"a": {"b": 1, "c": [2]}, "d": {}})] == [("gate.a.b", 1), ("gate.a.c", [2])]
    assert [*_leaves("gate", None)] == [("gate", None)]
