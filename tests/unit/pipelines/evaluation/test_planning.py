"""What a canary is planned from: this deployment's own people, who come back, and what of them can be counted by the end."""

import math
from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest

from app.domain.release.alarms import Alarm
from app.domain.release.gates import GateName
from app.domain.release.holdouts import BESIDE
from app.domain.release.sessions import Era, Session
from pipelines.evaluation.config import GatesConfig, HoldoutConfig, MetricConfig, StageConfig
from pipelines.evaluation.counting.references import Reference, references_of
from pipelines.evaluation.counting.subjects import Plan
from pipelines.evaluation.live.planning import Traffic, plan_canary, traffic_of, uninformed, windows_of
from pipelines.evaluation.live.turn_tests import Whose, alpha_of_a_look
from pipelines.evaluation.statistics.power import Refused
from tests.fakes.sessions import AT, session


class Returning:
    """The `EvidenceBook` port for a product whose `people` come once in `every` on average, again and again."""

    def __init__(self, people: float, *, every: timedelta, wait_s: float = 0.0, history: list[Session] | None = None) -> None:
        self.crowd, self.every, self.wait_s, self.past = people, every, wait_s, history or []

    def units_in(self, policy: str, *, window: timedelta, since: datetime, now: datetime) -> float:
        return self.crowd * -math.expm1(-(window / self.every))

    def label_wait_s(self, policy: str) -> float:
        return self.wait_s

    def history(
        self, policy: str, digest: str, *, since: datetime, until: datetime | None = None, newest: int = 5000
    ) -> list[Session]:  # fmt: skip
        return self.past

    def canary_sessions(self, release_id: str, *, since: datetime | None = None) -> list[Session]:
        return []

    def sessions_of(self, inference_ids: Collection[str]) -> list[Session]:
        return []

    def era_sessions(self, policy: str, era: Era, *, since: datetime | None = None) -> list[Session]:
        return []

    def eras(self, policy: str) -> list[Era]:
        return []

    def lag_s(self, policy: str, *, now: datetime) -> float:
        return 0.0

    def engines_ready(self, policy: str, digest: str, *, seen_since: datetime) -> bool:
        return True

    def engine_failure(self, policy: str, digest: str, *, seen_since: datetime) -> str | None:
        return None

    def decisions(self, release_id: str, *, newest: int = 1000) -> list[dict[str, Any]]:
        return []

    def incidents(self, policy: str) -> list[Alarm]:
        return []

    def false_alarms(self, policy: str, *, besides: str, gate: GateName = GateName.CANARY, newest: int = 500) -> tuple[int, int]:
        return 0, 0

    def keep(self, release_id: str, digest: str, payload: bytes, *, now: datetime) -> None: ...

    def kept(self, digest: str) -> bytes:
        return b""


def planned(config: GatesConfig, book: Returning) -> Plan | Refused:
    return plan_canary(config, book, policy="p", champion="v1", now=AT)


def people(count: int, **changes: Any) -> list[Session]:
    return [session(n, signals={"task_success": n % 5 < 3}, reward=0.3 if n % 2 else -0.1, **changes) for n in range(count)]


def test_a_product_of_any_size_gets_a_canary_as_long_as_its_traffic_needs() -> None:
    """2,000, 20,000 and 200,000 turns a day were refused within a slot."""
    lengths: list[float] = []
    for crowd, margin in ((2_000_000, 0.015), (400_000, 0.015), (60_000, 0.015), (4_000, 0.06)):
        metrics = tuple(_margin(m, margin) if m.required else m for m in GatesConfig().metrics)
        plan = planned(GatesConfig(metrics=metrics), Returning(crowd, every=timedelta(days=2), history=people(400)))
        assert isinstance(plan, Plan)
        assert plan.lasts_s is not None
        assert min(plan.powers.values()) >= 0.60
        lengths.append(plan.lasts_s)
    assert lengths == sorted(lengths)
    assert lengths[0] == GatesConfig().canary_max_s
    assert lengths[-1] > 24 * 3600


def _margin(metric: MetricConfig, margin: float) -> MetricConfig:
    return msgspec.structs.replace(metric, margin=margin)


