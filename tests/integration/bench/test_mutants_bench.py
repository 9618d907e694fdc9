"""`make bench-mutants`: what it changes, which tests it asks, and that it believes a test only where the test passes without the mutant."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import coverage
import pytest

from tests.bench import mutants as bench
from tests.bench import mutations
from tests.bench.covering import by_room
from tests.bench.mutating.covering import Covered
from tests.bench.mutating.mutants import Mutant, apply, is_sound, mutants_of, sample
from tests.bench.mutating.reach import Reach
from tests.bench.mutating.readers import AT_MOST, named_in_tests, readers_of
from tests.bench.mutating.trying import Outcome

ROOT = Path(__file__).resolve().parents[3]
SOURCE = '''"""A text: 1 < 2."""

log = None


def kept(a: int, b: "int | None" = 3) -> bool:
    """True at 1."""
    assert a != 7
    log.info("n=%d", 5)
    if not b:
        raise ValueError("none" + str(1))
    store(a)
    return a < b and a + 1 == 2


class Port:
    def kept(self, limit: int = 50) -> int: ...
'''


def test_what_runs_is_changed_and_what_types_documents_asserts_or_logs_is_not() -> None:
    found = {(mutant.line, mutant.after) for mutant in mutants_of("app/x.py", SOURCE)}
    assert found == {
        (6, 'def kept(a: int, b: "int | None" = 4) -> bool:'),
        (10, "if (b):"),
        (12, "pass"),
        (13, "return None"),
        (13, "return (a < b or a + 1 == 2)"),
        (13, "return a <= b and a + 1 == 2"),
        (13, "return a < b and a + 1 != 2"),
        (13, "return a < b and (a - 1) == 2"),
        (13, "return a < b and a + 2 == 2"),
        (13, "return a < b and a + 1 == 3"),
    }


def test_a_mutant_is_put_where_it_was_found_and_refused_where_the_line_has_changed() -> None:
    mutant = Mutant(file="app/x.py", line=12, before="store(a)", after="pass")
    assert apply(mutant, SOURCE).splitlines()[11] == "    pass"
    assert is_sound(mutant, SOURCE)
    with pytest.raises(ValueError, match="sample anew"):
        apply(mutant, SOURCE.replace("store(a)", "store(b)"))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A product of three files with tests for two of them, one of which fails whatever happens."""
    files = {
        "app/db/__init__.py": "", "app/__init__.py": "", "tests/__init__.py": "", "pipelines/__init__.py": "", "docs/a.md": "",
        "app/db/near.py": "def twice(n):\n    return n * 2\n", "app/db/far.py": "from app.db.near import twice\n\nFOUR = twice(2)\n",
        "pipelines/broken.py": "ONE = 1\n", "migrations/__init__.py": "", "infra/__init__.py": "",
        "tests/test_far.py": "from app.db.far import FOUR\n\n\ndef test_four():\n    assert FOUR == 4\n",
        "tests/test_near.py": "from app.db.near import twice\n\n\ndef test_nothing():\n    assert twice\n",
        "tests/test_broken.py": "from pipelines.broken import ONE\n\n\ndef test_never():\n    assert ONE == 5\n\n\n"
        "def test_two():\n    assert ONE < 2\n",
        "pipelines/hang.py": "import time\n\n\ndef wait():\n    n = 0\n    while n != 1:\n        n += 1\n        time.sleep(0.01)\n",
        "tests/test_hang.py": "from pipelines.hang import wait\n\n\ndef test_it_ends():\n    wait()\n",
        "pipelines/ends.py": "import os\n\n\ndef leave(n):\n    if n > 1:\n        os._exit(0)\n",
        "tests/test_ends.py": "from pipelines.ends import leave\n\n\ndef test_it_stays():\n    leave(1)\n",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / name).write_text(text)
    return tmp_path / "source"


