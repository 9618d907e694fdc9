"""What commands that read print, how much of it they read unless told otherwise, and with which exit code they end."""

import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sqlalchemy import insert, select

from app import wiring
from app.db.engine import reading, writing
from app.db.learning.cycles import SqlCycles
from app.db.tables import audit, compatible_revisions
from app.domain.errors import BadConfig, BadInput, NotFound, Refused, Unavailable, UnknownPolicy
from app.domain.learning.cycles import CycleStatus
from app.domain.learning.label_reports import LabelReport, TermReport
from app.domain.learning.rule_sets import Mover, Replay, Shift
from app.domain.retention import Retention
from pipelines.commands.importer import conversations
from pipelines.commands.labels import _sentence, _show
from pipelines.commands.maintenance.recover import _id
from pipelines.commands.maintenance.upkeep import _age, _limit
from pipelines.commands.release import _length
from pipelines.commands.rules import _show_replay
from pipelines.labelling.follow_up.agreement import Agreement
from tests.fakes.releases import POLICY, release_room, version
from tests.unit.pipelines.commands.terminal.at_a_terminal import Terminal, cells

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


# --- audit, cycles, lineage ------------------------------------------------------------------------------------------------------


def test_the_chain_s_newest_twenty_are_shown_a_line_each(terminal: Terminal) -> None:
    for number in range(25):
        wiring.write_audit(terminal.settings, actor="user:ada", action="a", subject=f"s{number}", detail={"why": "grün", "at": number})
    lines = terminal.said("audit", "show").splitlines()
    assert len(lines) == 20
    seq, moment, rest = lines[0].split(" ", 2)
    assert (int(seq), rest) == (25, 'user:ada a s24 {"why": "grün", "at": 24}')
    assert datetime.fromisoformat(moment).tzinfo is not None
    assert len(terminal.said("audit", "show", "--limit", "3").splitlines()) == 3


def test_the_chain_is_intact_to_the_entry_that_was_seen_and_a_broken_one_says_so_on_the_other_output(terminal: Terminal) -> None:
    for number in range(3):
        wiring.write_audit(terminal.settings, actor="user:ada", action="a", subject=f"s{number}", detail={})
    intact = terminal("audit", "verify")
    assert (intact.exit_code, intact.stdout.split(", head ")[0]) == (0, "intact: 3 entries")
    head = intact.stdout.split()[-1]
    assert len(head) == 64
    assert terminal.said("audit", "verify", "--seen", f"3:{head}") == intact.stdout
    for seen in (f"3:{'0' * 64}", f"2:{head}", f"4:{head}"):
        broken = terminal("audit", "verify", "--seen", seen)
        assert (broken.exit_code, broken.stdout, broken.stderr.startswith("broken: ")) == (1, "", True)
    for wrong in ("12", f"x:{head}", f"3:{head[1:]}", f"3:{head}0", f":{head}"):
        assert isinstance(terminal.refused("audit", "verify", "--seen", wrong), BadInput)


def test_an_exported_chain_is_verified_without_a_deployment(terminal: Terminal, tmp_path: Path) -> None:
    wiring.write_audit(terminal.settings, actor="user:ada", action="a", subject="s", detail={})
    with reading(terminal.engine) as connection:
        seq, _ = connection.execute(select(audit.c.seq, audit.c.hash)).one()
    assert seq == 1
    (tmp_path / "torn.jsonl").write_text("no entry\n")
    torn = terminal("audit", "verify", str(tmp_path / "torn.jsonl"))
    assert torn.exit_code != 0
    assert terminal("audit", "verify", str(tmp_path / "absent")).exit_code == 2


def test_the_newest_twenty_slots_are_listed_with_the_minute_and_tenths_of_seconds(terminal: Terminal) -> None:
    book = SqlCycles(terminal.engine)
    for number in range(25):
        cycle = book.elect(POLICY, int(NOON.timestamp()) + 3600 * number, owner="me", now=NOON, lease=timedelta(hours=1))
        assert cycle is not None
        cycle = book.advance(cycle, step="batch", changes={"timings": {"batch": 1.26, "train": 20.0}})
        book.finish(cycle, status=CycleStatus.HELD, reason=None if number else "first", now=NOON)
    lines = [line for line in terminal.said("cycle", "list", POLICY).splitlines() if line.startswith("│")]
    assert len(lines) == 20
    assert cells("\n".join(lines), of="2026-11-22 12:00") == ["2026-11-22 12:00", "held", "batch", "1", "batch 1.3 train 20.0", ""]
    assert "first" in terminal.said("cycle", "list", POLICY, "--limit", "25")
    assert isinstance(terminal.refused("cycle", "list", "nobody"), UnknownPolicy)