def test_the_last_window_and_the_labels_wait_of_a_canary_are_not_counted_on() -> None:
    """Planned .77, real .58: a unit that begins in the last half hour is not complete by the deadline."""
    config = GatesConfig()
    quick, slow = (
        traffic_of(config, Returning(1e6, every=timedelta(days=2), wait_s=wait_s), policy="p", champion="v1", now=AT)
        for wait_s in (0.0, 1800.0)
    )
    # of 120 minutes the early stages take 25, the window 30, settling 5 s: 65 minutes are left, or 35 with half an hour of waiting;
    # a fifth of the people are in the lasting cohort and in no stage
    assert quick.stages(7200.0)[-1].units == pytest.approx(0.8e6 * -math.expm1(-(3900 - 5) / 172_800))
    assert slow.stages(7200.0)[-1].units == pytest.approx(0.8e6 * -math.expm1(-(2100 - 5) / 172_800))


def test_people_who_come_back_are_not_counted_twice_in_a_longer_window() -> None:
    traffic = traffic_of(GatesConfig(), Returning(1000, every=timedelta(hours=1)), policy="p", champion="v1", now=AT)
    day, week = traffic.window(86_400.0), traffic.window(604_800.0)
    assert week.people == pytest.approx(day.people, rel=0.001)
    assert week.power["task_success"] == pytest.approx(day.power["task_success"], abs=0.01)
    assert week.attainable["task_success"] > 0.05  # a thousand people cannot show 1.5 points in any time


def test_the_plan_says_what_harm_that_lasts_the_cohort_finds() -> None:
    """2 (ln 1/.025 + ln 1/.03 + ln 64 + ln 4) s^2 / (.8 .2 d^2) people, s^2 = .24 of 400 people of whom three of five succeed."""
    config = GatesConfig()
    traffic = traffic_of(config, Returning(50_000, every=timedelta(days=2), history=people(400)), policy="p", champion="v1", now=AT)
    evidence = -math.log(0.025) - math.log(0.30 / 2 * 0.2) + math.log(64) + math.log(4)
    found = traffic.window(86_400.0)
    assert found.lasting == {"task_success": pytest.approx(math.sqrt(2 * evidence * 0.24 / (0.8 * 0.2 * found.people)), rel=0.01)}
    assert found.lasting["task_success"] > traffic.window(604_800.0).lasting["task_success"]
    assert traffic_of(
        msgspec.structs.replace(config, lasting_share=0.0), Returning(50_000, every=timedelta(days=2)), policy="p", champion="v1", now=AT
    ).window(86_400.0).lasting == {}  # fmt: skip


def test_a_metric_that_is_not_asked_of_the_lasting_cohort_has_no_level_there() -> None:
    config = GatesConfig()
    asks = next(metric for metric in config.metrics if metric.name == "asks")
    with pytest.raises(ValueError, match="asks is not asked of lasting cohort"):
        alpha_of_a_look(config, asks, Whose.LASTING)


def test_a_metric_that_nobody_reports_refuses_the_plan_with_the_cure() -> None:
    silent = [session(n, signals={}) for n in range(100)]
    refused = planned(GatesConfig(), Returning(1e6, every=timedelta(days=1), history=silent))
    assert isinstance(refused, Refused)
    assert refused.message.startswith("task_success: none of the champion's 100 people has any signal of it: send observation:task_success")


def test_a_metric_in_which_the_champion_never_succeeds_refuses_the_plan() -> None:
    barren = [session(n, signals={"task_success": False}) for n in range(100)]
    refused = planned(GatesConfig(), Returning(1e6, every=timedelta(days=1), history=barren))
    assert isinstance(refused, Refused)
    assert "nothing can be shown to be no worse" in refused.message


def test_the_lengths_that_are_tried_reach_from_the_shortest_to_the_longest() -> None:
    assert windows_of(GatesConfig()) == [7200.0, 21_600.0, 64_800.0, 194_400.0, 583_200.0, 604_800.0]
    assert windows_of(GatesConfig(canary_longest_s=0.0)) == [7200.0]


