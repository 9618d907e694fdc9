"""The watch's rounds: every policy in each, told how long it took, until it is told to stop or its database is gone."""

import threading
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from app.domain.errors import Unavailable
from pipelines.watch import Watch, run_watch


@dataclass
class Look:
    """A watch of one policy that notes when it looked."""

    policy: str
    rounds: list[str] = field(default_factory=list[str])
    gone: bool = False

    def tick(self) -> None:
        if self.gone:
            raise Unavailable("the database does not answer")
        self.rounds.append(self.policy)


def watches(*looks: Look) -> list[Watch]:
    return cast("Any", list(looks))


def test_every_round_looks_at_every_policy_and_says_how_long_it_took() -> None:
    rounds, told = list[str](), list[tuple[str, float]]()
    looks, left = [Look("composer", rounds), Look("tab", rounds)], [False, False, True]
    run_watch(
        (watch for watch in watches(*looks)), threading.Event(), interval_s=0.0, stopping=lambda: left.pop(0),
        looked=lambda policy, seconds: told.append((policy, seconds)),
    )  # fmt: skip
    assert rounds == ["composer", "tab"] * 2
    assert [policy for policy, _ in told] == rounds
    assert all(0.0 <= seconds < 60.0 for _, seconds in told)


def test_a_watch_that_is_told_to_stop_does_not_wait_out_its_interval() -> None:
    stop, rounds = threading.Event(), list[str]()
    running = threading.Thread(target=run_watch, args=[watches(Look("composer", rounds)), stop], kwargs={"interval_s": 3600.0})
    running.start()
    stop.set()
    running.join(60)
    assert not running.is_alive()
    assert len(rounds) <= 1


def test_a_database_that_is_gone_ends_the_process_which_its_supervisor_starts_again() -> None:
    with pytest.raises(Unavailable):
        run_watch(watches(Look("composer", gone=True)), threading.Event(), interval_s=0.0)
