"""Bodies are read within their limits, to the byte; and whatever was counted as in flight is given back."""

import asyncio
import gzip
import io
import random
import zlib
from collections.abc import Sequence
from typing import Any

import pytest

from app.api.telemetry.intake import GUNZIP_BYTES, SMALL_GZIP, Intake, Limits, check_tags, check_tree
from app.domain.errors import BadRequest, Overloaded
from app.listening.errors import HttpError

GZIP = {"content-encoding": "gzip"}


def read(
    *chunks: bytes, limits: Limits | None = None, intake: Intake | None = None, headers: dict[str, str] | None = None,
    most: int | None = None, leaves: bool = False,
) -> bytes:  # fmt: skip
    """The body that comes in these pieces; `leaves`: the client goes away before the last one."""
    reader = intake or Intake(limits or Limits())
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    messages += [{"type": "http.disconnect"}] if leaves else []
    if not leaves:
        messages[-1] = {"type": "http.request", "body": chunks[-1]}
    coming = iter(messages)

    async def receive() -> Any:
        return next(coming)

    scope = {"type": "http", "headers": [(name.encode(), value.encode()) for name, value in (headers or {}).items()]}
    return asyncio.run(reader.read(scope, receive, max_bytes=most))


def refusal(*chunks: bytes, **more: Any) -> tuple[int, str]:
    """Status and code of a body that is refused, and leaves nothing in flight."""
    intake = more.pop("intake", None) or Intake(more.pop("limits", None) or Limits())
    before = intake.in_flight
    with pytest.raises((HttpError, BadRequest)) as refused:
        read(*chunks, intake=intake, **more)
    assert intake.in_flight == before
    return getattr(refused.value, "status", 400), refused.value.code


NOISE = random.Random(7).randbytes(300_000)
"""Which gzip makes no smaller."""


@pytest.mark.parametrize("pieces", [[10], [4, 6], [1, 0, 9], [5, 5, 0]])
def test_a_body_may_be_as_large_as_its_limit_however_it_comes(pieces: Sequence[int]) -> None:
    chunks = [b"x" * size for size in pieces]
    intake = Intake(Limits(batch_bytes=10))
    assert read(*chunks, intake=intake) == b"x" * 10
    assert intake.in_flight == 10
    intake.release(10)
    assert intake.in_flight == 0
    assert refusal(*chunks, b"y", limits=Limits(batch_bytes=10)) == (413, "body_too_large")
    assert refusal(*chunks[:-1], chunks[-1] + b"y", limits=Limits(batch_bytes=10)) == (413, "body_too_large")
    assert read(*chunks, b"y", limits=Limits(batch_bytes=10), most=11) == b"x" * 10 + b"y"


@pytest.mark.parametrize(("length", "good"), [("10", True), ("11", False), ("-1", False), ("ten", False), ("", False), ("0", True)])
def test_what_is_announced_is_refused_before_it_is_read(length: str, good: bool) -> None:
    if good:
        assert read(b"x", limits=Limits(batch_bytes=10), headers={"content-length": length}) == b"x"
    else:
        assert refusal(b"x", limits=Limits(batch_bytes=10), headers={"content-length": length}) == (413, "body_too_large")


def test_names_and_values_of_headers_count_together() -> None:
    limits = Limits(header_bytes=20)
    assert read(b"x", limits=limits, headers={"accept": "1234", "from": "123456"}) == b"x"
    assert refusal(b"x", limits=limits, headers={"accept": "1234", "from": "1234567"}) == (431, "headers_too_large")


@pytest.mark.parametrize(("said", "good"), [("", True), ("identity", True), (" Identity ", True), ("br", False), ("gzip, gzip", False)])
def test_an_encoding_that_nobody_knows_is_refused(said: str, good: bool) -> None:
    if good:
        assert read(b"x", headers={"content-encoding": said}) == b"x"
    else:
        assert refusal(b"x", headers={"content-encoding": said}) == (415, "encoding")


