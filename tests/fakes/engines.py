"""A ledger of engines in memory."""

from app.domain.ports import EngineState


class MemoryEngineLedger:
    """The `EngineLedger` port over a set and a dict; `wants` is what it asks engines to hold."""

    def __init__(self, *, address: str = "http://engine") -> None:
        self.wants: set[tuple[str, str]] = set()
        self.states: dict[tuple[str, str], tuple[EngineState, str | None]] = {}
        self.history: list[tuple[str, EngineState]] = []
        self._address = address

    def wanted(self) -> set[tuple[str, str]]:
        return set(self.wants)

    def report(self, policy: str, digest: str, state: EngineState, detail: str | None = None) -> None:
        if self.states.get((policy, digest), (None, None))[0] is not state:
            self.history.append((digest, state))
        self.states[(policy, digest)] = (state, detail)

    def addresses(self, digest: str) -> list[str]:
        ready = [held for (_, held), (state, _) in self.states.items() if held == digest and state is EngineState.READY]
        return [self._address] if ready else []

    def forget(self) -> None:
        self.states.clear()
