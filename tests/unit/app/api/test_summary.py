"""Self-summarisation: an episode longer than the context window keeps being served, and says how."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from app.api.chat.summary import Context, context_of, shortened, trigger_of
from app.domain.errors import BadConfig, Unavailable
from app.domain.policies import SummaryConfig
from app.domain.ports import EpisodeState, EpisodeSummary
from app.domain.release.assignment import Arm
from app.domain.release.gates import content_hash
from app.domain.telemetry.events import EventType
from app.domain.telemetry.serving import GenerateRequest, GenerationChunk
from app.domain.telemetry.turns import TurnServed
from app.main import create_app
from tests.fakes.gateway import CHAMPION, MemoryEpisodes, ScriptedEngines, collaborators, count_words, events_of, policy_config
from tests.fakes.inbox import MemoryInbox

CONFIG = policy_config(
    max_context_tokens=60, summary=SummaryConfig(trigger_tokens=40, max_tokens=10, instruction="Summarise the conversation.")
)
LONG = "word " * 12
ARM = Arm(digest=CHAMPION, release_id=None, stage="champion", arm="champion", probability=1.0, share=0.0, holdback=0.0)


class Forgetful(ScriptedEngines):
    """Refuses, as an engine does, what is longer than its context window."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerationChunk]:
        assert count_words(request.messages) <= CONFIG.max_context_tokens, "the prompt does not fit the context window"
        async for chunk in ScriptedEngines.generate(self, request):
            yield chunk


def talk(client: TestClient, history: list[dict[str, Any]], text: str) -> str:
    """One more exchange of a client that sends everything every time; returns the answer's id."""
    history.append({"role": "user", "content": text})
    body = {"model": "composer", "messages": history, "tensorzero::episode_id": "ep"}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    history.append({"role": "assistant", "content": response.json()["choices"][0]["message"]["content"]})
    return str(response.json()["id"])


def served(inbox: MemoryInbox) -> list[TurnServed]:
    return [msgspec.json.decode(event.data, type=TurnServed) for event in events_of(inbox, EventType.TURN)]


def service(engines: ScriptedEngines, **changes: Any) -> tuple[TestClient, MemoryInbox]:
    inbox = MemoryInbox()
    return TestClient(create_app(collaborators(inbox=inbox, engines=engines, policies={"composer": CONFIG}, **changes))), inbox


def test_an_episode_longer_than_the_window_is_served_and_its_summaries_are_turns_of_it() -> None:
    client, inbox = service(Forgetful())
    history: list[dict[str, Any]] = [{"role": "system", "content": "Be kind."}]
    answers = [talk(client, history, LONG) for _ in range(10)]
    assert count_words(history) > 2 * CONFIG.max_context_tokens
    turns = served(inbox)
    summaries = [turn for turn in turns if turn.kind == "summary"]
    assert len(summaries) >= 3
    assert [turn.inference_id for turn in turns if turn.kind == "answer"] == answers
    assert {turn.episode_id for turn in turns} == {"ep"}
    assert {turn.version for turn in summaries} == {turns[0].version}
    assert all(turn.logprobs is not None and turn.prompt_tokens for turn in summaries), "a summary is trained on like any turn"
    assert len(events_of(inbox, EventType.EXPOSURE)) == 10, "nobody is served by a summary"
    last = turns[-1].messages
    assert last[0] == {"role": "system", "content": "Be kind.\n\nSummary of the conversation so far:\nHello, world!"}
    assert last[-1] == {"role": "user", "content": LONG}


def test_a_summary_is_written_once_and_used_again() -> None:
    engines = Forgetful()
    client, inbox = service(engines)
    history: list[dict[str, Any]] = []
    for text in (LONG, LONG, LONG, "short", "short"):
        talk(client, history, text)
    assert [turn.kind for turn in served(inbox)].count("summary") == 1


def test_another_gateway_finds_the_summary_in_the_database() -> None:
    first, inbox = service(Forgetful())
    history: list[dict[str, Any]] = []
    for _ in range(3):
        talk(first, history, LONG)
    summary = next(turn for turn in served(inbox) if turn.kind == "summary")
    episodes = MemoryEpisodes()
    episodes.states["ep"] = EpisodeState(
        arm=ARM, last_inference_id="x", summaries=(EpisodeSummary(text="Remember the word.", tags=summary.tags),)
    )
    second, other = service(Forgetful(), episodes=episodes)
    talk(second, history, "short")
    assert [turn.kind for turn in served(other)] == ["answer"]
    assert "Remember the word." in str(served(other)[0].messages[0]["content"])


def test_a_gateway_that_knows_the_episode_still_finds_what_another_has_written_meanwhile() -> None:
    """A balancer sends one turn here and the next one there."""
    episodes = MemoryEpisodes()
    first, written = service(Forgetful(), episodes=episodes)
    second, other = service(Forgetful(), episodes=episodes)
    history: list[dict[str, Any]] = []
    talk(second, history, LONG)
    talk(first, history, LONG)
    talk(first, history, LONG)
    summary = next(turn for turn in served(written) if turn.kind == "summary")
    episodes.states["ep"] = EpisodeState(
        arm=ARM, last_inference_id="x", summaries=(EpisodeSummary(text=summary.completion, tags=summary.tags),)
    )
    talk(second, history, "short")
    assert [turn.kind for turn in served(other)] == ["answer", "answer"]
    assert served(other)[-1].messages[0] == {"role": "system", "content": "Summary of the conversation so far:\nHello, world!"}