def test_lineage_is_of_a_version_or_of_a_person_and_of_one_alone(terminal: Terminal) -> None:
    wiring.version_book(terminal.settings).add(version("v2"))
    said = terminal.said("lineage", "tiny-v2")
    assert json.loads(said)[0]["digest"] == "v2"
    assert said.startswith("[\n  {")
    assert isinstance(json.loads(terminal.said("lineage", "--actor", "ada")), dict)
    for words in ((), ("tiny-v2", "--actor", "ada")):
        assert isinstance(terminal.refused("lineage", *words), BadInput)


# --- labels and rules ------------------------------------------------------------------------------------------------------------


def agreement(**changes: Any) -> Agreement:
    usual: dict[str, Any] = {
        "messages": 40, "unread": 0, "kappa": 0.618, "interval": (0.412, 0.804), "precision_punished": 0.875, "recall_punished": 0.5,
        "confusion": {},
    }  # fmt: skip
    return Agreement(**usual | changes)


SAID = "kappa 0.62 (0.41 to 0.80) with people on 40 follow-ups"
MISSING = "champions whose weights are not in the store"
NONE = "it would punish none of them, or people were dissatisfied with none"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, f"{SAID}; 88% of what it would punish deserves it, and of what deserves it 50% would be punished"),
        ({"unread": 1, "recall_punished": None}, f"{SAID}, 1 more it could not read; {NONE}"),
        ({"precision_punished": None}, f"{SAID}; {NONE}"),
        ({"recall_punished": None}, f"{SAID}; {NONE}"),
        ({"precision_punished": 0.0, "recall_punished": 0.0},
         f"{SAID}; 0% of what it would punish deserves it, and of what deserves it 0% would be punished"),
    ],
)  # fmt: skip
def test_agreement_is_one_sentence(changes: dict[str, Any], said: str) -> None:
    assert _sentence(agreement(**changes)) == said


def report(**changes: Any) -> LabelReport:
    terms = (
        TermReport(name="kept", spoke=3, mean=0.1254, abstained={"late": 1, "early": 4}),
        TermReport(name="mute", spoke=0, mean=None, abstained={"off": 8}),
    )
    usual: dict[str, Any] = {
        "policy": POLICY, "labels": 8, "revised": 2, "held_out": 1, "reward_mean": 0.12345, "reward_quantiles": (-1.0, 0.0, 0.25, 0.5, 1.0),
        "moods": {"satisfied": 2, "neutral": 1}, "terms": terms, "rule_sets": {"d" * 64: 8},
        "versions": {"v" * 64: {"trainable": 5, "no_consent": 3}}, "counters": {"late": 4},
    }  # fmt: skip
    return LabelReport(**usual | changes)


def shown(found: LabelReport) -> str:
    console = Console(file=StringIO(), width=160)
    _show(found, console)
    file = console.file
    assert isinstance(file, StringIO)
    return file.getvalue()


