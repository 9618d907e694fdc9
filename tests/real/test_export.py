"""`ratchet export parquet` as others open it: DuckDB, Hugging Face `datasets` and Spark, in an environment of their own under .cache."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from app.domain.learning.batches import TurnPayload, payload_of
from app.domain.learning.decisions import ExportedTurn
from app.trajectories.exporting import write_export
from tests.fakes.served import at, turn
from tests.real.parts import ROOT, debian, missing

pytestmark = pytest.mark.real

NEEDED = ["duckdb==2.0.0", "datasets==5.2.0", "pyspark==4.3.0"]
JAVA = "openjdk-17-jre-headless"
"""What Spark runs on."""
VENV = ROOT / ".cache" / "export-venv"
TURNS = 50

ASK = """
import glob, json, sys
import datasets, duckdb
folder = sys.argv[1]
asked = "SELECT policy, count(*), sum(reward), sum(len(completion_tokens))"
rows = duckdb.sql(f"{asked} FROM '{folder}/**/*.parquet' GROUP BY policy ORDER BY policy").fetchall()
files = sorted(glob.glob(f"{folder}/**/*.parquet", recursive=True))
found = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=sys.argv[2])
first = found[0]
print(json.dumps({"duckdb": rows, "datasets": len(found), "tokens": first["completion_tokens"], "messages": first["messages"]}))
"""

ASK_SPARK = """
import json, sys
from pyspark.sql import SparkSession, functions as f
session = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
table = session.read.parquet(sys.argv[1])
counted = table.groupBy("policy").agg(f.count("*"), f.sum("reward"), f.sum(f.size("completion_tokens"))).orderBy("policy")
print(json.dumps([list(row) for row in counted.collect()]))
"""
COUNTED = [["composer", 40, 20.0, 80], ["tab", 10, 5.0, 20]]
"""Policy, turns, reward and tokens of what is exported here."""


@pytest.fixture(scope="session")
def python() -> Path:
    """Their Python, made if need be."""
    program = VENV / "bin" / "python"
    wanted = " ".join(NEEDED)
    if (VENV / "READY").is_file() and (VENV / "READY").read_text() == wanted:
        return program
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)
    made = subprocess.run([str(program), "-m", "pip", "install", "--quiet", *NEEDED], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        missing(wanted, made.stderr.strip()[-600:])
    (VENV / "READY").write_text(wanted)
    return program


def exported(number: int) -> tuple[ExportedTurn, TurnPayload]:
    served = turn(f"t{number:03}", policy="tab" if number % 5 == 0 else "composer", finished=number * 7_200)
    facts = ExportedTurn(
        inference_id=served.inference_id, policy=served.policy, version="v1", finished_at=served.finished_at, arm="champion",
        stage="champion", probability=1.0, reward=0.5, exclusion=None, segment="task=edit", payload_segment="s", finish_reason="stop",
        train_consent=True, held_out=False, terms=[{"name": "rating", "value": 1.0}], rule_set="r", labelled_at=at(number),
    )  # fmt: skip
    return facts, payload_of(served)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An export of `TURNS` turns."""
    turns = [exported(number) for number in range(TURNS)]
    payloads = {facts.inference_id: payload for facts, payload in turns}
    made = tmp_path / "turns"
    assert write_export(made, [[facts for facts, _ in turns]], lambda places: {id_: payloads[id_] for _, id_ in places}) == TURNS
    return made


def test_duckdb_and_datasets_open_an_export(python: Path, folder: Path, tmp_path: Path) -> None:
    asked = subprocess.run([str(python), "-c", ASK, str(folder), str(tmp_path / "cache")], capture_output=True, text=True, check=False)
    assert asked.returncode == 0, asked.stderr
    found = json.loads(asked.stdout.splitlines()[-1])
    assert found["duckdb"] == COUNTED
    assert found["datasets"] == TURNS
    assert found["tokens"] == [4, 5]
    assert json.loads(found["messages"])[0]["content"].startswith("question t")


def test_spark_opens_an_export(python: Path, folder: Path) -> None:
    debian("java", JAVA)
    asked = subprocess.run([str(python), "-c", ASK_SPARK, str(folder)], capture_output=True, text=True, check=False)
    assert asked.returncode == 0, asked.stderr
    assert json.loads(asked.stdout.splitlines()[-1]) == COUNTED