def test_a_database_that_is_away_costs_a_second_summary_and_no_answer() -> None:
    class Away(MemoryEpisodes):
        def summaries(self, episode_id: str, policy: str) -> tuple[EpisodeSummary, ...]:
            raise Unavailable("no database")

    client, inbox = service(Forgetful(), episodes=Away())
    history: list[dict[str, Any]] = []
    for _ in range(3):
        talk(client, history, LONG)
    assert [turn.kind for turn in served(inbox)].count("summary") == 1


def test_a_summary_without_a_word_stands_for_nothing() -> None:
    messages = [{"role": "user", "content": str(n)} for n in range(4)]
    tags = {"summary_messages": "2", "summary_of": content_hash(messages[:2])}
    more = {"summary_messages": "3", "summary_of": content_hash(messages[:3])}
    assert context_of(messages, [EpisodeSummary(text="  ", tags=tags)]).covered == 0
    found = context_of(messages, [EpisodeSummary(text="most ", tags=more), EpisodeSummary(text="less", tags=tags)])
    assert (found.covered, found.summary) == (3, "most"), "what another gateway wrote later may stand for less"


def test_practice_is_summarised_at_lengths_that_are_drawn_and_people_s_conversations_at_one() -> None:
    config = SummaryConfig(trigger_tokens=1000, spread=0.4)
    assert {trigger_of(config, f"e{n}", practised=False)(0) for n in range(50)} == {1000}
    drawn = [trigger_of(config, f"e{n}", practised=True)(covered) for n in range(200) for covered in (0, 7)]
    assert 600 <= min(drawn) < 640
    assert 960 < max(drawn) <= 1000
    assert 780 < sum(drawn) / len(drawn) < 820, "evenly: the mean of 400 draws of 600 to 1000 is within three standard errors of 800"
    assert trigger_of(config, "e1", practised=True)(7) == trigger_of(config, "e1", practised=True)(7), "every replica draws the same"
    assert trigger_of(config, "e1", practised=True)(7) != trigger_of(config, "e1", practised=True)(0)
    assert trigger_of(SummaryConfig(), "e1", practised=True)(0) == 0, "off is off in practice too"


@pytest.mark.parametrize(("spread", "trigger"), [(1.0, 10), (-0.1, 10), (0.5, -1)])
def test_a_trigger_that_is_none_is_refused(spread: float, trigger: int) -> None:
    with pytest.raises(BadConfig):
        SummaryConfig(trigger_tokens=trigger, spread=spread)


def test_a_rewritten_history_is_not_answered_from_the_old_summary() -> None:
    client, inbox = service(Forgetful())
    history: list[dict[str, Any]] = []
    for _ in range(3):
        talk(client, history, LONG)
    history[0]["content"] = "something else " * 6
    talk(client, history, "short")
    assert [turn.kind for turn in served(inbox)].count("summary") == 2


def test_a_history_that_never_fitted_is_summarised_piece_by_piece() -> None:
    client, inbox = service(Forgetful())
    history = [{"role": role, "content": LONG} for _ in range(8) for role in ("user", "assistant")]
    talk(client, history, "and now?")
    assert [turn.kind for turn in served(inbox)].count("summary") > 3
    assert served(inbox)[-1].messages[-1]["content"] == "and now?"


def test_the_answer_to_a_tool_call_stays_with_the_call() -> None:
    client, inbox = service(Forgetful())
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    history = [
        {"role": "user", "content": LONG},
        {"role": "assistant", "content": LONG},
        {"role": "user", "content": LONG},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "42", "tool_call_id": "c"},
    ]
    response = client.post("/v1/chat/completions", json={"model": "composer", "messages": history})
    assert response.status_code == 200
    assert [message["role"] for message in served(inbox)[-1].messages] == ["system", "assistant", "tool"]


BODY = [{"role": "user" if n % 2 == 0 else "assistant", "content": f"m{n}"} for n in range(41)]


class Talks:
    """Counts ten tokens a message, writes summaries as they are told, and knows what others wrote."""

    def __init__(self, *words: str, recalled: Context | None = None) -> None:
        self.words = iter(words)
        self.recalled = recalled
        self.counted, self.recalls = 0, 0
        self.written: list[tuple[list[dict[str, Any]], dict[str, str]]] = []

    async def count(self, messages: list[dict[str, Any]]) -> int:
        self.counted += 1
        return 10 * len(messages)

    async def write(self, messages: list[dict[str, Any]], tags: dict[str, str]) -> str:
        self.written.append((messages, tags))
        return next(self.words, "so far")

    def shorten(self, context: Context, *, trigger: int, room: int = 10_000) -> Context:
        async def recall() -> Context:
            self.recalls += 1
            return self.recalled or context

        config = policy_config(
            max_context_tokens=room + 10, summary=SummaryConfig(trigger_tokens=trigger, max_tokens=10, instruction="Sum up.")
        )
        return asyncio.run(shortened(context, config, trigger=lambda _covered: trigger, count=self.count, write=self.write, recall=recall))


