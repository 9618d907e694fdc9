"""How many answers of one policy are written at a time, so that one policy's rush does not take the engines from another."""

from collections import Counter
from collections.abc import Callable

from app.domain.errors import Overloaded


class Slots:
    """Counts the answers under way, by policy. Belongs to one event loop: each replica of the gateway counts its own."""

    def __init__(self) -> None:
        self._taken: Counter[str] = Counter()

    def take(self, policy: str, *, most: int) -> Callable[[], None]:
        """Take one; returns what gives it back, harmless when called again. `most` 0 is no bound. Raises `Overloaded`."""
        if most and self._taken[policy] >= most:
            raise Overloaded(
                f"{policy} has {most} answers under way here, its max_concurrent: retry in a second, or raise it", retry_after_s=1.0
            )
        self._taken[policy] += 1
        held = [policy]

        def give_back() -> None:
            if held:
                self._taken[held.pop()] -= 1

        return give_back
