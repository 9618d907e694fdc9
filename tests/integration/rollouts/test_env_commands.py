"""`ratchet env list`, `check`, `try` and `run`, and the page that says how to bring a taskset and a harness of one's own."""

import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner
from sqlalchemy import Engine

from app.domain.errors import BadInput, Refused
from pipelines.__main__ import ratchet
from pipelines.commands.env import here
from pipelines.rollouts.check import validity
from pipelines.rollouts.grading import Grader
from pipelines.rollouts.tasks import checked
from pipelines.rollouts.tasksets import find_taskset
from tests.architecture.sources import ROOT
from tests.integration.rollouts.practising import BOXES, Practice

MODULE = """
from pipelines.rollouts.tasksets.small_functions import SmallFunctions
class Cheated(SmallFunctions):
    def load(self):
        from dataclasses import replace
        return [replace(task, hacks={"the answer": task.gold}) for task in super().load()[:1]]
class Mine(SmallFunctions):
    def load(self):
        from dataclasses import replace
        return [replace(task, taskset="mine") for task in super().load()[:1]]
class None_:
    name = "none"
    def load(self):
        return []
"""


@pytest.fixture
def deployment(tmp_path: Path, sqlite_url: str, monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> Path:
    """A folder with a configuration, and a taskset of one's own on the path."""
    (tmp_path / "ours_tasks.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    config = tmp_path / "ratchet.toml"
    config.write_text(
        f'[policies.composer]\nmodel = "{tiny_model}"\nbase_name = "t"\nbase_model = "T"\n[rollouts]\ngroup_size = 2\nslots = 2\n'
    )
    monkeypatch.setenv("RATCHET_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("RATCHET_CONFIG", str(config))
    monkeypatch.setenv("RATCHET_DATABASE_URL", sqlite_url)
    return tmp_path


def said(*words: str) -> str:
    """What a subcommand printed. Raises what it raises."""
    done = CliRunner().invoke(ratchet, ["env", *words], catch_exceptions=False, standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return done.output


def test_tasks_are_listed_checked_and_held(deployment: Path) -> None:
    assert re.search(r"small-functions +│ 24 +│ 0 +│ no", said("list"))
    assert "add: sound" in said("check", "small-functions", "--task", "add")
    assert re.search(r"small-functions +│ 24 +│ 0 +│ yes", said("list"))
    with pytest.raises(Refused, match=r"1 of ours_tasks:Cheated are held.*the hack 'the answer' is graded passed"):
        said("check", "ours_tasks:Cheated")
    assert "the hack 'the answer'" in re.sub(r"\s*│\s*\n[│ ]+", " ", said("list", "ours_tasks:Cheated"))
    for words, sentence in (
        (("check", "ours_tasks:None_"), "no tasks"), (("check", "ours_tasks:Nobody"), "no taskset is named"),
        (("try", "small-functions", "nothing"), "lists them"),
    ):  # fmt: skip
        with pytest.raises(BadInput, match=sentence):
            said(*words)
    assert "sound: gold passes, nothing else does" in said("try", "small-functions", "add", "--gold")


def test_one_is_tried_and_many_are_run(deployment: Path, sqlite_engine: Engine) -> None:
    practice = Practice(sqlite_engine, deployment, lambda request: "```python\ndef add(a, b):\n    return a + b\n```")
    try:
        shown = said("try", "small-functions", "add", "--url", practice.url)
        assert "def add(a, b)" in shown
        assert "solved, reward 1.0, 1 turns" in shown
        ended = said("run", "small-functions", "--groups", "2", "--url", practice.url)
        assert sum(int(number) for number in re.findall(r"(\d+) (?:solved|failed)", ended)) == 4
        assert len(practice.book.history("composer", "small-functions")) == 4
        assert said("run", "ours_tasks:Mine", "--groups", "1", "--url", practice.url).splitlines()[-1] == "2 solved", "under its own name"
        assert {row.task for row in practice.book.history("composer", "mine")} == {"add"}
        with pytest.raises(BadInput, match="two of the tasksets ours_tasks:Mine, ours_tasks:Mine are called 'mine'"):
            here().practised(["ours_tasks:Mine", "ours_tasks:Mine"])
    finally:
        practice.close()


def test_the_page_s_taskset_and_harness_work_as_they_stand_there(sqlite_engine: Engine, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "rollouts.md").read_text()
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert code is not None
    module = ModuleType("acme_tasks")
    exec(code.group(1), module.__dict__)
    lines = [line for line in code.group(1).splitlines() if line.strip()]
    assert len(lines) <= 24, "twenty lines and their imports"
    task = replace(checked(module.__dict__["Greetings"]().load())[0], deadline_s=60.0)
    assert validity(task, Grader(boxes=BOXES)) is None
    harness: Any = module.__dict__["OneAnswer"]()
    practice = Practice(sqlite_engine, tmp_path, lambda request: "def hello(name):\n    return f'Hello, {name}!'\n", harness=harness)
    try:
        assert practice.dispatch(task, config={"group_size": 2}).run(groups=1) == {"solved": 2}
    finally:
        practice.close()


def test_a_shipped_taskset_is_found_by_its_name() -> None:
    assert [find_taskset(name, sources=Path(), boxes=BOXES).name for name in ("small-functions", "feature-deletion")] == [
        "small-functions",
        "feature-deletion",
    ]
