"""What the product itself notes about answers, one JSON object a line: how long people waited, and what held-out people kept."""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec

from pipelines.simulation.client import Answer
from pipelines.simulation.people import Person
from pipelines.simulation.product import Ask, Reaction


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One answer as the product saw it."""

    at: datetime
    version: str | None
    waited_s: float
    number: int
    """Of the visit; the same number with the same seed is the same person with the same question."""
    person: str
    question: str = ""
    """What stood in the file; empty for people who are not held out, whose texts nobody needs."""
    answer: str = ""
    kept: str = ""

    @property
    def share(self) -> float:
        """Of the answer's characters, those that were still there at the last look."""
        return len(self.kept) / max(1, len(self.answer))


@dataclass(frozen=True)
class Diary:
    """A file that grows."""

    path: Path

    def note(self, person: Person, ask: Ask, answer: Answer, reaction: Reaction, *, number: int, waited_s: float) -> None:
        """Write one answer down."""
        seen = Entry(
            at=answer.received_at, version=answer.version, waited_s=round(waited_s, 3), number=number, person=person.name,
            question=ask.prompt if person.held_out else "", answer=answer.text if person.held_out else "",
            kept=reaction.edits[-1] if person.held_out else "",
        )  # fmt: skip
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(seen) + b"\n")

    def read(self, position: int = 0) -> tuple[list[Entry], int]:
        """Whole lines from a position in bytes on, and the position after them."""
        if not self.path.exists():
            return [], position
        with self.path.open("rb") as file:
            file.seek(position)
            told = file.read()
        whole = told[: told.rfind(b"\n") + 1]
        return [msgspec.json.decode(line, type=Entry) for line in whole.splitlines()], position + len(whole)
