"""A cut reads what it needs, however much waits; and what it reads is a fair and repeatable draw."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, event, func, select, update

from app.db.engine import reading, writing
from app.db.learning.batches import SqlBatchStore, SqlCutSession
from app.db.learning.labels import count_trainable
from app.db.tables import labels, turns
from app.domain.learning.batches import LabelledTurn
from pipelines.batching import BatchingConfig, cut_batch
from tests.bench.year_data import NOW, POLICY, VERSION, WINDOW, Year, fill

LATER = NOW + timedelta(hours=1)
"""Everything has its label."""
YEAR = Year(turns=2_400, unlabelled=0, versions=2, turns_per_person=4)
CONFIG = BatchingConfig(min_turns=4, max_turns=40)


@pytest.fixture
def engine(engine: Engine) -> Engine:
    fill(engine, YEAR)
    return engine


def drawn(engine: Engine, slot: int, at_most: int = 80) -> list[LabelledTurn]:
    with SqlBatchStore(engine).cutting(POLICY) as session:
        return session.unused_labels(versions=(VERSION,), since=LATER, until=LATER, slot=slot, at_most=at_most)


class Counted(SqlBatchStore):
    """Counts the labels that each draw brings."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.draws: list[int] = []

    @contextmanager
    def cutting(self, policy: str) -> Iterator[SqlCutSession]:
        with super().cutting(policy) as session:
            read = session.unused_labels

            def counted(**asked: Any) -> list[LabelledTurn]:
                found = read(**asked)
                self.draws.append(len(found))
                return found

            session.unused_labels = counted  # type: ignore[method-assign] - what it reads is what is asked here
            yield session


def test_a_cut_reads_no_more_than_it_needs_and_accounts_for_all(engine: Engine) -> None:
    """It once read every unused label: of 298,000 in 43 s, for a batch of 1,024. Here 80 that say something are drawn, of 1,200."""
    fetched: list[int] = []
    inside = _made_in_window(engine)
    event.listen(engine, "after_cursor_execute", lambda *_: fetched.append(1))
    store = Counted(engine)
    manifest = cut_batch(store, policy=POLICY, slot=18_000, champion=VERSION, anchor=VERSION, config=CONFIG, now=NOW)
    assert len(manifest.items) == CONFIG.max_turns
    assert len(store.draws) == 1
    assert 80 <= store.draws[0] < 160  # whole episodes, also their turns that say nothing
    assert len(fetched) < 30  # no statement per label
    taken = {item.inference_id for item in manifest.items} & inside
    assert sum(manifest.left_out.values()) + len(taken) == len(inside)
    with reading(engine) as connection:
        used = connection.execute(select(labels.c.inference_id).where(labels.c.batch_id == manifest.id)).scalars().all()
    assert set(used) == {item.inference_id for item in manifest.items}


def _made_in_window(engine: Engine) -> set[str]:
    with reading(engine) as connection:
        return set(
            connection.execute(
                select(labels.c.inference_id).where(labels.c.labelled_at > NOW - WINDOW, labels.c.labelled_at <= NOW)
            ).scalars()
        )


def test_the_same_slot_draws_the_same_episodes_and_another_slot_others(engine: Engine) -> None:
    one, again, other = drawn(engine, 1), drawn(engine, 1), drawn(engine, 2)
    assert one == again
    assert {turn.episode_id for turn in one} != {turn.episode_id for turn in other}
    assert len(one) < 2 * 80  # whole episodes, also their turns that say nothing
    with reading(engine) as connection:
        of_episodes = select(turns.c.inference_id).join(labels, labels.c.inference_id == turns.c.inference_id)
        whole = of_episodes.where(turns.c.episode_id.in_({turn.episode_id for turn in one}), labels.c.batch_id.is_(None))
        expected = set(connection.execute(whole.where(labels.c.version == VERSION)).scalars())
    assert {turn.inference_id for turn in one} == expected


def test_every_label_is_as_likely_to_be_drawn_as_any_other(engine: Engine) -> None:
    """Over many slots: 1,200 turns of the version in 300 episodes, about 80 of 960 that say something a time, 100 times: 8.3 times each.

    Drawn as stretches of a ring, an episode's count is about Poisson: none at all has a chance of e^-8.3, so of 300 hardly any is missed.
    """
    seen: Counter[str] = Counter()
    slots = 100
    for slot in range(slots):
        seen.update({turn.episode_id for turn in drawn(engine, slot * 18_000)})
    counts = [seen[f"e-{n}"] for n in range(YEAR.turns // 8, YEAR.turns // 4)]
    assert 6 < sum(counts) / len(counts) < 11
    assert sum(count == 0 for count in counts) <= 3
    assert max(counts) <= 26


def test_one_person_with_most_of_the_labels_does_not_leave_the_batch_empty(engine: Engine) -> None:
    """Most of what is drawn first is theirs and capped; the cut draws more until there are enough others."""
    with writing(engine) as connection:
        loud = (labels.c.version == VERSION) & (func.length(labels.c.inference_id) > 0) & (labels.c.lot % 10 != 3)
        connection.execute(update(labels).where(loud).values(actor="loud"))
    config = BatchingConfig(min_turns=4, max_turns=40, max_turns_per_actor=2)
    manifest = cut_batch(SqlBatchStore(engine), policy=POLICY, slot=18_000, champion=VERSION, anchor=VERSION, config=config, now=NOW)
    per_person = Counter(item.actor for item in manifest.items)
    assert per_person["loud"] == 2
    assert len(manifest.items) == 40


def test_the_pool_is_counted_no_further_than_asked(engine: Engine) -> None:
    with reading(engine) as connection:
        assert count_trainable(connection, POLICY, VERSION, at_most=100) == 100
        exact = select(func.count()).where(labels.c.version == VERSION, labels.c.exclusion.is_(None), labels.c.batch_id.is_(None))
        assert count_trainable(connection, POLICY, VERSION) == connection.execute(exact).scalar_one()
