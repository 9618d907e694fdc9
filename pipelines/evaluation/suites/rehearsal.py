"""The champion's half of a comparison, answered while the update still computes.

    begin (the batch is cut) ──▶ a thread asks the champion ──▶ take (the candidate is there): only the candidate is asked

What an answer says does not depend on the minute, and both halves have the seeds of the comparison; so the verdict is the same, and the
candidate waits half as long for it. Nothing is written down before the comparison is whole: what a kill, a held update or another champion
leaves behind is forgotten, and both are asked together as without it.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from app.domain.errors import RatchetError
from pipelines.evaluation.suites.asking import Scores
from pipelines.evaluation.suites.blind import Hearing

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Half:
    """One version's answers."""

    scores: dict[str, Scores]
    """By suite."""
    hearing: Hearing
    """What it said."""


class Rehearsal:
    """One for each policy; a new one lets go of the one before."""

    def __init__(self) -> None:
        self._begun: dict[str, tuple[str, Future[Half]]] = {}

    def begin(self, policy: str, comparison: str, ask: Callable[[], Half]) -> None:
        """Ask on a thread of its own; harmless when this comparison's answers are under way."""
        if self._begun.get(policy, ("", None))[0] == comparison:
            return
        half: Future[Half] = Future()
        self._begun[policy] = comparison, half

        def run() -> None:
            try:
                half.set_result(ask())
            except Exception as error:  # noqa: BLE001 - whoever takes it hears of it
                half.set_exception(error)

        threading.Thread(target=run, name=f"rehearsal-{policy}", daemon=True).start()

    def take(self, policy: str, comparison: str) -> Half | None:
        """The answers, waited for; None where this comparison was not begun here or failed."""
        begun, half = self._begun.pop(policy, ("", None))
        if half is None or begun != comparison:
            return None
        try:
            return half.result()
        except (RatchetError, ValueError) as error:
            log.info("event=rehearsal_failed policy=%s: %s; both versions are asked together", policy, error)
            return None
