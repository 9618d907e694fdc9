"""Who drafts for the rows of a decoder: prompt lookup where it has a match, the draft head, where there is one, else.

Without a head nothing is measured and no state is kept: a step costs what it did.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from app.domain.telemetry.turns import SamplingParams
from app.policy.decoding.generation import Generation
from app.policy.decoding.payoff import Payoff


class Head(Protocol):
    """Guesses from states: `app.policy.decoding.draft_head.HeadDrafter`."""

    def draft(
        self, states_ND: Tensor, tokens: Sequence[int], uniforms: Sequence[Sequence[float]], sampling: Sequence[SamplingParams]
    ) -> list[list[int]]:
        """The tokens that may follow each row's newest one, of which `states_ND` is the state that it was drawn from: as many as there are
        `uniforms`, the numbers that they will be drawn with, as `sampling` says."""
        ...


@dataclass
class Count:
    """Tokens that were fed ahead, and those of them that were drawn."""

    drafted: int = 0
    accepted: int = 0

    def said(self) -> dict[str, Any]:
        """For the engine's health."""
        share = round(self.accepted / self.drafted, 4) if self.drafted else None
        return {"drafted": self.drafted, "accepted": self.accepted, "acceptance": share}


@dataclass
class Drafting:
    """The drafters of one decoder."""

    rows: int
    """Rows up to which anything is drafted."""
    context: int
    head: Head | None = None
    payoff: Payoff = field(default_factory=Payoff)
    by_lookup: Count = field(default_factory=Count)
    by_head: Count = field(default_factory=Count)
    _step: tuple[float, int, bool | None] = (0.0, 0, None)
    """When the step began, its rows, and whether the head drafted: None where lookup did."""
    _emitted: int = 0

    def equip(self, head: Head | None) -> None:
        """Draft with this head from now on; what was measured of another is forgotten."""
        self.head, self.payoff, self.by_head = head, Payoff(), Count()

    def said(self) -> dict[str, Any]:
        """Acceptance by drafter, and how the head stands."""
        if self.head is None:
            return {"lookup": self.by_lookup.said()}
        gain = None if self.payoff.gain is None else round(self.payoff.gain, 3)
        return {"lookup": self.by_lookup.said(), "head": {**self.by_head.said(), "state": self.payoff.state, "gain": gain}}

    def drafts(self, rows: list[Generation]) -> list[list[int]]:
        """What may follow each row's newest token; nothing where so many rows decode that feeding more costs as much as it saves."""
        began = 0.0 if self.head is None else time.perf_counter()
        self._step = began, 0, None
        if len(rows) > self.rows:
            return [[] for _ in rows]
        room = [min(row.max_tokens - len(row.tokens), self.context - row.cached - 1) - 1 for row in rows]
        drafts = [[] if row.lookup is None else row.lookup.draft(most) for row, most in zip(rows, room, strict=True)]
        if self.head is not None:
            found = any(drafts)
            by_head = self._by_head(self.head, rows, drafts, room)
            self._step, self._emitted = (began, len(rows), None if found else by_head), 0
        return drafts

    def _by_head(self, head: Head, rows: list[Generation], drafts: list[list[int]], room: list[int]) -> bool:
        """Fill in what lookup left empty; whether there was any of it."""
        wanted: dict[int, int] = {}
        if self.payoff.allows(len(rows)):
            for index, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
                if not draft and row.lookup is not None and row.state is not None and (length := min(row.pace.length, room[index])) > 0:
                    wanted[index] = length
        if wanted:
            drafted, most = [rows[index] for index in wanted], max(wanted.values())
            found = head.draft(
                torch.stack([row.state for row in drafted if row.state is not None]), [row.newest for row in drafted],
                [row.upcoming(most) for row in drafted], [row.sampling for row in drafted],
            )  # fmt: skip
            for (index, length), tokens in zip(wanted.items(), found, strict=True):
                drafts[index] = tokens[:length]
        for index, row in enumerate(rows):
            row.by_head = index in wanted
        return bool(wanted)

    def replayed(self, row: Generation, *, drafted: int, emitted: int, state_D: Tensor) -> None:
        """So many tokens of a row were drawn, of `drafted` that were fed ahead; the last of them from this state."""
        count = self.by_head if row.by_head else self.by_lookup
        count.drafted, count.accepted = count.drafted + drafted, count.accepted + emitted - 1
        if row.lookup is not None:
            row.lookup.emitted(row.tokens[-emitted:], drafted=0 if row.by_head else drafted)
        if self.head is not None:
            row.pace.emitted(emitted, drafted=drafted if row.by_head else 0)
            row.state, row.by_head = state_D, False
            self._emitted += emitted

    def stepped(self, *, alone: bool) -> None:
        """The step ended; `alone`: it fed no prompts, and its time is that of its rows."""
        began, rows, by_head = self._step
        if self.head is not None and alone and rows and by_head is not None:
            self.payoff.took(rows=rows, seconds=time.perf_counter() - began, emitted=self._emitted if by_head else None)
