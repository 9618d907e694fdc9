"""A caller's trace at the gateway: gone on with, taken along by the turn, told to a real collector, with nothing that was said in it."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta

import httpx
import msgspec
import pytest

from app.domain.telemetry.events import EventType
from app.domain.telemetry.traceparent import TRACEPARENT
from app.domain.telemetry.turns import FinishReason, TurnServed
from app.main import create_app
from app.telemetry.traces import NOWHERE, Traces, open_traces
from tests.collector import Collected, Collector, collecting
from tests.fakes.gateway import CHAMPION, ScriptedEngines, collaborators, events_of, policy_config, serving
from tests.fakes.inbox import MemoryInbox

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
WORDS = ("Ornithopter", "Zugunruhe", "Quincunx")
"""Of a prompt, a system message and an answer."""
PERSON = "lovelace"
"""A name that no hexadecimal number holds, as one id in a hundred holds `ada`."""


class Room:
    """A service whose turns are traced."""

    def __init__(self, traces: Traces, *, finish: FinishReason = FinishReason.STOP) -> None:
        self.inbox, self.traces = MemoryInbox(), traces
        engines = ScriptedEngines(words=("an ", WORDS[2]), finish_reason=finish)
        self.app = create_app(
            collaborators(inbox=self.inbox, engines=engines, traces=traces, policies={"composer": policy_config(max_tokens=64)})
        )

    def ask(self, traceparent: str | None, **more: object) -> httpx.Response:
        """One chat."""
        messages = [{"role": "system", "content": WORDS[1]}, {"role": "user", "content": WORDS[0]}]
        with serving(self.app) as url:
            return httpx.post(
                f"{url}/v1/chat/completions", json={"model": "composer", "messages": messages, "user": PERSON, **more},
                headers={} if traceparent is None else {TRACEPARENT: traceparent}, timeout=60,
            )  # fmt: skip

    def turns(self) -> Sequence[TurnServed]:
        """What was stored."""
        return [msgspec.json.decode(event.data, type=TurnServed) for event in events_of(self.inbox, EventType.TURN)]


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


def told(room: Room, collector: Collector) -> dict[str, Collected]:
    """The spans by name, once all were sent."""
    room.traces.close()
    return {one.name: one for one in collector.spans}


def test_a_caller_s_trace_is_gone_on_with_and_its_turn_takes_it_along(collector: Collector) -> None:
    room = Room(open_traces(collector.url, process="api", share=0.0, version="1"))
    answered = room.ask(f"00-{TRACE}-{CALLER}-01", metadata={"traceparent": "forged", "ticket": "7"})
    assert answered.status_code == 200, answered.text
    (turn,), spans = room.turns(), told(room, collector)
    chat, commit = spans["chat composer"], spans["commit"]
    assert (chat.service, chat.span.trace_id.hex(), chat.span.parent_span_id.hex()) == ("ratchet-api", TRACE, CALLER)
    assert (commit.span.trace_id, commit.span.parent_span_id) == chat.place
    assert turn.tags == {"ticket": "7", TRACEPARENT: f"00-{TRACE}-{chat.span.span_id.hex()}-01"}
    known = {"ratchet.inference_id": turn.inference_id, "ratchet.version": CHAMPION, "gen_ai.request.model": "composer"}
    assert known.items() <= chat.attributes.items()
    assert (chat.attributes["gen_ai.usage.output_tokens"], chat.attributes["gen_ai.response.finish_reason"]) == (3, "stop")
    assert chat.span.start_time_unix_nano < commit.span.start_time_unix_nano < commit.span.end_time_unix_nano
    assert not [word for word in (*WORDS, PERSON) for body in collector.bodies if word.encode() in body]


def test_each_of_several_answers_is_a_span_of_its_own(collector: Collector) -> None:
    room = Room(open_traces(collector.url, process="api", share=1.0))
    assert room.ask(None, n=3).status_code == 200
    room.traces.close()
    chats = collector.named("chat composer")
    assert {one.attributes["ratchet.inference_id"] for one in chats} == {turn.inference_id for turn in room.turns()}
    assert len({one.span.trace_id for one in chats}) == 3


def test_an_answer_that_failed_says_so_in_its_span_without_the_engine_s_words(collector: Collector) -> None:
    room = Room(open_traces(collector.url, process="api", share=1.0), finish=FinishReason.ERROR)
    assert room.ask(None).status_code == 502
    chat = told(room, collector)["chat composer"]
    assert (chat.span.status.code, chat.span.status.message, chat.attributes["error.type"]) == (2, "", "error")


def test_what_is_not_to_be_stored_is_traced_by_its_numbers(collector: Collector) -> None:
    room = Room(open_traces(collector.url, process="api", share=1.0))
    assert room.ask(None, store=False).status_code == 200
    (turn,), chat = room.turns(), told(room, collector)["chat composer"]
    assert turn.tags.keys() == {"stored", TRACEPARENT}
    assert turn.tags[TRACEPARENT].startswith(f"00-{chat.span.trace_id.hex()}-{chat.span.span_id.hex()}-")


@pytest.mark.parametrize("traceparent", [f"00-{TRACE}-{CALLER}-00", None])
def test_a_trace_that_nobody_takes_leaves_nothing_in_the_turn(collector: Collector, traceparent: str | None) -> None:
    room = Room(open_traces(collector.url, process="api", share=0.0))
    assert room.ask(traceparent).status_code == 200
    assert [turn.tags for turn in room.turns()] == [{}]
    assert told(room, collector) == {}


def test_without_a_collector_a_caller_s_context_goes_nowhere() -> None:
    room = Room(NOWHERE)
    assert room.ask(f"00-{TRACE}-{CALLER}-01", metadata={TRACEPARENT: f"00-{TRACE}-{CALLER}-01"}).status_code == 200
    assert [turn.tags for turn in room.turns()] == [{}]


def test_a_collector_that_is_away_keeps_neither_a_caller_nor_the_end_waiting() -> None:
    room = Room(open_traces("http://127.0.0.1:1", process="api", share=1.0))
    before = datetime.now(UTC)
    assert room.ask(None).status_code == 200
    room.traces.close()
    assert datetime.now(UTC) - before < timedelta(seconds=60)
