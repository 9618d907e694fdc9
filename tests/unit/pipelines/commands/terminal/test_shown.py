"""What the terminal shows and keeps: times that are left, cells that steer nothing, what needs somebody, and tokens of one's own."""

import json
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.table import Table

from app.domain.errors import BadConfig
from app.domain.release.holdouts import ArmMean, Holdout, Reading
from pipelines.__main__ import ratchet
from pipelines.commands.terminal.holdout import tell_holdout
from pipelines.commands.terminal.kept import keep_token, kept_token, token_file
from pipelines.commands.terminal.shown import left, needs_of, plain, show

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (-1, "over"), (0, "over"), (1, "0 min"), (59, "0 min"), (60, "1 min"), (119, "1 min"), (3599, "59 min"), (3600, "1 h 00 min"),
        (3899, "1 h 04 min"), (3900, "1 h 05 min"), (90_000, "25 h 00 min"),
    ],
)  # fmt: skip
def test_what_is_left_is_told_in_whole_minutes_and_is_over_at_its_end(seconds: int, said: str) -> None:
    assert left((NOON + timedelta(seconds=seconds)).isoformat(), now=NOON) == said
    assert left(None, now=NOON) == ""


def test_without_a_moment_it_is_counted_from_now() -> None:
    assert left((datetime.now(UTC) + timedelta(minutes=10, seconds=50)).isoformat()) == "10 min"
    assert left((datetime.now(UTC) - timedelta(seconds=1)).isoformat()) == "over"


@pytest.mark.parametrize(
    ("text", "cell"), [("a\x1b[31mb", "a�\\[31mb"), ("\u202e", "�"), ("[red]", "\\[red]"), ("grün", "grün"), (None, ""), (7, "7"), (0, "")]
)
def test_no_cell_steers_the_terminal(text: object, cell: str) -> None:
    assert plain(text) == cell


def test_a_script_reads_one_document_and_a_person_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("what")
    table.add_row("cell")
    show({"a": NOON, "b": "grün"}, as_json=True, table=table)
    assert capsys.readouterr().out == '{"a": "2026-11-21 12:00:00+00:00", "b": "grün"}\n'
    show({"a": 1}, as_json=False, table=table)
    assert "cell" in capsys.readouterr().out
    show({"a": 1}, as_json=False)
    assert capsys.readouterr().out == ""


def ready(**changes: Any) -> dict[str, Any]:
    return {
        "id": "r", "policy": "tab", "state": "READY", "version_name": "tiny-s1", "approvals_needed": 2, "evidence_digest": "e",
        "approval_expires_at": "2020-01-01T00:00:00+00:00",
    } | changes  # fmt: skip


CALM: dict[str, Any] = {"frozen": None, "unfreeze_votes": [], "alarms": []}
OVER = ", and the time for it is over (ratchet release approve r --evidence e)"


@pytest.mark.parametrize(
    ("release", "needs"),
    [
        (ready(), [f"tiny-s1 is READY: 2 approvals{OVER}"]), (ready(approvals_needed=1), [f"tiny-s1 is READY: 1 approval{OVER}"]),
        (ready(approvals_needed=None), [f"tiny-s1 is READY: 1 approval{OVER}"]), (ready(policy="other"), []), (ready(state="CANARY"), []),
    ],
)  # fmt: skip
def test_a_release_of_this_policy_that_is_ready_needs_so_many(release: dict[str, Any], needs: list[str]) -> None:
    assert needs_of("tab", CALM, [release]) == needs


def test_an_approval_that_can_still_be_given_says_within_how_long() -> None:
    ends = (datetime.now(UTC) + timedelta(hours=2, minutes=5, seconds=50)).isoformat()
    [need] = needs_of("tab", CALM, [ready(approval_expires_at=ends)])
    assert need.startswith("tiny-s1 is READY: 2 approvals within 2 h 05 min (")


def test_an_alarm_needs_somebody_until_it_has_ended_and_a_freeze_counts_its_votes() -> None:
    alarms = [
        {"kind": "gap", "reason": "paid more", "until": "unfrozen", "ended_at": None},
        {"kind": "drift", "reason": "moved", "until": "tomorrow", "ended_at": "2026-01-01"},
    ]
    assert needs_of("tab", CALM | {"alarms": alarms, "frozen": "harm", "unfreeze_votes": ["a"]}, []) == [
        "promotions are frozen (harm): 1 of 2 votes (ratchet release unfreeze tab)", "gap: paid more, until unfrozen",
    ]  # fmt: skip


