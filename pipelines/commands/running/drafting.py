"""Trains the draft head of each new champion beside the loop, where `[drafting] after_answers` says so.

    a champion without a record of a head, that answered enough, no cycle runs ──▶ `ratchet model draft`, a child at the lowest priority
    a cycle begins, the process is told to stop, or another one took over       ──▶ the child ends; when the cycle is over it begins anew

A head changes no answer, so nothing waits for one and nothing breaks where none comes. One process of a deployment trains at a time.
"""

import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import IO

from app import wiring
from app.domain.ports import CycleBook
from app.policy.storage.heads import read_record
from app.settings import Settings
from pipelines.supervisor import die_with_parent
from pipelines.training.drafting import DraftingConfig

log = logging.getLogger(__name__)

DUE_EVERY_S = 60.0
"""How often the loop asks whether a champion has no head."""
LOOK_EVERY_S = 1.0
"""How often, while one is trained, whether to go on."""
REST_S = 3600.0
"""After a training that broke, until the next of the same version."""
GRACE_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """What is asked of a deployment to know whether a head is due, and how one is made."""

    policies: Collection[str]
    champion: Callable[[str], str]
    """Digest of a policy's."""
    has_record: Callable[[str], bool]
    """Whether a head was trained for a version, kept or not."""
    answers: Callable[[str, str], int]
    """How many answers of its own a policy's version has, counted up to `after_answers`."""
    after_answers: int
    is_busy: Callable[[], bool]
    """Whether a cycle of any policy runs."""
    term: Callable[[], AbstractContextManager[Callable[[], None] | None]]
    """The right to train, as what renews it; None while another process has it."""
    command: Callable[[str], list[str]]
    """That trains for a policy, and ends."""
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    look_every_s: float = LOOK_EVERY_S
    rests: dict[str, float] = field(default_factory=dict[str, float])
    """By digest, until when (monotonic seconds) nothing is tried for it."""

    def once(self, stop: threading.Event) -> None:
        """Train what is due, one policy after the other. Raises `LeaseLost` where another process took over."""
        for policy in self.policies:
            if stop.is_set():
                return
            if (digest := self._due(policy)) is not None:
                with self.term() as renew:
                    if renew is not None and not self.has_record(digest):  # another process may just have ended
                        self._train(policy, digest, renew, stop)

    def _due(self, policy: str) -> str | None:
        """The champion that has no head, and is to have one now."""
        if self.is_busy():
            return None
        digest = self.champion(policy)
        if time.monotonic() < self.rests.get(digest, 0.0) or self.has_record(digest):
            return None
        return digest if self.answers(policy, digest) >= self.after_answers else None

    def _train(self, policy: str, digest: str, renew: Callable[[], None], stop: threading.Event) -> None:
        log.info("event=draft_head_begins policy=%s digest=%s", policy, digest[:12])
        with tempfile.TemporaryFile() as told, running(self.command(policy), environment=self.environment, told=told) as child:
            while child.poll() is None:
                if stop.wait(self.look_every_s):
                    return
                if self.is_busy():
                    log.info("event=draft_head_waits policy=%s digest=%s reason=a_cycle_began", policy, digest[:12])
                    return
                renew()
            if child.returncode != 0:
                told.seek(0)
                lines = told.read().decode(errors="replace").strip().splitlines() or [f"exit code {child.returncode}"]
                self.rests[digest] = time.monotonic() + REST_S
                log.warning("event=draft_head_failed policy=%s digest=%s error=%s", policy, digest[:12], lines[-1])


@contextmanager
def running(command: list[str], *, environment: Mapping[str, str], told: IO[bytes]) -> Generator["subprocess.Popen[bytes]"]:
    """A child at the lowest priority, ended with the block and with this process."""
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=told, stderr=told, env=dict(environment), preexec_fn=_last_in_line,
    )  # fmt: skip
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def drafting_beside(settings: Settings, policies: Collection[str], cycles: CycleBook, *, config: DraftingConfig, owner: str) -> Drafting:
    """Over the deployment's own books."""
    weights, pointers = wiring.open_weights(settings), wiring.release_ledger(settings)
    return Drafting(
        policies=policies, champion=lambda policy: pointers.pointer(policy).digest,
        has_record=lambda digest: read_record(weights, digest) is not None,
        answers=wiring.own_answers_counted(settings, at_most=config.after_answers), after_answers=config.after_answers,
        is_busy=lambda: any(cycles.running(policy) is not None for policy in policies),
        term=wiring.drafting_term(settings, owner=owner),
        command=lambda policy: [sys.executable, "-m", "pipelines", "model", "draft", "--policy", policy],
    )  # fmt: skip


def _last_in_line() -> None:
    """In the child: whatever else wants a processor has it first, and nothing outlives its parent."""
    os.nice(19)
    die_with_parent()
