"""What a canary can find out with this deployment's own traffic, declared before it starts (`facts/gates.md`, section 3.7).

    traffic of the last days ──▶ people per window (people come back: twice the window is not twice the people)
                             ──▶ what of them can be counted by the end (a unit is complete after its window and its labels' wait)
                             ──▶ the shortest window whose tests have the power, or a refusal with what would help

A product with 2,000 turns a day needs days where one with 2,000,000 needs an hour; both get their canary.
"""

import math
from dataclasses import dataclass
from datetime import datetime, timedelta

from app.domain.release.holdouts import BESIDE
from pipelines.evaluation.config import GatesConfig, Good, MetricClass
from pipelines.evaluation.counting.habits import with_explained
from pipelines.evaluation.counting.references import Reference, bounded
from pipelines.evaluation.counting.subjects import HABITS_FROM, EvidenceBook, Plan
from pipelines.evaluation.live.turn_tests import Whose, alpha_of_a_look
from pipelines.evaluation.statistics import normal, power
from pipelines.evaluation.statistics.power import Requirement, Stage

GROWTH = 3.0
"""Each window tried is so many times the one before: five of them from two hours to a week."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """What a canary of this length would see, and find."""

    lasts_s: float
    people: float
    """Distinct people within it."""
    power: dict[str, float]
    """Probability that a harmless candidate is found non-inferior, by required metric."""
    attainable: dict[str, float]
    """Smallest margin with `min_power`."""
    detectable: dict[str, float]
    """Harm that is found in half of the cases at least, if it is so large."""
    lasting: dict[str, float]
    """Harm that lasts in people who had the candidate, on average over all who could get it, that their comparison with the lasting cohort
    finds likewise. Gold metrics only; none without such a cohort."""

    def answers(self, config: GatesConfig) -> bool:
        """Whether every required metric has its power."""
        return all(value >= config.min_power for value in self.power.values())


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The last days of one policy, and the references from them."""

    config: GatesConfig
    book: EvidenceBook
    policy: str
    references: dict[str, Reference]
    since: datetime
    now: datetime

    def people(self, seconds: float) -> float:
        """Distinct people in a window of this length; none in no time."""
        if seconds <= 0.0:
            return 0.0
        return self.book.units_in(self.policy, window=timedelta(seconds=seconds), since=self.since, now=self.now)

    def requirements(self) -> list[Requirement]:
        """The required metrics, with the margins that they are held to."""
        return [
            Requirement(metric=m.name, margin=bounded(self.config, m, m.margin or 0.0, ref), variance=ref.residual)
            for m in self.config.required
            for ref in (self.references[m.name],)
        ]

    def stages(self, lasts_s: float) -> tuple[Stage, ...]:
        """Units that each stage can count: the early ones last until they have enough, the last one takes what is left.

        The lasting cohort and the long-term holdout are not counted: they are in no stage.
        Of the others, whoever comes in the last window of a unit and its labels' wait is not complete by the deadline.
        """
        left_s, stages, drawn = lasts_s, list[Stage](), (1.0 - self.config.lasting_share) * (1.0 - self.config.holdout.share)
        for stage in self.config.stages[:-1]:
            stage_s = min(stage.minutes * 60.0, left_s)
            units = self.people(max(stage_s, 1.0)) * drawn
            stages.append(Stage(share=stage.share, units=min(units, stage.units) if stage.units else units))
            left_s -= stage_s
        return (*stages, Stage(share=self.config.stages[-1].share, units=self.people(left_s - self.unfinished_s()) * drawn))

    def unfinished_s(self) -> float:
        """How long before the end the last unit has to begin to be counted."""
        window_s = max(self.config.window_of(metric) for metric in self.config.required)
        return window_s + self.book.label_wait_s(self.policy) + self.config.settle_s

    def window(self, lasts_s: float) -> Window:
        """What a canary of this length would find."""
        stages, last = self.stages(lasts_s), self.config.stages[-1].share
        information, required = math.fsum(stage.information for stage in stages), self.requirements()
        least = self.config.min_power or power.MINIMUM_POWER
        return Window(
            lasts_s=lasts_s, people=self.people(lasts_s),
            power={r.metric: power.power_of(margin=r.margin, variance=r.variance, information=information) for r in required},
            attainable={r.metric: power.attainable_margin(variance=r.variance, information=information, power=least) for r in required},
            detectable={
                r.metric: power.detectable(units=information / (last * (1.0 - last)), variance=r.variance, share=last) for r in required
            },
            lasting=self.lasting(self.people(lasts_s) * (1.0 - self.config.holdout.share)),
        )  # fmt: skip

    def lasting(self, people: float) -> dict[str, float]:
        """Lasting harm that so many people show, by gold metric: drawn once each, everybody but the cohort against the cohort."""
        if self.config.lasting_share == 0.0:
            return {}
        gold = {m.name: alpha_of_a_look(self.config, m, Whose.LASTING) for m in self.config.required if m.kind is MetricClass.GOLD}
        return {
            r.metric: power.detectable(
                units=people, variance=r.variance, share=1.0 - self.config.lasting_share, alpha=gold[r.metric],
                targets=len(self.config.e_targets),
            ) for r in self.requirements() if r.metric in gold
        }  # fmt: skip

    def held_finds(self) -> dict[str, float]:
        """By required metric, about what difference a week of the long-term holdout shows four times in five; none without one."""
        held = self.people(7 * 86_400.0) * self.config.holdout.share
        if held == 0.0:
            return {}
        arms = (1.0 + 1.0 / BESIDE) / held
        return {r.metric: (normal.quantile(0.975) + normal.quantile(0.8)) * math.sqrt(r.variance * arms) for r in self.requirements()}