# --- tokens --------------------------------------------------------------------------------------------------------------------


def test_a_token_is_kept_for_one_service_whatever_slash_it_ends_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert kept_token("http://one") is None
    path = keep_token("http://one/", "first")
    assert path == token_file() == tmp_path / "ratchet" / "tokens.json"
    assert (stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(path.parent.stat().st_mode) & 0o077) == (0o600, 0)
    keep_token("http://two", "second")
    assert (kept_token("http://one"), kept_token("http://one/"), kept_token("http://two")) == ("first", "first", "second")
    keep_token("http://one", "third")
    assert json.loads(path.read_text()) == {"http://one": "third", "http://two": "second"}
    keep_token("http://one/", None)
    keep_token("http://never", None)
    assert json.loads(path.read_text()) == {"http://two": "second"}
    assert [entry.name for entry in path.parent.iterdir()] == ["tokens.json"]


def test_tokens_are_at_home_where_no_other_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert token_file() == tmp_path / ".config" / "ratchet" / "tokens.json"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o610, 0o601])
def test_tokens_that_others_could_have_touched_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    keep_token("http://one", "first").chmod(mode)
    with pytest.raises(BadConfig, match="chmod 600"):
        kept_token("http://one")


@pytest.mark.parametrize("text", ["[]", "no json", '{"http://one": 7}'])
def test_a_file_that_login_did_not_write_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    keep_token("http://one", "first").write_text(text)
    with pytest.raises(BadConfig, match="remove it and sign in again"):
        kept_token("http://one")


# --- a long-term holdout -----------------------------------------------------------------------------------------------------------


def reading(week: int | None, **changes: Any) -> Reading:
    held, beside = ArmMean(people=10, turns=40, mean=0.5), ArmMean(people=40, turns=160, mean=0.75)
    made = {"metric": "kept", "week": week, "held": held, "beside": beside, "difference": 0.25, "low": 0.125, "high": 0.375}
    return Reading(**made | changes)


def told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, **changes: Any) -> list[str]:
    monkeypatch.setenv("COLUMNS", "200")
    usual: dict[str, Any] = {
        "id": "h", "policy": "tab", "digest": "d" * 64, "share": 0.025, "began_at": NOON, "ends_at": NOON + timedelta(days=90),
        "counted_until": NOON,
    }  # fmt: skip
    tell_holdout(Holdout(**usual | changes))
    return capsys.readouterr().out.splitlines()


def test_a_holdout_that_was_not_read_yet_says_whom_it_keeps_on_what(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = f"2.5% of the people on {'d' * 12} since 2026-11-21"
    nothing = "nothing was read yet: the first reading comes with its first whole day"
    assert told(capsys, monkeypatch) == [f"{first}, until 2027-02-19", nothing]
    ended = told(capsys, monkeypatch, ended_at=NOON + timedelta(days=2), ended_because="a person ended it")
    assert ended == [f"{first}, ended 2026-11-23: a person ended it", nothing]


def test_a_holdout_shows_its_newest_week_and_all_weeks_with_both_arms(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = reading(None, held=ArmMean(people=2), difference=None, low=None, high=None)
    lines = told(capsys, monkeypatch, read_until=NOON, readings=(reading(0), reading(1), few))
    rows = [[cell.strip() for cell in line[1:-1].split("│")] for line in lines if line.startswith("│")]
    assert rows == [
        ["kept", "1", "0.5000", "0.7500", "+25.00 pp", "[+12.50, +37.50]", "10 and 40"],
        ["kept", "all", "-", "0.7500", "-", "too few people yet", "2 and 40"],
    ]
    assert lines[-1] == "counted until 2026-11-21 12:00 UTC; one interval of twenty misses, and there are 2"


@pytest.mark.parametrize(("shell", "word"), [("bash", "complete"), ("zsh", "compdef"), ("fish", "complete")])
def test_a_shell_learns_our_words_by_our_own_variable(shell: str, word: str) -> None:
    said = CliRunner().invoke(ratchet, ["completion", shell]).output
    assert "_RATCHET_COMPLETE" in said
    assert (word in said, f"{shell}_complete" in said) == (True, True)
    assert CliRunner().invoke(ratchet, ["completion", "csh"]).exit_code == 2