def of(messages: int, **more: Any) -> Context:
    return Context(system=[], body=BODY[:messages], **more)


def test_a_prompt_that_is_surely_below_the_trigger_is_not_even_counted() -> None:
    """A token is a byte at least, and a template adds sixteen to a message."""
    bytes_ = sum(len(str(message)) + 16 for message in BODY[:2])
    for trigger, counts in ((bytes_ + 1, 0), (bytes_, 1)):
        talks = Talks()
        assert talks.shorten(of(2), trigger=trigger) == of(2)
        assert (talks.counted, talks.written, talks.recalls) == (counts, [], 0)


@pytest.mark.parametrize(("trigger", "written"), [(0, 0), (31, 0), (30, 1), (1, 1)])
def test_a_prompt_is_summarised_from_its_trigger_on(trigger: int, written: int) -> None:
    talks = Talks("  in short \n", "")
    found = talks.shorten(of(3), trigger=trigger)
    assert talks.recalls == min(written, 1)
    if written:
        assert talks.written[0] == (
            [*BODY[:2], {"role": "user", "content": "Sum up."}],
            {"summary_messages": "2", "summary_of": content_hash(BODY[:2])},
        )
        assert (found.summary, found.covered, found.body) == ("in short", 2, BODY[:3])
        assert found.fed() == [{"role": "system", "content": "Summary of the conversation so far:\nin short"}, BODY[2]]
    else:
        assert found == of(3)


def test_what_another_gateway_wrote_is_taken_where_it_stands_for_more_and_asked_for_once() -> None:
    theirs = of(5, summary="theirs", covered=4)
    talks = Talks(recalled=theirs)
    assert talks.shorten(of(5), trigger=30) == theirs
    assert (talks.written, talks.recalls) == ([], 1)
    older = Talks(recalled=of(5, summary="theirs", covered=2))
    assert older.shorten(of(5, summary="mine", covered=2), trigger=30).summary == "so far"
    assert (len(older.written), older.recalls) == (1, 1)
    assert older.written[0][0][0]["content"].endswith("mine")


def test_no_more_than_sixteen_summaries_are_written_for_one_answer() -> None:
    """There is room for three messages, one of them the request: two of the conversation at first, then one beside the summary."""
    talks = Talks()
    found = talks.shorten(of(41), trigger=1, room=30)
    assert (len(talks.written), found.covered, talks.recalls) == (16, 17, 1)
    assert [int(tags["summary_messages"]) for _, tags in talks.written] == list(range(2, 18))


@pytest.mark.parametrize(("room", "covered"), [(50, 4), (49, 3), (40, 3), (20, 1)])
def test_as_much_is_summarised_as_the_window_takes_at_once(room: int, covered: int) -> None:
    talks = Talks("so far", " ")
    assert talks.shorten(of(5), trigger=1, room=room).covered == covered
    assert talks.written[0][1]["summary_messages"] == str(covered)


def test_where_nothing_fits_or_nothing_is_said_the_conversation_stays_as_it_is() -> None:
    assert Talks().shorten(of(5), trigger=1, room=10) == of(5)
    assert Talks(" \n").shorten(of(5), trigger=1) == of(5)
    assert Talks().shorten(of(1), trigger=1) == of(1)
    assert Talks().shorten(of(0), trigger=1) == of(0)


def test_answers_of_tools_go_with_what_called_them() -> None:
    tools = [*BODY[:2], *({"role": "tool", "content": str(n)} for n in range(3))]
    talks = Talks()
    assert talks.shorten(Context(system=[], body=tools), trigger=1).covered == 1


def test_a_summary_of_everything_and_one_of_something_else_are_not_used() -> None:
    def summary(covered: int, *, of: int | None = None) -> EpisodeSummary:
        return EpisodeSummary(text="s", tags={"summary_messages": str(covered), "summary_of": content_hash(BODY[: of or covered])})

    assert context_of(BODY[:4], [summary(4)]).covered == 0
    assert context_of(BODY[:4], [summary(3)]).covered == 3
    assert context_of(BODY[:4], [summary(3, of=2)]).covered == 0
    assert context_of(BODY[:4], [EpisodeSummary(text="s", tags={})]).covered == 0
    system = [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}]
    found = context_of([*system, *BODY[:4]], [summary(3)])
    assert found.fed() == [{"role": "system", "content": "a\n\nb\n\nSummary of the conversation so far:\ns"}, BODY[3]]
    assert context_of(system, []) == Context(system=system, body=[])


def test_a_drawn_trigger_is_a_token_at_least() -> None:
    config = SummaryConfig(trigger_tokens=1, spread=0.99)
    assert {trigger_of(config, f"e{n}", practised=True)(0) for n in range(50)} == {1}
