"""Tasksets and what is held of them, the harness's search of another policy, how far versions lie apart; and models, listed and cleared."""

import json
import os
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from app import wiring
from app.domain.errors import BadConfig, BadInput, UnknownPolicy
from app.domain.release.versions import Version
from app.policy.tiny import write_tiny
from pipelines.commands.env import NEVER, Place, _workplace, own_name
from pipelines.config import loop_config
from pipelines.rollouts.check import Checked
from pipelines.rollouts.dispatch import Kept
from pipelines.rollouts.searching import Search
from tests.fakes.releases import POLICY, release_room, version
from tests.unit.pipelines.commands.terminal.at_a_terminal import CONFIG, Terminal, cells

FUNCTIONS = "small-functions"


def place(terminal: Terminal, **rollouts: object) -> Place:
    return Place(terminal.settings, loop_config({"rollouts": rollouts}))


def hold(terminal: Terminal, **held: str) -> None:
    place(terminal).held.write(Checked(taskset=FUNCTIONS, tasks=24, held=held))


# --- tasks -----------------------------------------------------------------------------------------------------------------------


def test_tasksets_are_listed_with_how_many_are_held_once_somebody_checked(terminal: Terminal) -> None:
    assert cells(terminal.said("env", "list"), of=FUNCTIONS) == [FUNCTIONS, "24", "0", "no"]
    hold(terminal)
    assert cells(terminal.said("env", "list"), of=FUNCTIONS) == [FUNCTIONS, "24", "0", "yes"]
    hold(terminal, add="a hack passes")
    assert cells(terminal.said("env", "list"), of=FUNCTIONS) == [FUNCTIONS, "24", "1", "yes"]
    assert (terminal.folder / "rollouts" / "held.json").is_file()


def test_the_tasks_of_a_taskset_are_listed_with_their_tests_and_why_one_is_held(terminal: Terminal) -> None:
    hold(terminal, add="a hack passes")
    told = terminal.said("env", "list", FUNCTIONS)
    key, digest, tests, why = cells(told, of="a hack passes")
    tasks = place(terminal).tasks(FUNCTIONS)
    assert (key, digest, tests, why) == ("add", tasks["add"].hash[:12], str(len(tasks["add"].expected)), "a hack passes")
    assert len([line for line in told.splitlines() if line.startswith("│")]) == 24
    assert isinstance(terminal.refused("env", "list", "nothing:at_all"), BadInput)


def test_a_task_is_found_by_its_key_and_a_taskset_by_what_it_calls_itself(terminal: Terminal) -> None:
    here = place(terminal)
    assert here.one(FUNCTIONS, "add").key == "add"
    with pytest.raises(BadInput, match=f"{FUNCTIONS} has no task 'nothing': `ratchet env list {FUNCTIONS}` lists them"):
        here.one(FUNCTIONS, "nothing")
    assert own_name(here.tasks(FUNCTIONS)) == FUNCTIONS
    assert [*here.practised([FUNCTIONS])] == [FUNCTIONS]
    with pytest.raises(BadInput, match=f"two of the tasksets {FUNCTIONS}, {FUNCTIONS} are called '{FUNCTIONS}'"):
        here.practised([FUNCTIONS, FUNCTIONS])


def test_a_search_is_another_policy_s_and_as_it_is_configured(terminal: Terminal) -> None:
    assert place(terminal).search(POLICY) is None
    assert place(terminal).harness().search_model is None
    configured = place(terminal, search_policy=POLICY, search_budget_s=3.0, search_latency_weight=0.5)
    assert configured.search("composer") == Search(policy=POLICY, budget_s=3.0, weight=0.5)
    assert configured.harness().search_model == POLICY
    with pytest.raises(BadConfig, match=f"rollouts.search_policy is {POLICY}, which is practised"):
        configured.search(POLICY)
    with pytest.raises(UnknownPolicy):
        place(terminal, search_policy="nobody").search(POLICY)


def test_graders_of_a_cluster_need_its_address(terminal: Terminal) -> None:
    assert place(terminal).grader().boxes is not None
    with pytest.raises(BadConfig, match="RATCHET_SANDBOX_URL is unset"):
        place(terminal, sandbox="ray").grader()


def test_versions_lie_as_far_apart_as_there_are_updates_between_them(terminal: Terminal) -> None:
    book = wiring.version_book(terminal.settings)
    line: list[Version] = [version("v1"), replace(version("v2"), parent="v1"), replace(version("v3"), parent="v2"), version("other")]
    for one in line:
        book.add(one)
    kept = Kept(terminal.folder / "rollouts")
    work = _workplace(place(terminal, staleness=3, ahead=2), POLICY, "http://here", None, kept, permits=None)
    assert [work.lag("v1", "v1"), work.lag("v1", "v2"), work.lag("v1", "v3")] == [0, 1, 2]
    assert (work.lag("v1", "other"), work.lag("v3", "v1")) == (NEVER, NEVER)
    assert (work.staleness, work.ahead, work.search) == (3, 2, None)
    release_room(terminal.engine)
    assert work.champion() == "v1"
    with pytest.raises(UnknownPolicy):
        _workplace(place(terminal), "nobody", "http://here", None, kept, permits=None)


