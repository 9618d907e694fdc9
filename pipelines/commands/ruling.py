"""Which rule sets may be put in force, whoever asks: the labeller for what people proposed, and the command line."""

from app.domain.errors import BadConfig
from app.domain.policies import PolicyConfig
from pipelines.config import LoopConfig
from pipelines.evaluation.config import check
from pipelines.labelling.follow_up.term import Reader
from pipelines.labelling.rule_set import RuleSet, parse_rule_set


def parsed(text: str, *, policy: PolicyConfig, loop: LoopConfig, read: Reader | None = None) -> RuleSet:
    """A rule set by which turns of this policy can be scored. Raises `BadConfig`."""
    return parse_rule_set(text, read=read, signals=policy.signals, allowed=loop.labelling.allowed_terms)


def usable(text: str, *, policy: PolicyConfig, loop: LoopConfig, read: Reader | None = None) -> RuleSet:
    """One that besides pays for practice where batches take it, and leaves the gates something to judge by. Raises `BadConfig`."""
    rule_set = parsed(text, policy=policy, loop=loop, read=read)
    require_practice(rule_set, loop)
    check(loop.gates, rewarded=frozenset(term.name for term, _ in rule_set.terms))
    return rule_set


def require_practice(rule_set: RuleSet, loop: LoopConfig) -> None:
    """Refuse a rule set that pays nothing for practice where batches take practice. Raises `BadConfig`."""
    if loop.batching.rollout_share > 0 and not any(term.name in ("practice", "task_success") for term, _ in rule_set.terms):
        raise BadConfig(
            f"batching.rollout_share is above 0 and the rule set {rule_set.config.name!r} pays nothing for practice: "
            "add the term `practice` to it (`ratchet rules activate`)"
        )