# --- by hand ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shortest", "longest", "windows"),
    [
        (100.0, 100.0, [100.0]), (100.0, 99.0, [100.0]), (100.0, 101.0, [100.0, 101.0]), (100.0, 300.0, [100.0, 300.0]),
        (100.0, 301.0, [100.0, 300.0, 301.0]), (100.0, 1000.0, [100.0, 300.0, 900.0, 1000.0]),
    ],
)  # fmt: skip
def test_each_window_is_three_times_the_one_before_up_to_the_longest(shortest: float, longest: float, windows: list[float]) -> None:
    assert windows_of(GatesConfig(canary_max_s=shortest, canary_longest_s=longest)) == windows


class Counted(Returning):
    """One person a second, never again."""

    def __init__(self, *, wait_s: float = 0.0) -> None:
        super().__init__(0, every=timedelta(days=1), wait_s=wait_s)

    def units_in(self, policy: str, *, window: timedelta, since: datetime, now: datetime) -> float:
        return window.total_seconds()


def traffic(**changes: Any) -> Traffic:
    values: dict[str, Any] = {
        "stages": (StageConfig(share=0.1, units=50, minutes=1.0), StageConfig(share=0.2, minutes=2.0), StageConfig(share=0.5)),
        "window_s": 10.0, "settle_s": 5.0, "lasting_share": 0.0, **changes,
    }  # fmt: skip
    return traffic_of(GatesConfig(**values), Counted(wait_s=100.0), policy="p", champion="v1", now=AT)


@pytest.mark.parametrize(
    ("lasts_s", "units"),
    [
        # one minute, of which fifty are enough; two minutes; what is left without 10 + 100 + 5 s
        (1000.0, [50.0, 120.0, 705.0]), (300.0, [50.0, 120.0, 5.0]), (295.0, [50.0, 120.0, 0.0]), (100.0, [50.0, 40.0, 0.0]),
        (40.0, [40.0, 1.0, 0.0]),
    ],
)  # fmt: skip
def test_a_window_is_dealt_to_its_stages_and_whoever_comes_last_is_not_counted(lasts_s: float, units: list[float]) -> None:
    stages = traffic().stages(lasts_s)
    assert [stage.share for stage in stages] == [0.1, 0.2, 0.5]
    assert [stage.units for stage in stages] == pytest.approx(units)


def test_who_is_held_or_lasting_is_in_no_stage() -> None:
    stages = traffic(lasting_share=0.2, holdout=HoldoutConfig(share=0.1)).stages(1000.0)
    assert [stage.units for stage in stages] == pytest.approx([0.72 * 60.0, 0.72 * 120.0, 0.72 * 705.0])


def test_a_week_of_the_holdout_finds_what_its_people_show() -> None:
    assert traffic().held_finds() == {}
    found = traffic(holdout=HoldoutConfig(share=0.01)).held_finds()
    held = 7 * 86_400 * 0.01
    # (1.95996 + .841621) sqrt(variance (1 + 1/BESIDE)/held)
    variance = references_of(GatesConfig(), [])["task_success"].residual
    assert found["task_success"] == pytest.approx(2.801585 * math.sqrt(variance * (1 + 1 / BESIDE) / held), rel=1e-5)


def test_what_traffic_says_nothing_about_is_refused_with_what_would_help() -> None:
    config = GatesConfig()
    known = {name: Reference(mean=0.5, variance=0.25, units=30) for name in (m.name for m in config.metrics)}
    assert uninformed(config, known) is None
    silent = uninformed(config, {**known, "task_success": Reference(mean=0.5, variance=0.25, units=30, known=0.0)})
    assert silent is not None
    assert (silent.metric, silent.power, silent.attainable_margin) == ("task_success", 0.0, math.inf)
    assert "none of the champion's 30 people has any signal of it" in silent.message
    never = uninformed(config, {**known, "task_success": Reference(mean=0.0, variance=0.25, units=30)})
    assert never is not None
    assert "is 0 in 30 people" in never.message
    # a prior says nothing of the traffic
    assert uninformed(config, {**known, "task_success": Reference(mean=0.0, variance=0.25, units=0, known=0.0)}) is None
