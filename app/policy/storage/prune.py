"""Removes snapshots that nothing needs any more. What is needed is asked again right before each removal, and never guessed: a version that
another is built on (a delta's parent, the base below an adapter) is needed as long as that one is."""

import json
import logging
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Protocol

log = logging.getLogger(__name__)


class Shelf(Protocol):
    """A weight store that can be cleared."""

    def ages_s(self) -> dict[str, float]:
        """Seconds since each version was published, by digest."""
        ...

    def built_on(self, digest: str) -> set[str]:
        """Versions without which this one cannot be read or served."""
        ...

    def remove(self, digest: str) -> None:
        """Take a version away; readers see it whole or not at all."""
        ...


def with_bases(shelf: Shelf, digests: Iterable[str]) -> set[str]:
    """The digests and everything below them."""
    kept: set[str] = set()
    waiting = list(digests)
    while waiting:
        digest = waiting.pop()
        if digest not in kept:
            kept.add(digest)
            waiting += shelf.built_on(digest)
    return kept


def prune(shelf: Shelf, *, known: Collection[str], needed: Callable[[], set[str]], min_age_s: float, dry: bool = False) -> list[str]:
    """Remove the `known` versions (others are somebody else's) that are older than `min_age_s` and not needed; returns their digests."""
    gone: list[str] = []
    old = sorted(digest for digest, age in shelf.ages_s().items() if age >= min_age_s and digest in known)
    keep = with_bases(shelf, needed())
    for digest in [digest for digest in old if digest not in keep]:
        if not dry:
            if digest in with_bases(shelf, needed()):  # somebody wanted it meanwhile
                continue
            shelf.remove(digest)
            log.info("weights removed digest=%s", digest)
        gone.append(digest)
    return gone


def adapter_base(config: Path) -> set[str]:
    """The base that the adapter in a snapshot lies on, from its configuration file; empty where there is none."""
    return base_of(config.read_bytes()) if config.is_file() else set()


def base_of(config: bytes) -> set[str]:
    """The same from its content."""
    base = json.loads(config).get("ratchet", {}).get("base")
    return {str(base)} if base else set()
