"""A turn whose event brokers could not take leaves its payload in the trajectory store."""

import pytest

from app.domain.telemetry.events import EventType
from app.domain.telemetry.turns import PayloadClaim
from tests.fakes.gateway import ScriptedEngines, events_of
from tests.fakes.streaming import MemoryClaims
from tests.unit.app.api.test_gateway import ROOMY, ask, service, turns


def test_a_large_turn_leaves_its_payload_in_the_trajectory_store_and_its_event_stays_small() -> None:
    claims = MemoryClaims()
    client, inbox = service(claims=claims, policies=ROOMY)
    text = "word " * 80_000
    assert ask(client, messages=[{"role": "user", "content": text}]).status_code == 200
    (event,) = events_of(inbox, EventType.TURN)
    (turn,) = turns(inbox)
    assert len(event.data) < 2_000
    assert turn.payload == PayloadClaim(segment=f"claim-{turn.inference_id}", digest="d", bytes=1, has_logprobs=True)
    assert (turn.messages, turn.prompt_tokens, turn.completion_tokens, turn.logprobs) == ([], [], [], None)
    assert (turn.usage.completion_tokens, turn.completion) == (5, "Hello, world!")
    kept = claims.payloads[turn.inference_id]
    assert (kept.messages, len(kept.prompt_tokens)) == (({"role": "user", "content": text},), 80_001)


@pytest.mark.parametrize(("tokens", "kept"), [(32_768, 0), (32_769, 1)])
def test_a_prompt_of_more_than_32768_tokens_is_a_large_turn_however_short_its_words_are(tokens: int, kept: int) -> None:
    client, inbox = service(claims=(claims := MemoryClaims()), policies=ROOMY)
    assert ask(client, messages=[{"role": "user", "content": "a " * (tokens - 1)}]).status_code == 200
    assert (len(claims.payloads), len(turns(inbox)[0].prompt_tokens)) == (kept, 0 if kept else tokens)


def test_a_short_prompt_with_much_beside_its_tokens_is_a_large_turn() -> None:
    experts, mass = [[list(range(8))] * 8] * 3_200, [-0.25] * 3_200  # [T, L, K] and [T]: half a megabyte of JSON
    engines = ScriptedEngines(words=["a"] * 3_199, last={"routed_experts": experts, "kept_log_mass": mass})
    client, inbox = service(claims=(claims := MemoryClaims()), engines=engines, policies=ROOMY)
    assert ask(client).status_code == 200
    assert len(events_of(inbox, EventType.TURN)[0].data) < 6_000  # the answer's words stay: labels are made of them
    (kept,) = claims.payloads.values()
    assert (len(kept.routed_experts or ()), len(kept.kept_log_mass or ()), len(kept.logprobs or ())) == (3_200, 3_200, 3_200)


def test_a_large_turn_goes_whole_into_the_inbox_where_the_trajectory_store_is_full() -> None:
    claims = MemoryClaims()
    claims.full = True
    client, inbox = service(claims=claims, policies=ROOMY)
    assert ask(client, messages=[{"role": "user", "content": "word " * 80_000}]).status_code == 200
    (turn,) = turns(inbox)
    assert not turn.payload
    assert len(turn.prompt_tokens) == 80_001