def test_the_report_tells_rewards_terms_versions_and_counters(terminal: Terminal) -> None:
    told = shown(report())
    assert told.splitlines()[:2] == [
        "8 labels (2 revised, 1 held out), mean reward 0.123", "rewards at 0, 25, 50, 75, 100 %: -1.000  0.000  0.250  0.500  1.000",
    ]  # fmt: skip
    assert cells(told, of="kept") == ["kept", "3", "0.125", "62.5%", "early 4, late 1"]
    assert cells(told, of="mute") == ["mute", "0", "", "100.0%", "off 8"]
    assert cells(told, of="v" * 12) == ["v" * 12, "8", "no_consent 3, trainable 5"]
    assert cells(told, of="d" * 12) == ["d" * 12, "8"]
    assert cells(told, of="late  ") == ["late", "4"]
    assert told.index("neutral") < told.index("satisfied")
    bare = shown(report(reward_mean=None, reward_quantiles=()))
    assert bare.splitlines()[0] == "8 labels (2 revised, 1 held out)"
    assert "rewards at" not in bare
    empty = json.loads(terminal.said("labels", "report", POLICY, "--json"))
    assert (empty["labels"], empty["abstention_shares"]) == (0, {})
    assert isinstance(terminal.refused("labels", "report", "none"), UnknownPolicy)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("sample", POLICY), f"no follow-up of {POLICY} is labelled yet"),
        (("reviewed", POLICY), f"nobody has read a follow-up of {POLICY} yet"), (("distil", POLICY), "no judge is configured"),
    ],
)  # fmt: skip
def test_where_there_is_nothing_to_read_no_file_is_written(terminal: Terminal, tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    ran = terminal("labels", *words, "--out", str(tmp_path / "out"))
    assert (ran.exit_code, said in ran.output, (tmp_path / "out").exists()) == (1, True, False)
    assert terminal("labels", words[0], POLICY).exit_code == 2
    if words[0] != "reviewed":
        assert terminal("labels", *words, "--out", str(tmp_path / "out"), "--count", "0").exit_code == 2
    if words[0] != "distil":
        assert isinstance(terminal.refused("labels", words[0], "none", "--out", str(tmp_path / "out")), UnknownPolicy)


def replayed(**changes: Any) -> Replay:
    mover = Mover(
        inference_id="turn-1", segment="task=edit", before=0.5, after=-0.25, paid_before={}, paid_after={"kept": 0.125, "said": -1}
    )
    kept = Shift(spoke_before=1, mean_before=0.5, spoke_after=2, mean_after=0.75)
    usual: dict[str, Any] = {
        "turns": 10, "changed": 4, "before": (0.0, 0.1, 0.2, 0.3, 0.4), "after": (-1.0, 0.0, 0.0, 0.0, 1.0),
        "segments": {"task=edit": (6, 0.5, 0.25), "": (4, 0.0, 1.0)}, "terms": {"kept": kept},
        "movers": (mover,), "excluded": {},
    }  # fmt: skip
    return Replay(**usual | changes)


def test_a_replay_shows_what_would_be_paid_beside_what_was(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    _show_replay(replayed())
    told = capsys.readouterr().out
    assert told.splitlines()[0] == "10 turns, 4 change; excluded: none"
    assert cells(told, of="as labelled") == ["as labelled", "0.000", "0.100", "0.200", "0.300", "0.400"]
    assert cells(told, of="replayed  ") == ["replayed", "-1.000", "0.000", "0.000", "0.000", "1.000"]
    assert cells(told, of="(none)") == ["(none)", "4", "0.000", "1.000"]
    assert cells(told, of="task=edit") == ["task=edit", "6", "0.500", "0.250"]
    assert cells(told, of="kept │") == ["kept", "1", "0.500", "2", "0.750"]
    assert cells(told, of="turn-1") == ["turn-1", "task=edit", "0.500", "-0.250", "kept=0.12, said=-1.00"]
    _show_replay(replayed(excluded={"late": 2}))
    assert capsys.readouterr().out.startswith("10 turns, 4 change; excluded: {'late': 2}")


def test_a_replay_is_of_ten_thousand_turns_at_most_unless_it_is_told_and_never_of_none(terminal: Terminal, tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text('name = "mine"\n[[terms]]\nname = "rating"\nweight = 1.0\n')
    words = ("rules", "replay", str(tmp_path / "rules.toml"), "--policy", POLICY)
    assert terminal.said(*words).startswith("0 turns, 0 change")
    for option, codes in (("--limit", {"0": 2, "1": 0, "1000000": 0, "1000001": 2}), ("--movers", {"-1": 2, "0": 0, "1000": 0, "1001": 2})):
        assert {number: terminal(*words, option, number).exit_code for number in codes} == codes
    assert isinstance(terminal.refused(*words[:-1], "none"), UnknownPolicy)


@pytest.mark.parametrize(("seconds", "said"), [(3600, "1.0 h"), (86_399, "24.0 h"), (86_400, "1.0 d"), (129_600, "1.5 d")])
def test_a_canary_s_length_is_told_in_hours_below_a_day(seconds: float, said: str) -> None:
    assert _length(seconds) == said


# --- maintenance -----------------------------------------------------------------------------------------------------------------


def test_a_backup_and_a_drill_are_noted_each_for_itself(terminal: Terminal) -> None:
    state = wiring.deployment_state(terminal.settings)
    assert terminal.said("backup", "note", "--detail", "in the vault") == "noted: backup\n"
    assert [name for name, age in state.ages_s().items() if age is not None] == ["backup"]
    assert terminal.said("backup", "note", "--drill") == "noted: drill\n"
    assert {name for name, age in state.ages_s().items() if age is not None and age < 60} == {"backup", "drill"}


def test_contracting_says_how_far_it_is_at_the_beginning_and_each_hundred_thousand(terminal: Terminal) -> None:
    with writing(terminal.engine) as connection:
        connection.execute(insert(compatible_revisions), [{"revision": "0017_a"}, {"revision": "0018_b"}])
    told = terminal("db", "contract")
    assert told.stderr == "the words of 0 turns moved\n"
    assert told.stdout == "code of these revisions can run here no longer: 0017_a, 0018_b\n"


def test_house_is_kept_once_and_a_class_has_its_limit_and_its_oldest_row(terminal: Terminal) -> None:
    assert terminal.said("upkeep", "run") == "nothing was old\n"
    assert terminal.said("upkeep", "run", "--no-retire", "--no-merge") == "nothing was old\n"
    lines = terminal.said("upkeep", "show").splitlines()
    assert "       inbox  kept   30 days  oldest none" in lines
    assert "    segments  kept   90 days  oldest none" in lines
    assert _age(NOON - timedelta(hours=36), NOON) == "1.5 days"
    assert (_age(None, NOON), _limit(Retention(turns_days=None, segments_days=2.5), "turns_days")) == ("none", "for ever")
    assert _limit(Retention(segments_days=2.5), "segments_days") == "2.5 days"


def test_a_second_process_that_keeps_house_is_refused(terminal: Terminal) -> None:
    with wiring.upkeep(terminal.settings, owner="another").office() as lease:
        assert lease is not None
        refused = terminal.refused("upkeep", "run")
        assert isinstance(refused, Refused)
        assert "another process keeps house" in str(refused)


@pytest.mark.parametrize(
    ("line", "id_"), [("turn-1\n", "turn-1"), ("  x \n", "x"), ("12:00 served inference_id=t-2 episode_id=e\n", "t-2"), ("\n", "")]
)
def test_an_acknowledged_id_is_read_of_a_list_or_of_a_log(line: str, id_: str) -> None:
    assert _id(line) == id_


def test_what_was_acknowledged_and_is_not_known_is_printed_and_ends_with_one(terminal: Terminal) -> None:
    lost = terminal("recover", "acknowledged", "-", typed="b\na\n\nb\n")
    assert (lost.exit_code, sorted(lost.stdout.split()), lost.stderr) == (1, ["a", "b"], "2 of 2 acknowledged ids are not known here\n")
    none = terminal("recover", "acknowledged", "-", typed="\n")
    assert (none.exit_code, none.stdout, none.stderr) == (0, "", "0 of 0 acknowledged ids are not known here\n")


def test_recovery_on_one_file_finds_nothing_and_mends_nothing(terminal: Terminal) -> None:
    assert terminal.said("recover", "check", "--no-kafka") == "everything fits together\n"
    release_room(terminal.engine).champion("v2")
    found = terminal("recover", "check", "--no-kafka")
    assert found.exit_code == 1
    assert found.stdout == f"       1  {MISSING} (v2): restore the store of the weights\n"
    assert isinstance(terminal.refused("recover", "check"), Unavailable), "no broker was started here"
    assert terminal.said("recover", "erasures") == "erased 0 people again, and took the words of erased ones out of 0 segments\n"


# --- in and out --------------------------------------------------------------------------------------------------------------------


def test_decisions_go_out_to_a_file_or_to_the_output_and_their_number_beside(terminal: Terminal, tmp_path: Path) -> None:
    bare = terminal("export", "dsjson")
    assert (bare.exit_code, bare.stdout, bare.stderr) == (0, "", "0 decisions\n")
    out = tmp_path / "out.json"
    filed = terminal("export", "dsjson", "--policy", POLICY, "--since", "2026-01-01", "--until", "2026-12-01", "--out", str(out))
    assert (filed.stdout, filed.stderr, out.read_text()) == ("", f"0 decisions in {out}\n", "")
    assert terminal.said("export", "parquet", "--out", str(tmp_path / "folder")) == f"0 turns in {tmp_path / 'folder'}\n"
    for kind in ("dsjson", "parquet"):
        assert isinstance(terminal.refused("export", kind, "--policy", "none", "--out", str(tmp_path / "x")), UnknownPolicy)
    assert not (tmp_path / "x").exists()


@contextmanager
def wheel(tmp_path: Path, name: str, text: str) -> Iterator[Path]:
    file = tmp_path / "data.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, text)
    yield file


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ('[{"id": 1}, {"id": 2}]', [1, 2]), ('[{"id": 1}, {"id": 2}, {"id"', [1, 2]), ("[]", []), ("", []), ("nothing", []),
        ('[{"id": 1, "x": "' + "ü" * (1 << 20) + '"}, {"id": 2}]', [1, 2]),
    ],
)  # fmt: skip
def test_conversations_are_read_one_by_one_as_far_as_the_file_goes(tmp_path: Path, text: str, ids: list[int]) -> None:
    with wheel(tmp_path, "sharegpt/data/part.json", text) as file:
        assert [found["id"] for found in conversations(file)] == ids


@pytest.mark.parametrize("name", ["sharegpt/data/part.txt", "sharegpt/part.json"])
def test_a_wheel_without_the_data_is_refused(tmp_path: Path, name: str) -> None:
    with wheel(tmp_path, name, "[]") as file, pytest.raises(BadConfig, match=r"has no data/\*.json"):
        next(conversations(file))


def test_a_release_that_is_none_is_not_found(terminal: Terminal) -> None:
    assert isinstance(terminal.refused("release", "show", "nobody"), NotFound)
