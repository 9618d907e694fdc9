"""Graders: an answer becomes a score in [0, 1], or an error that makes the suite inconclusive, never a zero by accident."""

import ast
import difflib
import json
import re
from collections.abc import Callable

import jsonschema

from pipelines.evaluation.suites.execution import Examination, Outcome
from pipelines.evaluation.suites.suites import Grader, GraderKind

JudgeModel = Callable[[str], str]
"""Asks a judge model one question and returns its answer; see `pipelines.evaluation.suites.judge_model`."""

_SCALE = re.compile(r"\b0\s*(?:to|-|–|\.\.)\s*10\b|(?:/|\bout of)\s*10\b", re.IGNORECASE)
"""What a judge says of the scale and not of the answer."""
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?!\w)")
_SCORES = frozenset(map(str, range(11)))
FENCE = re.compile(r"```[a-zA-Z]*\n(.*?)(?:```|\Z)", re.DOTALL)


def code_of(answer: str) -> str:
    """The code in an answer: what is inside the first fence, else the whole answer."""
    fenced = FENCE.search(answer)
    return fenced.group(1) if fenced else answer


def program(prefix: str, answer: str) -> str:
    """The file as it stands with the answer in it: a whole rewrite replaces the prefix, a body continues it."""
    code = code_of(answer)
    signature = next((line for line in prefix.splitlines() if line.startswith("def ")), None)
    if signature is not None and signature.split("(")[0] in code:
        imports = [line for line in prefix.splitlines() if line.startswith(("import ", "from "))]
        return "\n".join([*imports, code])
    return prefix + code


def parses(source: str) -> bool:
    """Whether the text is a Python program."""
    try:
        ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def grade(grader: Grader, answer: str, *, examination: Examination, judge: JudgeModel | None) -> float:
    """Score one answer. Raises `ValueError` when the grader itself cannot work (no judge configured, a bad pattern), and whatever an
    `Examination` raises that is not the answer's fault."""
    match grader.kind:
        case GraderKind.EXECUTE:
            source = program(grader.prefix, answer)
            return float(parses(source) and _executed(grader, source, examination) is Outcome.PASSED)
        case GraderKind.PARSES:
            return float(bool(code_of(answer).strip()) and parses(program(grader.prefix, answer)))
        case GraderKind.EXACT:
            return float(answer.strip() == grader.expected.strip())
        case GraderKind.REGEX:
            return float(_found(grader.pattern, answer))
        case GraderKind.JSON_SCHEMA:
            return _satisfies(grader, answer)
        case GraderKind.SIMILAR:
            return difflib.SequenceMatcher(None, code_of(answer).split(), grader.expected.split(), autojunk=False).ratio()
        case GraderKind.SHORT:
            return min(max(2.0 - len(answer.split()) / max(grader.tokens, 1), 0.0), 1.0)
        case GraderKind.ANSWERS:
            return float(bool(answer.strip()) and not answer.strip().endswith("?"))
        case GraderKind.JUDGE:
            return _judged(grader, answer, judge)


def _executed(grader: Grader, source: str, examination: Examination) -> Outcome:
    return examination.run(prefix=grader.prefix, program=source, tests=grader.tests).outcome


def _found(pattern: str, answer: str) -> bool:
    try:
        return re.search(pattern, answer, re.DOTALL) is not None
    except re.error as error:
        raise ValueError(f"the pattern {pattern!r} is no regular expression: {error}") from error


def _satisfies(grader: Grader, answer: str) -> float:
    try:
        said = json.loads(code_of(answer))
    except (ValueError, RecursionError):  # no JSON, or a number of more digits than Python reads
        return 0.0
    try:
        jsonschema.validate(said, grader.schema)
    except (jsonschema.ValidationError, RecursionError):
        return 0.0
    except Exception as error:  # a reference that leads nowhere, and what else its library says of a schema
        raise ValueError(f"the schema of a task does not work: {str(error).splitlines()[0]}") from error
    return 1.0


def _judged(grader: Grader, answer: str, judge: JudgeModel | None) -> float:
    if judge is None:
        raise ValueError("a task is graded by a judge, but no judge is configured: set offline.judge_url and offline.judge_model")
    said = judge(f"{grader.rubric}\n\nAnswer to be scored:\n{answer}\n\nReply with one whole number from 0 (worst) to 10 (best).")
    numbers = set(_NUMBER.findall(_SCALE.sub(" ", said)))
    if len(numbers) != 1 or not numbers <= _SCORES:
        raise ValueError(f"the judge did not answer with one whole number from 0 to 10: {said[:80]!r}")
    return int(numbers.pop()) / 10
