"""What this process remembers about running episodes, and where it looks up those it does not know."""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import msgspec

from app.domain.errors import Unavailable
from app.domain.ports import Episodes, EpisodeSummary
from app.domain.release.assignment import Arm
from app.domain.release.holdouts import HELD
from app.domain.release.releases import Route

log = logging.getLogger("ratchet.api")
T = TypeVar("T")
PATIENCE_S = 1.0
"""How long a request waits to hear of an episode that another replica served."""
ASK_AGAIN_S = 2.0
"""So long nobody asks a database that did not answer."""
THREADS = 4
REMEMBERED = 100_000
"""Episodes kept in memory, the least recently used forgotten first; about 1 KB each."""


class Conversation(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A running episode. Unknown to the collector, which else walks through all of them, 40 ms and more, while everybody waits."""

    arm: Arm
    last_inference_id: str
    summaries: tuple[EpisodeSummary, ...] = ()
    """Self-written summaries, oldest first."""


class Conversations:
    """An LRU in front of the `Episodes` port.

    Two policies may serve turns of one episode; each has its own conversation, so that nobody goes on with another policy's.
    """

    def __init__(self, episodes: Episodes, *, remembered: int = REMEMBERED, patience_s: float = PATIENCE_S) -> None:
        self._episodes = episodes
        self._remembered = remembered
        self._patience_s = patience_s
        self._away_until = float("-inf")
        self._threads = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="episodes")
        self._known: OrderedDict[tuple[str, str], Conversation] = OrderedDict()
        """By episode and policy."""

    async def find(self, episode_id: str, policy: str) -> Conversation | None:
        """What is known about an episode of that policy. Raises `Unavailable`."""
        known = self._known.get((episode_id, policy))
        if known is not None:
            self._known.move_to_end((episode_id, policy))
            return known
        state = await self._asked(partial(self._episodes.find, episode_id, policy))
        if state is None:
            return None
        return Conversation(arm=state.arm, last_inference_id=state.last_inference_id, summaries=state.summaries)

    async def find_or_begin(self, episode_id: str, policy: str) -> Conversation | None:
        """What is known about an episode; None too where the database that would know is away.

        It is drawn anew then, and to the same arm while the stage is the same.
        """
        try:
            return await self.find(episode_id, policy)
        except Unavailable as error:
            log.warning("episode_not_looked_up episode_id=%s error=%s", episode_id, error)
            return None

    async def recalled(self, episode_id: str, policy: str, known: Sequence[EpisodeSummary]) -> list[EpisodeSummary]:
        """What was written about the episode, here and elsewhere; what is known here where the database does not answer."""
        try:
            written = await self._asked(partial(self._episodes.summaries, episode_id, policy))
        except Unavailable as error:
            log.warning("summaries_not_read episode_id=%s error=%s: another may be written of the same", episode_id, error)
            return list(known)
        return [*written, *(summary for summary in known if summary not in written)]

    async def _asked(self, ask: Callable[[], T]) -> T:
        if time.monotonic() < self._away_until:
            raise Unavailable("the database did not answer a moment ago: check RATCHET_DATABASE_URL and its server")
        try:
            async with asyncio.timeout(self._patience_s):
                return await asyncio.get_running_loop().run_in_executor(self._threads, ask)
        except TimeoutError as error:
            self._away_until = time.monotonic() + ASK_AGAIN_S
            raise Unavailable("the database is silent: check RATCHET_DATABASE_URL and its server") from error

    async def last_inference(self, episode_id: str, policies: Iterable[str]) -> str | None:
        """The newest inference of an episode under any of these policies; ids are in order of time."""
        found = [known.last_inference_id for policy in policies if (known := await self.find(episode_id, policy)) is not None]
        return max(found, default=None)

    def remember(self, episode_id: str, *, policy: str, arm: Arm, inference_id: str, summaries: tuple[EpisodeSummary, ...] = ()) -> None:
        """Note the newest turn of an episode."""
        known = self._known.pop((episode_id, policy), None)
        self._known[episode_id, policy] = Conversation(
            arm=arm, last_inference_id=inference_id, summaries=known.summaries if known is not None else summaries
        )
        while len(self._known) > self._remembered:
            self._known.popitem(last=False)

    def remember_summary(self, episode_id: str, policy: str, summary: EpisodeSummary) -> None:
        """Note what the model wrote about an episode's beginning; forgotten episodes find it in the database."""
        known = self._known.get((episode_id, policy))
        if known is not None:
            self._known[episode_id, policy] = msgspec.structs.replace(known, summaries=(*known.summaries, summary))

    def forget(self, episode_id: str, policy: str) -> None:
        """The episode is over."""
        self._known.pop((episode_id, policy), None)


def may_continue(arm: Arm, route: Route) -> bool:
    """Whether a running episode may finish on its arm: its version is still one that is served, and was not rolled back."""
    pointer, holdout = route.pointer, route.holdout
    if arm.arm == HELD:
        served = set() if holdout is None else {holdout.digest}
    else:
        served = {pointer.digest, pointer.previous, pointer.reference, pointer.anchor, route.canary_digest}
    return arm.digest in served and arm.digest not in route.quarantined