def traffic_of(config: GatesConfig, book: EvidenceBook, *, policy: str, champion: str, now: datetime) -> Traffic:
    """The last days of a policy."""
    since = now - timedelta(days=config.traffic_days)
    references = with_explained(config, book.history(policy, champion, since=since, newest=HABITS_FROM))
    return Traffic(config=config, book=book, policy=policy, references=references, since=since, now=now)


def windows_of(config: GatesConfig) -> list[float]:
    """Lengths that are tried, from `canary_max_s` to `canary_longest_s`, in seconds."""
    found = [config.canary_max_s]
    while found[-1] * GROWTH < config.canary_longest_s:
        found.append(found[-1] * GROWTH)
    return [*found, config.canary_longest_s] if config.canary_longest_s > found[-1] else found


def plan_canary(config: GatesConfig, book: EvidenceBook, *, policy: str, champion: str, now: datetime) -> Plan | power.Refused:
    """Declare references, length and sample sizes from the last days' traffic, or refuse what that traffic cannot answer."""
    traffic = traffic_of(config, book, policy=policy, champion=champion, now=now)
    share, required = config.stages[-1].share, traffic.requirements()
    if config.min_power <= 0.0:
        n_max = {r.metric: power.sample_size(margin=r.margin, variance=r.variance, share=share) for r in required}
        units, note = traffic.people(config.canary_max_s), "the power check is switched off"
        return Plan(references=traffic.references, n_max=n_max, share=share, units_expected=units, note=note)
    refused: power.Refused | None = uninformed(config, traffic.references)
    for lasts_s in windows_of(config) if refused is None else ():
        planned = power.plan_canary(traffic.stages(lasts_s), required, minimum=config.min_power)
        if isinstance(planned, power.Accepted):
            return Plan(
                references=traffic.references, n_max=planned.n_max, share=planned.share, units_expected=traffic.people(lasts_s),
                powers=planned.power, lasts_s=lasts_s,
            )  # fmt: skip
        refused = planned
    assert refused is not None, "there is always a window to try"
    return refused


def uninformed(config: GatesConfig, references: dict[str, Reference]) -> power.Refused | None:
    """The required metric that this traffic says nothing about, however long a canary lasts."""
    for metric in config.required:
        found = references[metric.name]
        if found.units and found.known == 0.0:
            cure = f"none of the champion's {found.units} people has any signal of it: send {metric.source}, or require another metric"
        elif found.units and metric.good is Good.UP and found.mean <= 0.0:
            cure = f"the champion's is 0 in {found.units} people, so nothing can be shown to be no worse: require another metric"
        else:
            continue
        return power.Refused(
            metric=metric.name, power=0.0, attainable_margin=math.inf, window_factor=math.inf, explained_needed=None,
            cure=f"{metric.name}: {cure}",
        )  # fmt: skip
    return None