def test_tests_are_asked_that_reach_the_module_the_nearest_first(tree: Path) -> None:
    assert Reach(tree).tests_of("app/db/near.py", at_most=9) == ["tests/test_near.py", "tests/test_far.py"]
    assert Reach(tree).tests_of("app/db/far.py", at_most=9) == ["tests/test_far.py"]


def test_a_command_is_asked_about_in_tests_that_say_its_word(tree: Path) -> None:
    command = '@group.command("list")\ndef list_things() -> None:\n    pass\n'
    (tree / "pipelines/commands").mkdir()
    (tree / "pipelines/commands/things.py").write_text(command)
    (tree / "tests/test_terminal.py").write_text('def test_list():\n    assert run("thing", "list")\n')
    assert Reach(tree).tests_of("pipelines/commands/things.py", at_most=9) == ["tests/test_terminal.py"]


def test_every_file_has_its_turn_before_any_has_a_second_one_and_a_seed_says_which(tree: Path) -> None:
    drawn = [mutant.file for mutant in sample(tree, seed=1)]
    files = ["app/db/far.py", "app/db/near.py", "pipelines/broken.py", "pipelines/ends.py", "pipelines/hang.py"]
    assert sorted(drawn[: len(files)]) == files
    assert [mutant.name for mutant in sample(tree, seed=1)] == [mutant.name for mutant in sample(tree, seed=1)]
    assert {mutant.room for mutant in sample(tree, seed=1, room="app/db")} == {"app/db"}


TRY = """
import compileall, json, py_compile, sys
import hypothesis
from pathlib import Path
from functools import partial
from tests.bench.mutating.mutants import Mutant, apply
from tests.bench.mutating.reach import Reach
from tests.bench.mutating import trying
from tests.bench.mutating.trying import Copy

trying.UNKNOWN_S = 10.0
tree, copy = Path(sys.argv[1]), Copy(Path(sys.argv[2]), least_s=4.0)
copy.fill(tree)
if sys.argv[4] == "loaded":
    copy.load()
compileall.compile_dir(copy.root, quiet=1, force=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
tried = [Mutant(**fields) for fields in json.loads(sys.argv[3])]
reach = Reach(tree)
lasting = {"tests/test_hang.py::test_it_ends": 0.01}
found = [copy.attempt(m.file, partial(apply, m), reach.tests_of(m.file, at_most=9), limit_s=300, lasting=lasting) for m in tried]
print("\\n" + json.dumps([[outcome.failed, outcome.undecided] for outcome in found]))
"""


@pytest.mark.parametrize("product", ["loaded", "imported anew"])
def test_a_mutant_is_caught_or_survives_and_a_test_that_fails_without_it_is_asked_no_more(tree: Path, tmp_path: Path, product: str) -> None:
    (tmp_path / "copy").mkdir()
    near: dict[str, Any] = {"file": "app/db/near.py", "line": 2, "before": "return n * 2"}
    tried = [
        near | {"after": "return n * 3"},
        near | {"after": "return (n + 2)"},
        {"file": "pipelines/broken.py", "line": 1, "before": "ONE = 1", "after": "ONE = 2"},
        {"file": "pipelines/broken.py", "line": 1, "before": "ONE = 1", "after": "ONE = 0"},
        {"file": "pipelines/hang.py", "line": 7, "before": "n += 1", "after": "n -= 1"},
        {"file": "pipelines/ends.py", "line": 5, "before": "if n > 1:", "after": "if n >= 1:"},
    ]
    command = [sys.executable, "-c", TRY, str(tree), str(tmp_path / "copy"), json.dumps(tried), product]
    told = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True)
    assert json.loads(told.stdout.splitlines()[-1]) == [
        ["tests/test_far.py::test_four", None],
        [None, None],  # 2 + 2 is 4 as well
        ["tests/test_broken.py::test_two", None],
        [None, None],  # the test that could not pass is no witness
        ["tests/test_hang.py::test_it_ends", None],
        ["tests/test_ends.py::test_it_stays", None],
    ]
    assert (tmp_path / "copy/app/db/near.py").read_text() == (tree / "app/db/near.py").read_text(), "the copy is sound again"


