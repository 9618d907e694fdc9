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


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("```\nx = 1\n```", "x = 1"), ("```python  \nx = 1", "x = 1"), ("words\nreturn x", "return x"),
        ("if so then\nfor x in y:\n    pass", "for x in y:\n    pass"), ("only words here", ""), ("print(x)", "print(x)"),
        ("```a\none\n```\n```b\ntwo\n```", "one"),
    ],
)  # fmt: skip
def test_code_is_what_stands_in_the_first_fence_or_begins_like_code(answer: str, code: str) -> None:
    assert code_of(answer) == code


@pytest.mark.parametrize(
    ("code", "runs"),
    [
        ("x = 1", "x = 1"), ("pass", ""), ("...", ""), ("1 + 1", ""), ("\n\n", ""),
        ("async def f():\n    return 1", "async def f():\n    return 1"),
        ("def f():\n    pass\ndef g():\n    return 1", "def f():\n    pass\ndef g():\n    return 1"), ("x = 1\n)", "x = 1"),
        ("        return x", "        return x"), ('def f():\n    """Says."""', ""), ("def f():\n    print(1)", ""),
    ],
)  # fmt: skip
def test_what_runs_is_the_longest_beginning_that_does_something(code: str, runs: str) -> None:
    assert running_code(code, prompt=PROMPT) == runs


@pytest.mark.parametrize(
    ("likes", "kept"),
    [
        ("docstrings", 'def f(x):\n    """One.\n\n    Two.\n    """\n    return x'), ("comments", "def f(x):\n    # why\n    return x"),
        ("prints", "def f(x):\n    print(x)\n    return x"),
    ],
)  # fmt: skip
def test_each_taste_keeps_its_own_lines_and_no_others(likes: str, kept: str) -> None:
    answer = 'def f(x):\n    """One.\n\n    Two.\n    """\n    # why\n    print(x)\n    return x'
    taste = Taste(**{name: name == likes for name in ("docstrings", "comments", "prints", "prose")})
    assert keep(answer, prompt=PROMPT, taste=taste) == kept


def test_a_docstring_in_a_body_that_continues_the_file_is_no_docstring_of_a_whole_function() -> None:
    body = '    """Again."""\n    return x + y'
    assert keep(f"```\n{body}\n```", prompt=PROMPT, taste=STRICT) == body


def test_who_likes_prose_keeps_the_answer_but_for_its_end() -> None:
    taste = Taste(docstrings=False, comments=False, prints=False, prose=True)
    assert keep("Sure:\ndef f(x):\n    return x\n\n", prompt=PROMPT, taste=taste) == "Sure:\ndef f(x):\n    return x"
