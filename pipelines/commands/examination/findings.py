"""What a look at an assumption comes to, and the looking: one check that breaks never hides the others."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from app.domain.errors import RatchetError

log = logging.getLogger(__name__)


class State(StrEnum):
    """How an assumption is."""

    OK = "ok"
    WARN = "warn"
    """It works, and something that people count on is not so."""
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One assumption."""

    check: str
    state: State
    says: str
    cure: str = ""

    def line(self) -> str:
        """For a terminal."""
        return f"{self.state.value:<4}  {self.check:<12}  {self.says}" + (f"\n      {'':<12}  cure: {self.cure}" if self.cure else "")

    def row(self) -> dict[str, str]:
        """For a machine."""
        return {name: str(value) for name, value in asdict(self).items()}


Check = Callable[[], Iterable[Finding]]


def ok(check: str, says: str) -> Finding:
    """As assumed."""
    return Finding(check=check, state=State.OK, says=says)


def warn(check: str, says: str, cure: str) -> Finding:
    """Less than people count on."""
    return Finding(check=check, state=State.WARN, says=says, cure=cure)


def fail(check: str, says: str, cure: str = "") -> Finding:
    """Not as assumed; our own errors carry their cure in the sentence."""
    return Finding(check=check, state=State.FAIL, says=says, cure=cure)


def look(checks: Sequence[tuple[str, Check]]) -> list[Finding]:
    """Every check, in order."""
    return [finding for name, check in checks for finding in _looked(name, check)]


def _looked(name: str, check: Check) -> list[Finding]:
    try:
        return list(check())
    except RatchetError as error:
        return [fail(name, str(error))]
    except Exception as error:  # a bug in one check is a finding: whoever asks in a bad hour needs the others
        log.exception("check failed name=%s", name)
        return [fail(name, f"the check itself broke ({type(error).__name__}: {error})", "report it; the traceback is in the log")]


def worst(findings: Sequence[Finding]) -> State:
    """The worst of them."""
    return max((finding.state for finding in findings), key=list(State).index, default=State.OK)