def test_the_tests_that_ran_a_line_are_asked_the_quick_ones_first_and_the_near_ones_sooner(tmp_path: Path) -> None:
    seconds = {
        "far.py::quick": 0.1, "far.py::slow": 20.0, "near.py::slow": 30.0, "far.py::too_slow": 89.0, "far.py::x[postgres]": 0.1,
        "far.py::x[sqlite]": 0.3, "far.py::only[postgres]": 0.1,
    }  # fmt: skip
    (tmp_path / "1-of-1").mkdir()
    data = coverage.CoverageData(str(tmp_path / "1-of-1" / "all"))
    for test in (*seconds, "far.py::failed"):
        data.set_context(test)
        data.add_lines({"/elsewhere/app/db/a.py": [10], "/elsewhere/app/db/b.py": [1]})
    data.set_context("far.py::other")
    data.add_lines({"/elsewhere/app/db/a.py": [20]})
    data.write()
    times = [json.dumps([test, taken / 2]) for test, taken in seconds.items()]
    (tmp_path / "1-of-1" / "durations").write_text("\n".join(times * 2))  # of setting up and of running
    covered = Covered(tmp_path)
    expected = ["far.py::quick", "far.py::x[sqlite]", "far.py::only[postgres]", "near.py::slow", "far.py::slow"]  # 57 of 90 seconds
    assert covered.tests_of(("app/db/a.py", 10), near=["near.py"]) == expected
    assert covered.tests_of(("app/db/a.py", 12), near=["near.py"]) == expected, "a line of the statement that begins at 10"
    assert covered.tests_of(("app/db/a.py", 9), near=["near.py"]) == []
    assert covered.tests_of(("app/db/c.py", 10), near=[]) == []
    assert covered.tests_of(("app/db/c.py", 10), ("app/db/a.py", 20), ("app/db/b.py", 1), near=["near.py"]) == expected
    assert covered.tests_named(["near.py", "far.py::x", "far.py::quic"]) == ["far.py::x[sqlite]", "near.py::slow"]
    assert covered.tests_in(["near.py", "new.py"]) == ["near.py::slow", "new.py"], "a file that was never measured is asked as a whole"


