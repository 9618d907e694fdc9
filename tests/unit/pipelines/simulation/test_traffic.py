"""People come, ask, and say later what became of the answer; the product keeps what the service acknowledged."""

import asyncio
import itertools
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import httpx
import openai

from pipelines.simulation.client import Answer, observation
from pipelines.simulation.diary import Diary
from pipelines.simulation.product import Editor
from pipelines.simulation.traffic import Tally, Traffic, drive

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


class Service:
    """Answers everybody; refuses the first so many questions, and every event whose name is in `deaf`."""

    def __init__(self, *, refuses: int = 0, deaf: tuple[str, ...] = ()) -> None:
        self.refuses, self.deaf = refuses, deaf
        self.asked: list[dict[str, Any]] = []
        self.reported: list[list[dict[str, Any]]] = []
        self.at_once = self.most_at_once = 0

    async def complete(self, messages: list[dict[str, Any]], *, user: str, metadata: dict[str, str], consent: bool) -> Answer:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        if self.refuses:
            self.refuses -= 1
            full: Any = httpx.Response(429, request=httpx.Request("POST", "http://x"))  # its client has a Response of its own
            raise openai.APIStatusError("full", response=full, body=None)
        self.asked.append({"user": user, "consent": consent, **metadata})
        return Answer(inference_id=f"i{len(self.asked)}", episode_id="e", text="    return 1", version="v1", received_at=NOON)

    async def report(self, events: Sequence[dict[str, Any]]) -> list[str]:
        self.reported.append([*events])
        return [event["id"] for event in events if event["name"] not in self.deaf]


def traffic(folder: Path, **changes: Any) -> Traffic:
    usual = {"seed": 1, "people": 4, "held_out": False, "concurrency": 1, "turns": 8, "horizons_s": (0.0, 0.001),
             "ledger": folder / "ledger", "diary": Diary(folder / "diary")}  # fmt: skip
    return Traffic(**usual | changes)


def come(service: Any, people: Traffic) -> Tally:
    tally = Tally()
    asyncio.run(drive(service, Editor(), people, tally))
    return tally


def test_everybody_comes_once_in_each_round_in_an_order_of_the_seed(tmp_path: Path) -> None:
    service = Service()
    tally = come(service, traffic(tmp_path))
    came = [asked["user"] for asked in service.asked]
    everybody = [f"dev-1-0000{number}" for number in range(4)]
    assert [sorted(came[:4]), sorted(came[4:])] == [everybody, everybody]
    again = Service()
    come(again, traffic(tmp_path))
    assert again.asked == service.asked
    assert tally.counts["answers"] == 8
    assert {(asked["task"], asked["language"], asked["consent"]) for asked in service.asked} == {("complete", "python", True)}
    other = Service()
    come(other, traffic(tmp_path, people=50, turns=50))
    rounds = [asked["user"] for asked in other.asked]
    assert rounds != sorted(rounds)
    assert len({*rounds}) == 50


def test_held_out_people_do_not_consent_and_what_they_kept_is_noted(tmp_path: Path) -> None:
    service = Service()
    come(service, traffic(tmp_path, held_out=True, turns=3))
    assert {(asked["consent"], asked["tier"]) for asked in service.asked} == {(False, "panel")}
    noted, _ = Diary(tmp_path / "diary").read()
    assert [entry.number for entry in noted] == [0, 1, 2]
    assert all(entry.question and entry.answer == "    return 1" and entry.version == "v1" for entry in noted)
    assert all(0.0 <= entry.waited_s < 30.0 for entry in noted)
    come(service, traffic(tmp_path, turns=1))
    assert Diary(tmp_path / "diary").read()[0][-1].question == ""


def test_edits_are_told_at_each_horizon_and_the_last_words_with_the_last_one(tmp_path: Path) -> None:
    service = Service()
    come(service, traffic(tmp_path, turns=1))
    first, last = service.reported
    assert [event["name"] for event in first] == ["edit_persistence"]
    assert [event["name"] for event in last][:2] == ["edit_persistence", "task_success"]
    assert [told[0]["id"] for told in (first, last)] == ["i1-edit_persistence-0", "i1-edit_persistence-0.001"]
    assert first[0]["value"] == {"horizon_s": 0.0, "before": "", "inserted": "    return 1", "after": first[0]["value"]["after"]}
    assert {event["actor"] for event in (*first, *last)} == {service.asked[0]["user"]}


def test_what_people_say_do_and_take_back_is_told_of_many(tmp_path: Path) -> None:
    service = Service()
    tally = come(service, traffic(tmp_path, people=150, turns=150, concurrency=10))
    last = [told for told in service.reported if told[0]["value"]["horizon_s"] > 0]
    named = {name: sum(event["name"] == name for told in last for event in told) for name in ("task_success", "follow_up", "undo")}
    assert named["task_success"] == tally.counts["answers"] >= 150
    assert 50 < named["follow_up"] < 110, "people write with a probability from 0.2 to 0.8"
    assert 0 < named["undo"] < 16, "a tenth of them at most is so careless"
    assert all(event["value"] is True for told in last for event in told if event["name"] in ("undo", "regenerate"))


def test_as_many_ask_at_a_time_as_are_said_to(tmp_path: Path) -> None:
    service = Service()
    tally = come(service, traffic(tmp_path, people=100, turns=30, concurrency=5))
    assert service.most_at_once == 5
    assert 30 <= tally.counts["answers"] <= 34, "who has asked is answered"


def test_the_ledger_holds_what_was_acknowledged_and_the_tally_what_was_not(tmp_path: Path) -> None:
    service = Service(deaf=("task_success",))
    tally = come(service, traffic(tmp_path, turns=3))
    told = [event for events in service.reported for event in events]
    accepted = [event["id"] for event in told if event["name"] != "task_success"]
    assert sorted((tmp_path / "ledger").read_text().splitlines()) == sorted(accepted)
    assert (tally.counts["events"], tally.counts["events_given_up"]) == (len(accepted), 3)
    assert tally.line() == f"answers=3 events={len(accepted)} events_given_up=3"


class Hasty(asyncio.SelectorEventLoop):
    """Waits for nothing, and keeps how long it should have."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[float] = []

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        self.waited.append(delay)
        return super().call_later(0.0, callback, *args, context=context)


def test_a_refusal_is_counted_by_its_status_and_costs_no_turn(tmp_path: Path) -> None:
    service, loop, tally = Service(refuses=2), Hasty(), Tally()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(drive(cast("Any", service), Editor(), traffic(tmp_path, turns=1, horizons_s=(3.0, 5.0)), tally))
    assert (tally.counts["refused_429"], tally.counts["answers"]) == (2, 1)
    *pauses, first, second = loop.waited
    assert len(pauses) == 2
    assert all(0.3 <= seconds <= 1.0 for seconds in pauses)
    assert (first, second) == (3.0, 2.0), "horizons are counted from the answer"


def test_an_observation_s_id_is_a_function_of_the_turn() -> None:
    answer = Answer(inference_id="i", episode_id="e", text="", version=None, received_at=NOON)
    made = [observation(answer, "undo", True, person="p", suffix=suffix) for suffix in ("", "-1", "")]
    assert [event["id"] for event in made] == ["i-undo", "i-undo-1", "i-undo"]
    assert all(event["inference_id"] == "i" for event in itertools.chain(made))
