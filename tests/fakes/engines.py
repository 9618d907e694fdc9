"""A ledger of engines in memory."""

from app.domain.ports import EngineState, Holder


class MemoryEngineLedger:
    """The `EngineLedger` port over a set and a dict; `wants` is what it asks engines to hold."""

    def __init__(self, *, address: str = "http://engine") -> None:
        self.wants: set[tuple[str, str]] = set()
        self.states: dict[tuple[str, str], tuple[EngineState, str | None]] = {}
        self.elsewhere: dict[str, list[str]] = {}
        """Addresses of other engines that hold a digest."""
        self.fault: Exception | None = None
        """Why it does not say what is wanted."""
        self.by_role: dict[str, list[str]] = {}
        self.history: list[tuple[str, EngineState]] = []
        self._address = address

    def wanted(self) -> set[tuple[str, str]]:
        if self.fault is not None:
            raise self.fault
        return set(self.wants)

    def report(self, policy: str, digest: str, state: EngineState, detail: str | None = None) -> None:
        if self.states.get((policy, digest), (None, None))[0] is not state:
            self.history.append((digest, state))
        self.states[(policy, digest)] = (state, detail)

    def addresses(self, digest: str) -> list[str]:
        ready = [held for (_, held), (state, _) in self.states.items() if held == digest and state is EngineState.READY]
        return [*([self._address] if ready else []), *self.elsewhere.get(digest, [])]

    def holders(self, digest: str) -> dict[str, Holder]:
        found = [detail for (_, held), (state, detail) in self.states.items() if held == digest and state is EngineState.READY]
        return dict.fromkeys([self._address] * len(found), Holder(doubt=found[0] if found else None))

    def roles(self, policy: str) -> dict[str, list[str]]:
        return self.by_role

    def forget(self) -> None:
        self.states.clear()
