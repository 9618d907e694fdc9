"""Rule sets that people proposed: put in force where they can be scored by, refused with the reason where not."""

import logging
from collections.abc import Callable
from datetime import datetime
from typing import Protocol

from app.domain.learning.rule_sets import Proposal
from app.domain.ports import Clock
from pipelines.labelling.rule_set import RuleSet, refusal

log = logging.getLogger(__name__)


class Proposals(Protocol):
    """Where they are kept. What another labeller settled meanwhile is not settled again (False)."""

    def waiting(self, policy: str) -> list[Proposal]: ...
    def accept(self, proposal: Proposal, *, digest: str, name: str, now: datetime) -> bool: ...
    def refuse(self, proposal: Proposal, *, why: str, now: datetime) -> bool: ...


def settle(book: Proposals, *, policy: str, read: Callable[[str], RuleSet], clock: Clock) -> None:
    """Settle what waits, oldest first. `read` is how this labeller reads a rule set; what it raises is why one is refused."""
    for proposal in book.waiting(policy):
        try:
            rule_set = read(proposal.toml)
        except Exception as error:  # noqa: BLE001 - a term's own code may raise anything, and one labeller serves all policies
            why = refusal(error)
            if book.refuse(proposal, why=why, now=clock()):
                log.warning("event=rules_refused policy=%s proposal=%s by=%s why=%s", policy, proposal.id, proposal.proposed_by, why)
        else:
            if book.accept(proposal, digest=rule_set.digest, name=rule_set.config.name, now=clock()):
                log.info("event=rules_in_force policy=%s digest=%s by=%s", policy, rule_set.digest[:12], proposal.proposed_by)
