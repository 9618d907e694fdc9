"""V1, people who ask to be forgotten while a canary counts them: whoever is unhappy asks more often, most before their label is due."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import numpy as np

from app.domain.release.sessions import Session
from pipelines.evaluation.config import GatesConfig, MetricClass, MetricConfig
from pipelines.evaluation.counting.drawings import canary_drawing
from pipelines.evaluation.counting.references import references_of
from pipelines.evaluation.counting.unit_book import UnitBook
from tests.bench.common.sections import Section, error_of, repetitions_of
from tests.bench.gate_cells.harm import ALPHA, harm_found, plain_units

AT = datetime(2026, 11, 21, tzinfo=UTC)
PEOPLE, TICK_S = 1500, 30
LABEL_S = 90.0
"""After its turn; the window of the metric is 30 seconds."""
CONFIG = GatesConfig(
    window_s=30.0, settle_s=1.0,
    metrics=(MetricConfig(name="liked", source="reward", kind=MetricClass.PROXY, low=0.0, high=1.0, margin=0.1, prior=0.6),),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Story:
    """What one canary came to."""

    aborted: bool
    counted: int
    could_be: int
    """People who were not erased."""


def erasures(scale: float, seed: int) -> Section:
    """The unit book, fed as the watch feeds it; one in twenty of the happy and three in ten of the unhappy are erased within minutes."""
    section = Section(title=f"V1 erasures in a running canary: {PEOPLE:,} people, success 60 %, labels after {LABEL_S:g} s")
    section.header("erased", "aborted", "of those who stay, counted, least")
    rng, n = np.random.default_rng([seed, 1100]), repetitions_of(200, scale)
    few = repetitions_of(40, scale, least=20)
    cases = (
        ("nobody", 0.0, 0.0, 0.0, few), ("the unhappy rather", 0.05, 0.30, 0.0, n),
        ("the unhappy rather; candidate -10 pp", 0.05, 0.30, -0.1, few),
    )  # fmt: skip
    for name, happy, unhappy, effect, times in cases:
        found = [_story(rng, happy=happy, unhappy=unhappy, effect=effect) for _ in range(times)]
        aborted, least = float(np.mean([one.aborted for one in found])), min(one.counted / one.could_be for one in found)
        section.row(name, aborted, least)
        section.require(f"{name}: nobody who is gone holds the others back", least >= 0.99)
        if effect == 0.0 and unhappy:
            section.numbers["aa_erasures"] = aborted
            section.require("false abort <= 0.05 + 3 SE", aborted <= ALPHA + 3 * error_of(ALPHA, times))
        elif effect:
            section.require("-10 pp found in >= 0.80", aborted >= 0.80)
    return section


def _story(rng: np.random.Generator, *, happy: float, unhappy: float, effect: float) -> Story:
    """Everybody comes once, a second after each other; the watch looks every half minute and asks again for whom it waits."""
    treated = rng.random(PEOPLE) < 0.5
    liked = rng.random(PEOPLE) < 0.6 + effect * treated
    leaves = rng.random(PEOPLE) < np.where(liked, happy, unhappy)
    leaves_at = np.where(leaves, np.arange(PEOPLE) + rng.uniform(5.0, 150.0, PEOPLE), np.inf)
    book = UnitBook(CONFIG, canary_drawing(digest="v2", champion="v1"), references_of(CONFIG, []))
    for second in range(0, PEOPLE + 600, TICK_S):
        new = [_session(k, treated=bool(treated[k])) for k in range(second, min(second + TICK_S, PEOPLE))]
        now = AT + timedelta(seconds=second + TICK_S)
        book.update(new, now=now)
        asked = [int(one.removeprefix("i-")) for one in book.waiting(now)]
        gone = {f"i-{k}" for k in asked if leaves_at[k] <= second + TICK_S}
        due = [k for k in asked if f"i-{k}" not in gone and k + LABEL_S <= second + TICK_S]
        labelled = [replace(_session(k, treated=bool(treated[k])), labelled=True, reward=float(liked[k]), terms={}) for k in due]
        book.update(labelled, now=now, gone=gone)
    lane = book.lanes()[0]
    outcome = lane.array("liked")
    arms = np.frombuffer(lane.treated, dtype="u1").astype(bool)
    return Story(
        aborted=harm_found(plain_units(outcome, arms), PEOPLE), counted=len(outcome), could_be=int(PEOPLE - leaves.sum())
    )  # fmt: skip


def _session(number: int, *, treated: bool) -> Session:
    return Session(
        inference_id=f"i-{number}", actor=f"person-{number}", episode_id=f"e-{number}", release_id="r", stage="canary-2",
        arm="candidate" if treated else "champion", probability=0.5, share=0.5, holdback=0.0, digest="v2" if treated else "v1",
        exposed_at=AT + timedelta(seconds=number), served=True, finish_reason="stop", completion_tokens=0,
    )  # fmt: skip
