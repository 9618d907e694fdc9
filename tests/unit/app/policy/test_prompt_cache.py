"""Prompts that were fed before: as many as fit, the least recently used leaves first."""

import torch

from app.policy.decoding.prompt_cache import Entry, PromptCache


def entry(size: int) -> Entry:
    """Keys and values of so many bytes together, over two layers."""
    return [(torch.zeros(size // 4, dtype=torch.uint8), torch.zeros(size // 4, dtype=torch.uint8)) for _ in range(2)]


def test_exactly_the_same_beginning_is_found_and_counted() -> None:
    cache, kept = PromptCache(100), entry(40)
    cache.keep([1, 2], kept)
    assert cache.find([1, 2]) is kept
    assert cache.find([1]) is None
    assert cache.find([1, 2, 3]) is None
    assert cache.hits == 1
    assert (cache.wants([1, 2]), cache.wants([1])) == (False, True)


def test_the_least_recently_used_leaves_when_the_room_is_full() -> None:
    cache = PromptCache(100)
    for prompt in ([1], [2]):
        cache.keep(prompt, entry(40))
    assert cache.find([1]) is not None
    cache.keep([3], entry(20))  # exactly full
    assert [cache.find([n]) is not None for n in (1, 2, 3)] == [True, True, True]
    cache.keep([4], entry(4))
    assert [cache.find([n]) is not None for n in (1, 2, 3, 4)] == [False, True, True, True]
    cache.keep([5], entry(40))  # what left has made room: 20 + 4 + 40 and the 40 of [2]
    assert [cache.find([n]) is not None for n in (2, 3, 4, 5)] == [False, True, True, True]


def test_a_prompt_that_would_fill_more_than_half_is_not_kept_and_without_room_none_is_wanted() -> None:
    cache = PromptCache(80)
    cache.keep([1], entry(40))
    cache.keep([2], entry(44))
    assert (cache.find([1]) is not None, cache.find([2])) == (True, None)
    cache.clear()
    assert cache.find([1]) is None
    cache.keep([1], entry(40))
    cache.keep([3], entry(40))
    assert cache.find([1]) is not None, "what was cleared takes no room"
    assert not PromptCache(0).wants([1])
