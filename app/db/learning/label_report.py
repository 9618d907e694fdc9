"""Reads the label report, and labelled turns for a replay, from SQL; memory stays flat however many labels there are."""

import statistics
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, Row, select

from app.db.counters import read_counts
from app.db.ingestion.words import WITH_WORDS
from app.db.learning.labels import FACTS, facts_of, observations_of
from app.db.tables import labels, turns
from app.domain.learning.label_reports import LabelReport, TermReport
from app.domain.learning.rewards import DueTurn, Labelled

CHUNK = 1000


def label_report(connection: Connection, policy: str) -> LabelReport:
    """How the turns of a policy are labelled at present."""
    tally = _Tally()
    query = select(labels).where(labels.c.policy == policy, labels.c.current)
    for row in connection.execute(query.execution_options(yield_per=CHUNK)):
        tally.add(row)
    counts = {name: value for (owner, name), value in sorted(read_counts(connection).items()) if owner == policy}
    return tally.report(policy, counts)


def labelled_turns(connection: Connection, policy: str, *, limit: int) -> Iterator[Labelled]:
    """The newest labelled turns of a policy that were not erased, newest first."""
    query = (
        select(*FACTS, labels.c.reward, labels.c.terms, labels.c.revision)
        .select_from(WITH_WORDS.join(labels, (labels.c.inference_id == turns.c.inference_id) & labels.c.current))
        .where(turns.c.policy == policy, turns.c.erased_at.is_(None))
        .order_by(turns.c.finished_at.desc(), turns.c.inference_id)
        .limit(limit)
    )
    found = connection.execute(query).all()
    for start in range(0, len(found), CHUNK):
        chunk = found[start : start + CHUNK]
        observed = observations_of(connection, chunk)
        for row in chunk:
            due = DueTurn(facts=facts_of(row), observations=observed[row.inference_id], revision=row.revision)
            yield Labelled(due, row.reward, tuple(row.terms))


class _Tally:
    """Counts over current labels."""

    def __init__(self) -> None:
        self.rewards = array("d")
        self.totals: Counter[str] = Counter()
        self.moods: Counter[str] = Counter()
        self.rule_sets: Counter[str] = Counter()
        self.versions: dict[str, Counter[str]] = defaultdict(Counter)
        self.sums: dict[str, float] = defaultdict(float)
        self.spoke: Counter[str] = Counter()
        self.abstained: dict[str, Counter[str]] = {}

    def add(self, row: Row[Any]) -> None:
        """One more label."""
        self.rewards.append(row.reward)
        self.totals.update(revised=row.revision > 1, held_out=row.held_out)
        self.rule_sets[row.rule_set] += 1
        self.versions[row.version][row.exclusion or "trainable"] += 1
        for term in row.terms:
            name, silent = term["name"], self.abstained.setdefault(term["name"], Counter())
            if term["value"] is None:
                silent[term["abstained"] or "unknown"] += 1
            else:
                self.spoke[name] += 1
                self.sums[name] += term["value"]
            self.moods.update(term["detail"].get("moods", []))

    def report(self, policy: str, counts: dict[str, int]) -> LabelReport:
        """What was counted."""
        ordered = sorted(self.rewards)
        last = len(ordered) - 1
        terms = tuple(
            TermReport(
                name=name, spoke=self.spoke[name], mean=self.sums[name] / self.spoke[name] if self.spoke[name] else None,
                abstained=dict(silent),
            )
            for name, silent in self.abstained.items()
        )  # fmt: skip
        return LabelReport(
            policy=policy, labels=len(ordered), revised=self.totals["revised"], held_out=self.totals["held_out"],
            reward_mean=statistics.fmean(ordered) if ordered else None,
            reward_quantiles=tuple(ordered[round(last * share)] for share in (0, 0.25, 0.5, 0.75, 1)) if ordered else (),
            moods=dict(self.moods), terms=terms, rule_sets=dict(self.rule_sets),
            versions={version: dict(counted) for version, counted in self.versions.items()}, counters=counts,
        )  # fmt: skip