def test_who_goes_away_in_the_middle_leaves_nothing_behind() -> None:
    assert refusal(b"half", leaves=True) == (400, "disconnected")
    assert refusal(leaves=True) == (400, "disconnected")


def test_bytes_in_flight_are_counted_over_all_bodies_and_those_of_a_refused_one_are_not() -> None:
    intake = Intake(Limits(in_flight_bytes=10))
    read(b"x" * 6, intake=intake)
    read(b"x" * 4, intake=intake)
    for chunks in ([b"x"], [b"", b"x"]):
        with pytest.raises(Overloaded) as refused:
            read(*chunks, intake=intake)
        assert refused.value.retry_after_s == 1.0
    assert intake.in_flight == 10
    intake.release(6)
    assert read(b"xxx", b"yyy", intake=intake) == b"xxxyyy"
    assert intake.in_flight == 10


@pytest.mark.parametrize("size", [100, SMALL_GZIP, 200_000])
def test_a_packed_body_counts_as_what_it_is_unpacked(size: int) -> None:
    body = NOISE[:size]
    packed = gzip.compress(body)
    intake = Intake(Limits(unzipped_bytes=size))
    assert read(packed, intake=intake, headers=GZIP) == body
    assert intake.in_flight == size
    assert refusal(packed, limits=Limits(unzipped_bytes=size - 1), headers=GZIP) == (413, "gzip")
    assert read(packed, headers=GZIP, most=len(packed)) == body
    assert refusal(gzip.compress(body + b"x"), headers=GZIP, most=size) == (413, "body_too_large" if len(packed) > size else "gzip")


def test_sixty_four_kilobytes_are_free_and_of_the_rest_a_hundred_times_what_came() -> None:
    size = next(size for size in range(GUNZIP_BYTES, 200_000) if size == 64 * 1024 + 100 * len(gzip.compress(bytes(size))))
    assert len(read(gzip.compress(bytes(size)), headers=GZIP)) == size
    assert refusal(gzip.compress(bytes(size + 1)), headers=GZIP) == (413, "gzip")
    assert refusal(gzip.compress(bytes(size)), headers=GZIP, limits=Limits(gzip_ratio=99)) == (413, "gzip")


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"plain",
        gzip.compress(b"x")[:-1],
        gzip.compress(b"x") + b"y",
        gzip.compress(NOISE) + b"y",
        gzip.compress(NOISE)[:-1],
        zlib.compress(b"x"),
    ],
    ids=["nothing", "plain", "short", "more", "much more", "much short", "zlib"],
)
def test_what_is_cut_off_or_has_something_behind_it_is_no_gzip(broken: bytes) -> None:
    assert refusal(broken, headers=GZIP) == (400, "encoding")


def test_a_head_longer_than_what_is_unpacked_at_once_is_read_to_its_end() -> None:
    packed = io.BytesIO()
    with gzip.GzipFile(filename="f" * 5000, mode="wb", fileobj=packed) as file:
        file.write(b"body")
    assert read(packed.getvalue(), headers=GZIP) == b"body"


def test_a_body_that_does_not_come_to_its_end_is_given_up_and_the_next_is_read() -> None:
    intake = Intake(Limits(body_s=0.02))
    scope = {"type": "http", "headers": []}

    async def never() -> Any:
        await asyncio.Event().wait()

    async def at_once() -> Any:
        return {"type": "http.request", "body": b"x"}

    async def story() -> bytes:
        for _ in range(2):
            async with asyncio.timeout(10):
                with pytest.raises(HttpError, match=r"not complete after 0\.02 s") as refused:
                    await intake.read(scope, never)
            assert (refused.value.status, refused.value.code) == (408, "slow_body")
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0, "it was the body that was given up, not whoever reads it"
        leaving = asyncio.ensure_future(Intake(Limits()).read(scope, never))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        return await intake.read(scope, at_once)

    assert asyncio.run(story()) == b"x"


