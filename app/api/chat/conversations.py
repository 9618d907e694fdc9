"""What this process remembers about running episodes, and where it looks up those it does not know."""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from app.domain.ports import Episodes, EpisodeSummary
from app.domain.release.assignment import Arm
from app.domain.release.holdouts import HELD
from app.domain.release.releases import Route

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

    def __init__(self, episodes: Episodes, *, remembered: int = REMEMBERED) -> None:
        self._episodes = episodes
        self._remembered = remembered
        self._known: OrderedDict[tuple[str, str], Conversation] = OrderedDict()
        """By episode and policy."""

    async def find(self, episode_id: str, policy: str) -> Conversation | None:
        """What is known about an episode of that policy."""
        known = self._known.get((episode_id, policy))
        if known is not None:
            self._known.move_to_end((episode_id, policy))
            return known
        state = await asyncio.to_thread(self._episodes.find, episode_id, policy)
        if state is None:
            return None
        return Conversation(arm=state.arm, last_inference_id=state.last_inference_id, summaries=state.summaries)

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