@pytest.mark.parametrize("words", [("run", "--groups", "0"), ("try", FUNCTIONS), ("check",)])
def test_practice_of_no_group_or_no_task_is_no_command(terminal: Terminal, words: tuple[str, ...]) -> None:
    assert terminal("env", *words).exit_code == 2


# --- suites ----------------------------------------------------------------------------------------------------------------------


def test_a_suite_is_not_cut_from_nothing_nor_for_nobody(terminal: Terminal, tmp_path: Path) -> None:
    assert "no turn of a held-out person of tab" in str(terminal.refused("suite", "build", POLICY, "--out", str(tmp_path / "s.jsonl")))
    assert not (tmp_path / "s.jsonl").exists()
    assert isinstance(terminal.refused("suite", "build", "nobody", "--out", str(tmp_path / "s.jsonl")), UnknownPolicy)


def test_a_suite_is_listed_with_its_margin_and_its_samples(terminal: Terminal) -> None:
    suite = '[[offline.suites]]\nname = "mine"\nsource = "mine.jsonl"\nsamples = 3\nmargin = 0.025\n'
    (terminal.folder / "ratchet.toml").write_text(CONFIG + suite)
    task = '{"id": "1", "messages": [], "grader": {"kind": "similar", "expected": "yes"}}\n'
    (terminal.folder / "mine.jsonl").write_text(task + task.replace('"1"', '"2"'))
    row = cells(terminal.said("suite", "list"), of="mine.jsonl")
    assert (row[0], row[2:6]) == ("mine", ["mine.jsonl", "2", "3", "0.025"])
    assert len(row[6]) == 12
    assert terminal.said("suite", "probe", POLICY) == "none of 2 tasks has its solution in 0 answers that were trained on\n"
    release_room(terminal.engine)
    assert "no suite has a sealed split" in str(terminal.refused("suite", "sealed", POLICY))


# --- models ----------------------------------------------------------------------------------------------------------------------


def test_models_are_listed_with_twelve_digits_and_their_size_in_mebibytes(terminal: Terminal, tmp_path: Path) -> None:
    for name, mebibytes in (("b", 1), ("a", 1536)):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "READY").write_text(f"{name * 64}\n")
        with (tmp_path / "models" / name / "model.safetensors").open("wb") as file:
            file.truncate(mebibytes << 20)
    (tmp_path / "models" / "half").mkdir()
    assert terminal.said("model", "list", "--folder", str(tmp_path / "models")).splitlines() == [
        f"{'a' * 12}    1536.0 MB  {tmp_path}/models/a", f"{'b' * 12}       1.0 MB  {tmp_path}/models/b",
    ]  # fmt: skip
    assert isinstance(terminal.refused("model", "list", "--folder", str(tmp_path / "none")), BadConfig)


@pytest.mark.parametrize(("hours", "gone"), [(23.9, False), (24.1, True)])
def test_weights_that_nobody_needs_go_when_they_are_a_day_old(terminal: Terminal, tmp_path: Path, hours: float, gone: bool) -> None:
    settings = terminal.settings
    write_tiny(tmp_path / "snapshot")
    digest = wiring.open_weights(settings).publish(tmp_path / "snapshot")
    wiring.version_book(settings).add(replace(version(digest), created_at=datetime(2020, 1, 1, tzinfo=UTC)))
    for number in range(5):
        wiring.version_book(settings).add(replace(version(str(number) * 64), created_at=datetime(2021, 1, 1 + number, tzinfo=UTC)))
    then = time.time() - hours * 3600
    os.utime(settings.data / "weights" / digest / "READY", (then, then))
    shown = terminal.said("model", "prune", "--keep", "5", "--dry-run").splitlines()
    assert shown == [*([f"would remove {digest[:12]}"] if gone else []), f"{int(gone)} of 1 versions in {settings.weights}"]
    assert wiring.open_weights(settings).exists(digest)
    done = terminal.said("model", "prune", "--keep", "5").splitlines()
    assert done == [*([f"removed {digest[:12]}"] if gone else []), f"{int(gone)} of 1 versions in {settings.weights}"]
    assert wiring.open_weights(settings).exists(digest) is not gone
    assert terminal("model", "prune", "--keep", "0").exit_code == 2
    assert terminal("model", "prune", "--older-than-h", "-1").exit_code == 2


@pytest.mark.parametrize("words", [("--seconds", "0.9"), ("--tokens", "0")])
def test_a_head_is_not_trained_for_no_time_on_nothing_or_for_nobody(terminal: Terminal, words: tuple[str, str]) -> None:
    assert terminal("model", "draft", "--policy", POLICY, *words).exit_code == 2
    assert isinstance(terminal.refused("model", "draft", "--policy", "nobody"), UnknownPolicy)


def test_what_is_held_is_kept_as_json_that_people_read(terminal: Terminal) -> None:
    hold(terminal, add="a hack passes")
    assert json.loads((terminal.folder / "rollouts" / "held.json").read_text()) == {FUNCTIONS: {"add": "a hack passes"}}