def nested(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = [value]
    return value


LIMITS = Limits(depth=4, keys_per_object=3, nodes=8)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (nested(3), None), (nested(4), "too_deep"), ({"a": {"b": {"c": 1}}}, None), ({"a": {"b": {"c": {}}}}, None),
        ({"a": {"b": {"c": {"d": 1}}}}, "too_deep"),
        ({"a": 1, "b": 2, "c": 3}, None), ({"a": 1, "b": 2, "c": 3, "d": 4}, "too_many_keys"), ([{"a": 1, "b": 1, "c": 1}], None),
        ([1] * 7, None), ([1] * 8, "too_many_values"), ([[1, 2, 3], [4]], None), ([[1, 2, 3], [4, 5]], None),
        ([[1, 2, 3], [4, 5, 6]], "too_many_values"),
        ([{"a": 1, "b": 2}, 1, 2], None), ([{"a": 1, "b": 2}, 1, 2, 3], "too_many_values"),
        ("plain", None), ("a\x00", "nul"), (["a\x00"], "nul"), ({"a\x00": 1}, "nul"), ({"a": [["\x00"]]}, "nul"), (None, None), (3.5, None),
    ],
)  # fmt: skip
def test_a_value_is_as_deep_as_wide_and_as_large_as_it_may_be(value: object, code: str | None) -> None:
    if code is None:
        check_tree(value, LIMITS)
        return
    with pytest.raises(BadRequest) as refused:
        check_tree(value, LIMITS)
    assert (refused.value.code, refused.value.param) == (code, "value")


def test_tags_are_as_many_as_keys_and_hold_what_a_database_can() -> None:
    check_tags({"a": "1", "b": "2", "c": "3"}, LIMITS)
    for tags, code in ((dict.fromkeys("abcd", "x"), "too_many_keys"), ({"a": "x\x00"}, "nul"), ({"\x00": "x"}, "nul")):
        with pytest.raises(BadRequest) as refused:
            check_tags(tags, LIMITS)
        assert (refused.value.code, refused.value.param) == (code, "tags")


@pytest.mark.parametrize(
    ("value", "beyond", "code"),
    [
        (nested(31), nested(32), "too_deep"), ({str(n): 1 for n in range(256)}, {str(n): 1 for n in range(257)}, "too_many_keys"),
        ([1] * 19_999, [1] * 20_000, "too_many_values"),
    ],
)  # fmt: skip
def test_without_a_word_of_ours_a_value_is_bounded_as_the_documents_promise(value: object, beyond: object, code: str) -> None:
    """docs/api.md, "Limits": 32 levels, 256 keys an object, 20,000 values."""
    check_tree(value, Limits())
    with pytest.raises(BadRequest) as refused:
        check_tree(beyond, Limits())
    assert refused.value.code == code


def test_without_a_word_of_ours_a_body_is_bounded_as_the_documents_promise() -> None:
    """1 MB, 2 MB and 100 times its size after gunzip, 16 KB of headers; 32 MB at once."""
    assert len(read(bytes(2**20))) == 2**20
    assert refusal(bytes(2**20 + 1)) == (413, "body_too_large")
    assert read(b"x", headers={"a": "h" * (2**14 - 1)}) == b"x"
    assert refusal(b"x", headers={"a": "h" * 2**14}) == (431, "headers_too_large")
    dull = b"".join(bytes([one]) * 8 for one in NOISE)
    assert len(read(gzip.compress(dull[: 2**21]), headers=GZIP)) == 2**21
    assert refusal(gzip.compress(dull[: 2**21 + 1]), headers=GZIP) == (413, "gzip")
    intake = Intake(Limits())
    intake.in_flight = 2**25 - 1
    assert read(b"x", intake=intake) == b"x"
    with pytest.raises(Overloaded):
        read(b"x", intake=intake)
