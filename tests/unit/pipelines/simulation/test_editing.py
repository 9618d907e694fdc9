"""What developers keep of an answer."""

import pytest

from pipelines.simulation.editing import Taste, code_of, keep, running_code

PROMPT = 'def add(x: int, y: int):\n    """Add two numbers."""'
STRICT = Taste(docstrings=False, comments=False, prints=False, prose=False)
EASY = Taste(docstrings=True, comments=True, prints=True, prose=False)


def test_a_whole_definition_is_kept_as_it_is() -> None:
    answer = "def add(x, y):\n    return x + y"
    assert keep(answer, prompt=PROMPT, taste=STRICT) == answer


def test_a_body_that_continues_the_file_is_kept() -> None:
    assert keep("    return x + y", prompt=PROMPT, taste=STRICT) == "    return x + y"


def test_fenced_code_is_taken_out_of_the_prose() -> None:
    answer = "Sure! Here it is:\n```python\ndef add(x, y):\n    return x + y\n```\nHope this helps."
    assert keep(answer, prompt=PROMPT, taste=STRICT) == "def add(x, y):\n    return x + y"


def test_prose_before_code_without_a_fence_is_thrown_away() -> None:
    assert code_of("Here you go\ndef add(x, y):\n    return x + y") == "def add(x, y):\n    return x + y"


@pytest.mark.parametrize("answer", ["", "I cannot do that.", "def add(x, y:\n    return", "def add(x, y):\n    pass", "x +"])
def test_what_does_not_run_or_does_nothing_is_reverted(answer: str) -> None:
    assert keep(answer, prompt=PROMPT, taste=EASY) == ""


def test_a_cut_off_last_line_is_dropped_and_the_rest_kept() -> None:
    assert running_code("def add(x, y):\n    z = x + y\n    return (z", prompt=PROMPT) == "def add(x, y):\n    z = x + y"


def test_people_differ_in_what_they_delete() -> None:
    answer = 'def add(x, y):\n    """Add."""\n    # add them\n    print(x)\n    return x + y'
    assert keep(answer, prompt=PROMPT, taste=EASY) == answer
    assert keep(answer, prompt=PROMPT, taste=STRICT) == "def add(x, y):\n    return x + y"


def test_somebody_who_likes_prose_keeps_it_around_code_that_runs() -> None:
    answer = "Sure:\n```python\ndef add(x, y):\n    return x + y\n```"
    assert keep(answer, prompt=PROMPT, taste=Taste(docstrings=True, comments=True, prints=True, prose=True)) == answer
