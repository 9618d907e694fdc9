"""How candidates are judged (`facts/gates.md`, section 5.1): vetted defaults, checked once, hashed into every decision."""

from itertools import pairwise
from typing import Any

import msgspec

from app.domain.errors import BadConfig
from app.domain.release.by_people import PeopleTerms
from app.domain.release.gates import content_hash
from app.domain.release.terms import Terms
from pipelines.evaluation.default_metrics import default_metrics
from pipelines.evaluation.metrics import CLASS_WEIGHTS, NAMED_SOURCES, PLAIN_SOURCES, Good, MetricClass, MetricConfig, Missing

__all__ = [
    "ApprovalConfig", "GatesConfig", "Good", "HealthConfig", "HoldoutConfig", "MetricClass", "MetricConfig", "Missing",
    "OffPolicyGateConfig", "SloConfig", "StageConfig", "check", "terms_of",
]  # fmt: skip

MAX_REQUIRED = 4
"""Every required metric has to be non-inferior, so power falls with each (sheet 3.5)."""


FROM_FILE = "file"
"""`approval.edited_by`: whoever owns the configuration file edited it last."""


class StageConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stage of the ramp. It is done with `units` units, or after `minutes` with at least `least_units`."""

    share: float
    units: int = 500
    minutes: float = 10.0
    least_units: int = 50


class SloConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An absolute limit, because canary and champion can degrade together."""

    source: str
    limit: float
    """Highest tolerated rate of bad turns."""
    threshold: float | None = None


class ApprovalConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who has to say yes (sheet 4.6)."""

    n: int = 1
    n_in_doubt: int = 2
    """Where something gives reason for doubt (`app.release.people`: an alarm, half of the anchor's budget, a rollback before, …)."""
    ttl_s: float = 14_400.0
    high_tier: bool = False
    edited_by: str | None = None
    """`user:<name>` of whoever last edited this table, or `file` for the owner of the configuration file; may not approve under it."""


class HealthConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of G0 (sheet 4.1); a warning is given at half of each."""

    token_kl_max: float | None = None
    """nat per token to the champion, upper end of the estimate's interval; unset: the budget the run was made under
    (`training.guards.max_kl_champion`), so that the trainer never makes what this gate has to refuse."""
    anchor_token_kl_max: float | None = None
    """nat per token to the anchor, likewise (`training.guards.max_kl_anchor`): the budget until a person renews it."""
    response_kl_max: float | None = None
    """nat per response, to the champion, besides; unset: none, because a long answer is not a worse one."""
    anchor_kl_max: float | None = None
    """nat per response, to the anchor, besides."""
    entropy_ratio_min: float = 0.5
    """Entropy over the anchor's."""
    reward_std_ratio_min: float = 0.05
    component_share_max: float = 0.90
    ceiling_rate_max: float = 0.80
    ess_min: float = 0.30
    on_policy_min: float = 0.5
    """Share of the batch sampled by the champion itself."""
    length_z_max: float = 3.0
    perplexity_rise_max: float = 0.05
    """By how much of itself the held-out perplexity of any domain may rise in continued pretraining."""


class OffPolicyGateConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """G2 (sheet 4.3): a veto or a hint, never a pass."""

    margin: float = 0.02
    """On the reward, brought to [0, 1]."""
    alpha: float = 0.01
    low: float = -1.0
    high: float = 1.0
    """Range of the reward; values are cut off there."""
    turns: int = 4000
    """The newest turns of the champion that are scored at most; below 1,000 no estimate is ever informative."""
    replays: int = 16
    """Of them, the oldest ones are scored by the champion too: the check that the engine that scores is the one that sampled."""
    prompt_tokens_max: int = 4096
    """Turns with a longer prompt are left out: the prompt is not the policy's doing, the completion is, so its length never decides."""
    concurrency: int = 8
    budget_s: float = 300.0
    """What is not scored by then is left out."""


class HoldoutConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The long-term holdout (`docs/long-term-holdout.md`): no gate, so no verdict depends on it."""

    share: float = 0.0
    """Of the people who can be recognised: they stay on the champion of its beginning. 0: there is none; else between .005 and .1."""
    days: float = 90.0
    """For so long; then the next one holds others, on the champion of then."""


class GatesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a verdict depends on besides its evidence."""

    stages: tuple[StageConfig, ...] = (
        StageConfig(share=0.05, units=500, minutes=10.0),
        StageConfig(share=0.25, units=1000, minutes=15.0),
        StageConfig(share=0.50, units=0, minutes=0.0, least_units=0),
    )
    lasting_share: float = 0.20
    """Share of the people who never get the candidate, in no stage: harm that lasts in those who had it shows against them. At least 0.2,
    below that it shows nothing; 0 for a ramp in which nothing can last, such as one of minutes."""
    window_s: float = 1800.0
    turn_wait_s: float = 150.0
    """An exposure without a turn after this long is a fault of its arm."""
    settle_s: float = 5.0
    """Units are counted this long after their first exposure at the earliest, so that the stream's partitions can catch up."""
    metrics: tuple[MetricConfig, ...] = msgspec.field(default_factory=default_metrics)
    slos: tuple[SloConfig, ...] = (SloConfig(source="fault", limit=0.10),)
    alpha_abort_e: float = 0.025
    alpha_abort_gst: float = 0.025
    alpha_ni_e: float = 0.01
    alpha_ni_gst: float = 0.04
    alpha_post: float = 0.01
    alpha_data: float = 0.01
    alpha_slo: float = 0.001
    gst_looks: int = 20
    e_targets: tuple[float, ...] = (0.02, 0.05, 0.10, 0.20)
    canary_max_s: float = 7200.0
    """No READY by then: inconclusive, and the champion stays. Where this traffic needs longer to answer, the plan takes longer."""
    canary_longest_s: float = 604_800.0
    """A canary is planned for so long at most (a week); `canary_max_s` or less allows no longer one."""
    hold_max_s: float = 7200.0
    """Bad data for this long: abort."""
    no_data_hold_s: float = 600.0
    data_lag_max_s: float = 300.0
    duplicates_max: float = 0.01
    """Share of units seen in two arms."""
    min_power: float = 0.60
    """A canary whose non-inferiority tests would have less is refused; 0 switches the refusal off, and says so in the plan."""
    margin_share_max: float = 0.25
    """No margin of a metric whose good is up is wider than this share of the champion's mean: 1.5 points of a success rate of 0.6 % would
    let a version through that never succeeds. 0 leaves the margins as they are written, and lets that happen."""
    traffic_days: float = 7.0
    holdback_first: float = 0.10
    holdback_s: float = 18_000.0
    """How long the previous champion keeps its holdback; then the anchor keeps `anchor_share`."""
    anchor_share: float = 0.03
    anchor_margin: float = 0.02
    anchor_run_length_slots: int = 1000
    anchor_needs_sealed: bool = False
    """The anchor moves only after its new version passed the suites' sealed split (`ratchet suite sealed`); set with `sealed_share`."""
    post_margin: float = 0.01
    run_length_units: int = 1_000_000
    units_per_look: int = 200
    breaker_rollbacks: int = 2
    breaker_window_s: float = 86_400.0
    rollbacks_max: int = 3
    """So many automatic rollbacks within `breaker_window_s`; then people decide."""
    reentry_season_s: float = 0.0
    """86,400 where traffic has a daily peak (604,800: a weekly one): after an incident nothing moves forward (no canary begins or ramps,
    nothing is READY or promoted) until the hour in which it began has come again, since what broke at the peak is quiet at night. 0: as
    soon as the limits are kept."""
    approval: ApprovalConfig = ApprovalConfig()
    people: PeopleTerms = PeopleTerms()
    """Whether and how people judge where traffic cannot."""
    health: HealthConfig = HealthConfig()
    off_policy: OffPolicyGateConfig = OffPolicyGateConfig()
    holdout: HoldoutConfig = HoldoutConfig()
    interval_s: float = 1.5
    """How often the watch asks again."""

    @property
    def required(self) -> tuple[MetricConfig, ...]:
        return tuple(metric for metric in self.metrics if metric.required)

    @property
    def hash(self) -> str:
        """Of everything that can matter. `people` and the season cannot while they are off: decisions from before there were any are made
        again. `holdout` never does."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        off = {name for name, is_on in (("people", self.people.enabled), ("reentry_season_s", self.reentry_season_s > 0.0)) if not is_on}
        return content_hash({name: value for name, value in plain.items() if name not in {*off, "holdout"}})

    def window_of(self, metric: MetricConfig) -> float:
        """Seconds after a unit's first session during which its sessions count."""
        return self.window_s if metric.window_s is None else metric.window_s

    def weight_of(self, metric: MetricConfig) -> float:
        """Share of the harm family's alpha: its own, or its class's divided among the class."""
        if metric.weight is not None:
            return metric.weight
        return CLASS_WEIGHTS[metric.kind] / sum(1 for other in self.metrics if other.kind is metric.kind)


def check(config: GatesConfig, *, rewarded: frozenset[str] = frozenset()) -> None:
    """Refuse a configuration that could not protect anybody. `rewarded` names the terms of the active rule set. Raises `BadConfig`."""
    approval = _approval(config)
    people, holdout = _people(config), _holdout(config.holdout)
    for problem in (_stages(config), _alphas(config), _metrics(config), _slos(config), _gold(config, rewarded), approval, people, holdout):
        if problem is not None:
            raise BadConfig(f"[gates] in the configuration: {problem}")


def terms_of(config: GatesConfig, *, owner: str | None = None) -> Terms:
    """The terms that a release opened now is bound to. `owner`: `user:<name>` of the configuration file's owner."""
    gates: dict[str, Any] = msgspec.to_builtins(config)
    named = config.approval.edited_by
    return Terms(
        stages=tuple(stage.share for stage in config.stages), lasting=config.lasting_share,
        holdback=config.holdback_first, approvals=config.approval.n, approvals_in_doubt=config.approval.n_in_doubt,
        approval_ttl_s=config.approval.ttl_s, high_tier=config.approval.high_tier, edited_by=owner if named == FROM_FILE else named,
        breaker_rollbacks=config.breaker_rollbacks, breaker_window_s=config.breaker_window_s,
        rollbacks_max=config.rollbacks_max, reentry_season_s=config.reentry_season_s, config_hash=config.hash, gates=gates,
        sealed=config.anchor_needs_sealed, people=config.people,
    )  # fmt: skip


def _stages(config: GatesConfig) -> str | None:
    shares = [stage.share for stage in config.stages]
    if not shares or any(not 0.0 < share < 1.0 for share in shares) or any(a >= b for a, b in pairwise(shares)):
        return f"the stages' shares are {shares}: give at least one, each larger than the one before, between 0 and 1"
    if not 0.0 <= config.holdback_first < 1.0 or not 0.0 <= config.anchor_share < 1.0:
        return "holdback_first and anchor_share are shares: set them to 0 or more and less than 1"
    if config.lasting_share != 0.0 and not 0.2 <= config.lasting_share <= 0.5:
        return "lasting_share is the share of people who never get the candidate: set it between 0.2 and 0.5, or to 0 for no such cohort"
    if not 0.0 <= config.margin_share_max <= 1.0:
        return "margin_share_max is a share of the champion's mean: set it to at most 1, or to 0 to leave the margins as they are"
    return None


def _approval(config: GatesConfig) -> str | None:
    if min(config.approval.n, config.approval.n_in_doubt) < 1:
        return "approval.n and approval.n_in_doubt say how many people approve a release: set them to at least 1"
    named = config.approval.edited_by
    if named is None or named == FROM_FILE or named.startswith("user:"):
        return None
    return f'approval.edited_by is {named!r}: write "user:NAME", or "{FROM_FILE}" for the owner of the configuration file'


def _people(config: GatesConfig) -> str | None:
    problem = config.people.problem()
    return None if problem is None else f"people: {problem}"


def _holdout(config: HoldoutConfig) -> str | None:
    if config.share != 0.0 and not 0.005 <= config.share <= 0.1:
        return f"holdout.share = {config.share:g}: between 0.005 and 0.1 of the people, or 0 for no long-term holdout"
    return None if 7.0 <= config.days <= 366.0 else f"holdout.days = {config.days:g}: between a week and a year"


def _alphas(config: GatesConfig) -> str | None:
    names = ("alpha_abort_e", "alpha_abort_gst", "alpha_ni_e", "alpha_ni_gst", "alpha_post", "alpha_data", "alpha_slo")
    wrong = [name for name in names if not 0.0 < getattr(config, name) <= 0.05]
    return f"{', '.join(wrong)}: an error probability lies above 0 and at most at 0.05" if wrong else None


def _metrics(config: GatesConfig) -> str | None:
    names = [metric.name for metric in config.metrics]
    if len(set(names)) != len(names) or not names:
        return "metrics need names, each used once, and there has to be at least one"
    for metric in config.metrics:
        problem = _metric(metric)
        if problem is not None:
            return f"metric {metric.name}: {problem}"
    total = sum(config.weight_of(metric) for metric in config.metrics)
    if total > 1.0 + 1e-9:
        return f"the weights of the harm family sum to {total:.3f}: false aborts stay under control only up to 1"
    if len(config.required) > MAX_REQUIRED:
        return f"{len(config.required)} metrics are required for promotion: require at most {MAX_REQUIRED}, or nothing is ever promoted"
    return None


def _slos(config: GatesConfig) -> str | None:
    for slo in config.slos:
        problem = _source(slo.source)
        if problem is None and not 0.0 < slo.limit < 1.0:
            problem = f"limit = {slo.limit:g}: the highest tolerated rate of bad turns lies between 0 and 1"
        if problem is None and slo.source == "length" and slo.threshold is None:
            problem = "say from how many tokens on an answer is too long (threshold)"
        if problem is not None:
            return f"limit on {slo.source}: {problem}"
    return None


def _source(source: str) -> str | None:
    kind, _, name = source.partition(":")
    if source in PLAIN_SOURCES or (kind in NAMED_SOURCES and name):
        return None
    known = ", ".join([*sorted(PLAIN_SOURCES), *(f"{kind}:NAME" for kind in sorted(NAMED_SOURCES))])
    return f"unknown source {source!r}; known ones are {known}"


def _metric(metric: MetricConfig) -> str | None:
    unknown = _source(metric.source)
    if unknown is not None:
        return unknown
    if not metric.low < metric.high:
        return "low has to be below high"
    if metric.quantile is not None and not 0.0 < metric.quantile < 1.0:
        return "quantile lies between 0 and 1 (0.95 counts turns above the champion's p95)"
    if metric.prompt_price < 0.0:
        return "prompt_price is what a token of the prompt costs, in tokens of the answer: at least 0"
    if metric.margin is not None and not 0.0 < metric.margin < 1.0:
        return "a non-inferiority margin lies between 0 and 1 (0.02 is two percentage points)"
    if metric.by_turns and (metric.margin is not None or metric.good is Good.SAME):
        return "a metric counted by turns is a guardrail: it takes no margin, and has to have a direction"
    if metric.turns_cap is not None and metric.turns_cap < 1:
        return "turns_cap is at least 1"
    if metric.margin is not None and metric.good is Good.SAME:
        return "a metric with two bad directions cannot be required; leave its margin out"
    if not 0.0 <= metric.abort_margin < 1.0 or (metric.window_s is not None and metric.window_s < 0.0):
        return "abort_margin lies between 0 and 1, window_s is not negative"
    return None


def _gold(config: GatesConfig, rewarded: frozenset[str]) -> str | None:
    gold = [metric for metric in config.required if metric.kind is MetricClass.GOLD]
    if not gold:
        return 'no gold metric is required for promotion: give one with kind = "gold" a margin'
    inside = [metric.name for metric in gold if metric.source == "reward" or metric.source.partition(":")[2] in rewarded]
    if len(inside) == len(gold):
        return (
            f"{', '.join(inside)}: a gold metric must not be part of the reward, or the policy learns to please it; "
            "name one that no term of the active rule set uses"
        )
    return None
