"""Rates, forms, uses of keys and what tokens are good for: each bound from both sides."""

import asyncio
from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from starlette.requests import Request
from starlette.types import Message

from app.api.entry.doorkeeper import read_form
from app.api.entry.rates import Bucket
from app.api.entry.uses import Uses
from app.domain.access import Scope, split_key
from app.domain.errors import BadRequest, Overloaded, RatchetError
from tests.fakes.clock import FrozenClock
from tests.fakes.gateway import MemoryKeys

CLOCK = FrozenClock()


class Seconds:
    """A clock that is moved by hand."""

    at = 100.0

    def __call__(self) -> float:
        return self.at


def test_a_bucket_holds_a_second_s_worth_and_at_least_one() -> None:
    seconds = Seconds()
    slow, fast = Bucket(0.25, seconds), Bucket(4, seconds)
    assert [bucket.left() for bucket in (slow, fast)] == [1.0, 4.0]
    fast.take(3)
    seconds.at += 0.25
    assert fast.left() == 2.0
    assert fast.headers() == [(b"ratelimit-limit", b"4"), (b"ratelimit-remaining", b"2"), (b"ratelimit-reset", b"1")]
    seconds.at += 60
    assert fast.left() == 4.0, "no more than one second's worth"
    assert fast.headers()[2] == (b"ratelimit-reset", b"0")
    fast.owe(6)  # of a body that took its time to come: nothing gathered meanwhile
    assert (fast.left(), fast.headers()[1:]) == (-2.0, [(b"ratelimit-remaining", b"0"), (b"ratelimit-reset", b"2")])
    with pytest.raises(Overloaded, match=r"limit is 4 a second: come back in 0\.8 s") as raised:
        fast.take(1)
    assert raised.value.retry_after_s == 0.75
    seconds.at += 0.75
    fast.take(1)
    assert fast.left() == 0.0


def form(*chunks: bytes, kind: str = "application/x-www-form-urlencoded") -> dict[str, str] | str:
    left = [*chunks] or [b""]

    async def receive() -> Message:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    request = Request({"type": "http", "method": "POST", "headers": [(b"content-type", kind.encode())]}, receive)
    try:
        return asyncio.run(read_form(request))
    except RatchetError as error:
        return f"{type(error).__name__} {getattr(error, 'status', '')}"


def test_a_form_is_read_whole_with_what_is_empty_and_the_last_word_of_two() -> None:
    assert form(b"a=1&b=", b"&a=2", kind="APPLICATION/X-WWW-Form-urlencoded ; charset=utf-8") == {"a": "2", "b": ""}
    assert form() == {}


def test_a_form_has_its_bounds_and_is_one() -> None:
    assert form(b"a=" + b"x" * (64 * 1024 - 2)) == {"a": "x" * (64 * 1024 - 2)}
    assert form(b"a=" + b"x" * (64 * 1024 - 2), b"x", b"never read") == "HttpError 413"
    assert len(form(b"&".join(b"a%d=" % n for n in range(200)))) == 200
    for wrong in (b"&".join(b"a%d=" % n for n in range(201)), b"a", b"a=%ff", b"\xff=1"):
        assert form(wrong) == f"{BadRequest.__name__} "
    assert form(b"a=1", kind="application/json") == f"{BadRequest.__name__} "


def test_what_another_process_wrote_of_a_key_s_use_is_not_written_again_and_an_ended_key_is_forgotten() -> None:
    keys = MemoryKeys()
    keys.add(Scope.READ)
    written = list[dict[str, datetime]]()
    uses = Uses(keys, clock=CLOCK, thread=None)  # pyright: ignore[reportArgumentType] - nothing is written here
    uses.write_soon = lambda: written.append(dict(uses._unwritten))
    key = keys.keys[0]
    uses.know([replace(key, last_used_at=CLOCK() - timedelta(seconds=59))])
    uses.note(key)
    assert written == []
    uses.know([])
    uses.know([replace(key, last_used_at=CLOCK() - timedelta(seconds=60))])
    assert uses._used_at == {key.id: CLOCK() - timedelta(seconds=60)}
    uses.note(key)
    assert written == [{key.id: CLOCK()}]
    uses.know([replace(key, last_used_at=CLOCK() - timedelta(seconds=60))])
    assert uses._used_at == {key.id: CLOCK()}, "what was noted here is newer than what is written"
    uses.know([])
    assert uses._used_at == {}


@pytest.mark.parametrize(
    ("text", "parts"),
    [("rk_00000000_x", ("rk_00000000", "x")), ("rk_00000000_", None), ("rk_000000000x", None), ("sk_00000000_x", None), ("", None)],
)
def test_a_key_s_text_has_a_prefix_and_a_secret(text: str, parts: tuple[str, str] | None) -> None:
    assert split_key(text) == parts
