"""Which functions of a library are tasks: those whose removal its own tests notice, found by running them in a box."""

import pytest

from app.domain.errors import BadInput
from pipelines.rollouts.grading import Grader
from pipelines.rollouts.tasksets.feature_deletion import Source
from pipelines.rollouts.tasksets.survey import survey
from tests.integration.rollouts.practising import BOXES

LIBRARY = Source(name="figures", archive="figures-1.0.tar.gz", sha256="", package="figures/", tests=("tests/",))
CORE = '''
def double(n):
    """Twice n."""
    return 2 * n

def quadruple(n):
    """Four times n."""
    return double(double(n))

def untested(n):
    """Nobody asks."""
    return n

def spoken_of(n):
    """Named in a test that does not run it."""
    return n

def undescribed(n):
    return n
'''
TESTS = """
from figures import core

def test_double():
    assert core.double(2) == 4

def test_both():
    assert core.quadruple(1) == core.double(2)

def test_words():
    assert "spoken_of"

def test_that_fails_anyhow():
    assert core.double(1) == core.undescribed(3)
"""


def test_a_function_is_a_task_where_a_test_passes_with_it_and_fails_without() -> None:
    files = {"figures/__init__.py": "", "figures/core.py": CORE, "tests/__init__.py": "", "tests/test_core.py": TESTS}
    assert list(survey(LIBRARY, files, Grader(boxes=BOXES))) == [
        # what fails anyhow says nothing, and of those that notice the ones that are called so are enough
        {"library": "figures", "file": "figures/core.py", "function": "double", "tests": ["tests/test_core.py::test_double"]},
        {"library": "figures", "file": "figures/core.py", "function": "quadruple", "tests": ["tests/test_core.py::test_both"]},
    ]


def test_a_library_whose_tests_do_not_run_here_is_no_library_without_tasks() -> None:
    tests = "from nowhere import thing\n" + "".join(f"def test_{n}():\n    assert double\n" for n in range(51))
    with pytest.raises(BadInput, match="the tests of figures do not run here"):
        list(survey(LIBRARY, {"figures/core.py": CORE, "tests/test_core.py": tests}, Grader(boxes=BOXES)))
