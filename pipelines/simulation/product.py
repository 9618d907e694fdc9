"""The product people use: a code editor with a model inside, and what they do with its answers."""

import random
from dataclasses import dataclass
from typing import Any

from pipelines.simulation import editing
from pipelines.simulation.people import Person
from pipelines.simulation.problems import Problem, problems
from pipelines.simulation.words import follow_up

SYSTEM = "You complete Python code in an editor."


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What a person asks for."""

    messages: list[dict[str, Any]]
    task: str
    """Sent as metadata; becomes part of the turn's segment."""
    language: str
    prompt: str
    """What stands in the file already."""


@dataclass(frozen=True, kw_only=True)
class Reaction:
    """What a person does with an answer."""

    edits: tuple[str, ...]
    """What is left of the answer at each horizon, first horizon first."""
    follow_up: str | None
    regenerate: bool
    undo: bool
    success: bool
    """Whether the task got done: gold, not part of the reward."""


class Editor:
    """A code editor: the answer goes into the file after the prompt; people keep what runs and what they like of it."""

    def ask(self, person: Person, draw: random.Random) -> Ask:
        """One of the real problems; held-out people draw from the held-out ones."""
        problem = draw.choice(problems(held_out=person.held_out))
        return Ask(messages=_messages(problem), task="complete", language="python", prompt=problem.prompt)

    def react(self, person: Person, ask: Ask, answer: str, draw: random.Random) -> Reaction:
        """Keep the code that runs, without what this person dislikes."""
        kept = editing.keep(answer, prompt=ask.prompt, taste=person.taste)
        return _reaction(person, kept, answer, draw)


def _messages(problem: Problem) -> list[dict[str, Any]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Complete this Python function.\n\n{problem.prompt}"}]


def _reaction(person: Person, kept: str, answer: str, draw: random.Random) -> Reaction:
    undone = draw.random() < person.carelessness
    later = "" if undone else kept
    share = len(later) / max(1, len(answer))
    return Reaction(
        edits=(kept, later),
        follow_up=follow_up(share, draw) if draw.random() < person.talkativeness else None,
        regenerate=share < 0.1 and draw.random() < 0.1,
        undo=undone and bool(kept),
        success=(share > 0.5) != (draw.random() < 0.05),
    )