def test_what_is_set_at_import_is_noticed_where_it_is_read(tmp_path: Path) -> None:
    files = {
        "app/a.py": "MOST = 3\n_OWN = 4\nclass Row:\n    width: int = 5\ndef grown(by=1):\n    size = by * MOST\n    return size + _OWN\n",
        "pipelines/b.py": "from app.a import MOST\n_OWN = 1\nprint(Row().width, MOSTLY)\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (constant, private, field, default, body) = (readers_of(tmp_path, "app/a.py", line) for line in (1, 2, 4, 5, 6))
    assert constant == (True, [("app/a.py", 6), ("pipelines/b.py", 1)])
    assert private == (True, [("app/a.py", 7)]), "another module's is another one"
    assert field == (True, [("pipelines/b.py", 3)])
    assert {line for _, line in default[1]} >= {6, 7}
    assert body == (False, [])


def test_what_a_constant_was_made_into_at_import_is_noticed_where_that_is_read(tmp_path: Path) -> None:
    """Nothing of a line that begins a function, or sets a field, runs again: its reader's readers are asked."""
    text = "MOST = 3\nclass Row:\n    width: int = MOST\ndef grown(\n    by: int = MOST,\n) -> int:\n    return by\n"
    for name, said in {"app/a.py": text, "pipelines/b.py": "print(Row().width)\n"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(said)
    assert readers_of(tmp_path, "app/a.py", 1) == (True, [("app/a.py", 3), ("app/a.py", 5), ("pipelines/b.py", 1), ("app/a.py", 7)])


def test_a_constant_is_asked_of_the_tests_that_speak_of_it(tmp_path: Path) -> None:
    tests = (
        "import pytest\nfrom app import a\n@pytest.mark.parametrize('n', [a.MOST])\ndef test_one(n):\n    assert n\n"
        "def test_two():\n    assert a.MOSTLY\nasync def test_three():\n    assert a.MOST == 3\n"
    )
    files = {
        "app/a.py": "MOST = 3\ndef grown(by=1):\n    return by * MOST\n", "tests/test_a.py": tests, "tests/helping.py": "MOST = 1\n",
        "tests/test_b.py": "from app.a import MOST\nROWS = [MOST]\ndef test_rows():\n    assert ROWS\n",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert named_in_tests(tmp_path, "app/a.py", 1) == ["tests/test_a.py::test_one", "tests/test_a.py::test_three", "tests/test_b.py"]
    assert named_in_tests(tmp_path, "app/a.py", 3) == [], "a line of a function is no constant"
    many = "".join(f"def test_{n}():\n    assert MOST\n" for n in range(AT_MOST))
    (tmp_path / "tests" / "test_c.py").write_text(many)
    assert named_in_tests(tmp_path, "app/a.py", 1) == [], "a common word"


def test_files_of_a_room_are_counted_together() -> None:
    counts = {"app/db/a.py": (1, 2), "app/db/sight/b.py": (2, 2), "app/main.py": (0, 5), "pipelines/cycle.py": (3, 3)}
    assert by_room(counts) == {"app": (0, 5), "app/db": (3, 4), "pipelines": (3, 3)}


def test_every_named_mutation_fits_the_source_and_names_tests_that_are_there() -> None:
    found = mutations.mutations()
    assert len({mutation.name for mutation in found}) == len(found) > 50
    for mutation in found:
        assert mutation.planted((ROOT / mutation.file).read_text())
        assert [test for test in mutation.tests if not is_there(*test.partition("::")[::2])] == []


def is_there(file: str, test: str) -> bool:
    return (ROOT / file).is_file() and f"def {test}" in (ROOT / file).read_text()


def test_a_named_mutation_that_no_longer_fits_is_an_error_and_only_a_test_that_is_named_has_caught_one() -> None:
    mutation = mutations.Mutation(name="m", would="w", file="f", old="one", new="two", tests=())
    assert mutation.planted("a one") == "a two"
    for text in ("none", "one one"):
        with pytest.raises(ValueError, match="no longer fits f"):
            mutation.planted(text.replace("none", "nought"))
    told = ["tests/x.py::y", None, "timeout", "exit 3: out of memory", "BROKEN without the mutant too: tests/x.py::y"]
    assert [mutations.is_caught(Outcome(failed=failed, seconds=1.0)) for failed in told] == [True, False, False, False, False]


def test_what_nothing_decided_counts_as_survived_and_what_somebody_read_as_equivalent() -> None:
    rows = [
        {"name": "a", "room": "app/db", "by": "tests/x.py::y", "undecided": None},
        {"name": "b", "room": "app/db", "by": None, "undecided": None},
        {"name": "c", "room": "app/api", "by": None, "undecided": "the time is up"},
        {"name": "d", "room": "app/api", "by": None, "undecided": None},
        {"name": "e", "room": "app/api", "by": None, "undecided": "the time is up"},
    ]
    known = bench.equivalents("# how\n\nd\nnobody sees it\n\ne\nnor this\n")
    found = bench.summary(rows, known)
    assert found == {
        "mutants": 5, "caught": 1, "survived": 2, "equivalent": 2, "undecided": 1, "by_room": {"app/api": [0, 1], "app/db": [1, 2]},
    }  # fmt: skip
    assert not bench.is_enough(found)
    assert bench.is_enough({"caught": 17, "survived": 3})
