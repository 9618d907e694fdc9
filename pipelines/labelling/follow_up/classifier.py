"""The classifier: a multinomial logistic regression over the features, in plain Python (a message takes well under a millisecond).

Its coefficients are in `model.json`, written by `python -m pipelines.labelling.follow_up.train`.
"""

import hashlib
import math
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import resources

import msgspec

from pipelines.labelling.follow_up.features import NAMES, features


class Mood(StrEnum):
    """What a follow-up says about the answer before it."""

    DISSATISFIED = "dissatisfied"
    SATISFIED = "satisfied"
    REFINEMENT = "refinement"
    """Asks for a change, without complaint or praise: the next step, not a punishment."""
    NEUTRAL = "neutral"


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Coefficients as stored."""

    features: tuple[str, ...]
    classes: tuple[Mood, ...]
    weights: tuple[tuple[float, ...], ...]
    """[classes, features]"""
    biases: tuple[float, ...]
    report: dict[str, float]
    """Cross-validated figures of the training run that wrote this file."""


class Unread(Exception):
    """A reader gave no reading: it is away, or answered something else. The term abstains and says so."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Calibrated probabilities per mood."""

    probabilities: dict[Mood, float]
    by: str
    """Who read it, down to the version: it goes into the label's breakdown."""

    @property
    def mood(self) -> Mood:
        """The likeliest one."""
        return max(self.probabilities, key=lambda mood: self.probabilities[mood])

    def satisfaction(self, *, confident: float) -> float | None:
        """p(satisfied) − p(dissatisfied) in [-1, 1], exactly 0 for a next step; None (abstain) while no reading reaches `confident`."""
        p = self.probabilities
        other = p[Mood.REFINEMENT] + p[Mood.NEUTRAL]
        if max(p[Mood.SATISFIED], p[Mood.DISSATISFIED], other) < confident:
            return None
        return 0.0 if other >= confident else p[Mood.SATISFIED] - p[Mood.DISSATISFIED]


@cache
def model() -> Model:
    """The shipped model. Its features must be the ones computed here: both change together, by training again."""
    shipped = msgspec.json.decode(_shipped(), type=Model)
    assert shipped.features == NAMES, "model.json was trained on other features: run python -m pipelines.labelling.follow_up.train"
    return shipped


@cache
def version() -> str:
    """Of the shipped model: a digest of its coefficients."""
    return f"classifier:{hashlib.sha256(_shipped()).hexdigest()[:12]}"


def _shipped() -> bytes:
    return resources.files("pipelines.labelling.follow_up").joinpath("model.json").read_bytes()


def judge(text: str, *, request: str = "", answer: str = "") -> Judgement:
    """Read a follow-up; `request` and `answer` are what came before it, where known."""
    shipped = model()
    values = features(text, request=request, answer=answer)
    scores = [b + sum(w * v for w, v in zip(row, values, strict=True) if v) for row, b in zip(shipped.weights, shipped.biases, strict=True)]
    top = max(scores)
    odds = [math.exp(score - top) for score in scores]
    return Judgement(probabilities={mood: odd / sum(odds) for mood, odd in zip(shipped.classes, odds, strict=True)}, by=version())
