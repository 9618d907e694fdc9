"""How large a request may be goes with what its model can take; and how fast it may come with its key."""

from typing import Any

import pytest

from app.api.chat.sizes import largest_body, refuse_longer_than_context
from app.api.entry.rates import Bucket, Spending
from app.api.telemetry.intake import Limits
from app.domain.errors import BadRequest, Overloaded
from app.domain.policies import SummaryConfig
from tests.fakes.gateway import policy_config

SUMMARISING = {"summary": SummaryConfig(trigger_tokens=10)}
LIMITS = Limits(tool_chars=100, summarised_chars=50_000, redacted_chars=100, chat_bytes=200_000)


@pytest.mark.parametrize(
    ("policies", "most"),
    [
        ([], 65_636), ([{"max_context_tokens": 1000}], 81_636), ([{"max_context_tokens": 1000}, {"max_context_tokens": 2000}], 97_636),
        ([{"max_context_tokens": 1000} | SUMMARISING], 115_636), ([{"max_context_tokens": 4000} | SUMMARISING], 129_636),
        ([{"max_context_tokens": 100_000}], 200_000),
    ],
)  # fmt: skip
def test_a_body_has_sixteen_bytes_a_token_of_the_longest_context_room_for_tools_and_sixty_four_kilobytes(
    policies: list[dict[str, Any]], most: int
) -> None:
    assert largest_body((policy_config(**config) for config in policies), LIMITS) == most


def test_without_a_word_of_ours_a_body_is_bounded_as_the_documents_promise() -> None:
    """docs/api.md, "Limits": 320 KB and 16 bytes a token, 1 MB where conversations are summarised, at most 4 MB."""
    assert largest_body([], Limits()) == 320 * 1024
    assert largest_body([policy_config(max_context_tokens=1, **SUMMARISING)], Limits()) == (1024 + 320) * 1024
    assert largest_body([policy_config(max_context_tokens=10**9)], Limits()) == 4 * 1024 * 1024


@pytest.mark.parametrize(
    ("config", "most"), [({}, 640), ({"redact": True}, 400), (SUMMARISING, 50_000), ({"redact": True} | SUMMARISING, 400)]
)
def test_a_conversation_has_sixty_four_characters_a_token(config: dict[str, Any], most: int) -> None:
    """Names of fields and roles are characters, too: fifteen of each message."""

    def said(chars: int) -> list[dict[str, Any]]:
        return [{"role": "user", "content": "x" * (chars - 15)}]

    policy = policy_config(max_context_tokens=10, **config)
    refuse_longer_than_context(said(most), policy, LIMITS, sent=100_000)
    with pytest.raises(BadRequest) as error:
        refuse_longer_than_context(said(most + 1), policy, LIMITS, sent=most + 1)
    assert (error.value.param, error.value.code) == ("messages", "context_length_exceeded")
    refuse_longer_than_context(said(most + 1), policy, LIMITS, sent=most)


class Clock:
    """Seconds by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_says_what_is_left_and_when_it_is_whole_again() -> None:
    clock = Clock()
    bucket = Bucket(4.0, clock)
    assert bucket.headers() == [(b"ratelimit-limit", b"4"), (b"ratelimit-remaining", b"4"), (b"ratelimit-reset", b"0")]
    bucket.take(3)
    assert bucket.headers() == [(b"ratelimit-limit", b"4"), (b"ratelimit-remaining", b"1"), (b"ratelimit-reset", b"1")]
    bucket.owe(5)
    assert bucket.headers() == [(b"ratelimit-limit", b"4"), (b"ratelimit-remaining", b"0"), (b"ratelimit-reset", b"2")]
    clock.now += 1.5
    assert bucket.left() == 2.0
    clock.now += 100.0
    assert bucket.left() == 4.0


def test_a_token_is_had_the_moment_it_is_there_and_a_slow_key_has_one() -> None:
    clock = Clock()
    bucket = Bucket(0.5, clock)
    bucket.take(1)
    with pytest.raises(Overloaded) as refused:
        bucket.take(1)
    assert refused.value.retry_after_s == 2.0
    clock.now += 1.5
    with pytest.raises(Overloaded) as refused:
        bucket.take(1)
    assert refused.value.retry_after_s == 0.5
    clock.now += 0.5
    bucket.take(1)


def test_a_batch_is_let_in_by_a_full_bucket_and_paid_for_by_whoever_comes_next() -> None:
    clock = Clock()
    bucket = Bucket(2.0, clock)
    bucket.take(7)
    assert bucket.left() == -5.0
    with pytest.raises(Overloaded) as refused:
        bucket.take(1)
    assert refused.value.retry_after_s == 3.0
    clock.now += 3.0
    bucket.take(1)
    assert bucket.left() == 0.0


def test_of_two_rates_the_one_with_less_left_is_told() -> None:
    clock, spending = Clock(), Spending()
    assert spending.headers() == []
    few, many = Bucket(3.0, clock), Bucket(9.0, clock)
    spending.buckets = [many, few]
    assert spending.headers()[0] == (b"ratelimit-limit", b"3")
    many.take(8)
    assert spending.headers()[:2] == [(b"ratelimit-limit", b"9"), (b"ratelimit-remaining", b"1")]
