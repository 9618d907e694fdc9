"""What a command says of files and databases that do not work: a sentence with the cure, and nothing that was there is lost."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from app.durable import replacing_file
from app.settings import Settings, from_environment
from pipelines.__main__ import sentence


def ratchet(folder: Path, *arguments: str, **environment: str) -> tuple[int, list[str]]:
    """Its exit code and what it wrote to standard error."""
    own = {**os.environ, "RATCHET_DATA": str(folder), **environment}
    done = subprocess.run([sys.executable, "-m", "pipelines", *arguments], env=own, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr.splitlines()


def test_an_export_into_a_folder_that_is_not_there_is_one_sentence(tmp_path: Path, migrated: Callable[[Settings], None]) -> None:
    (tmp_path / "data").mkdir()
    migrated(from_environment({"RATCHET_DATA": str(tmp_path / "data")}))
    code, said = ratchet(tmp_path / "data", "export", "dsjson", "--out", str(tmp_path / "nowhere" / "x.jsonl"))
    assert (code, len(said)) == (2, 1)
    assert said[0].startswith(f"ratchet: {tmp_path}/nowhere/x.jsonl.")
    assert said[0].endswith("No such file or directory: correct the name or its rights, or choose another place")


@pytest.mark.parametrize(
    ("url", "why"),
    [("foo", "Could not parse SQLAlchemy URL"), ("sqlite:////{folder}/garbage.db", "file is not a database")],
)
def test_a_database_that_is_none_is_one_sentence(tmp_path: Path, url: str, why: str) -> None:
    (tmp_path / "garbage.db").write_bytes(b"no database at all, " * 400)
    code, said = ratchet(tmp_path, "db", "check", RATCHET_DATABASE_URL=url.format(folder=tmp_path))
    assert code == 2
    assert said[-1].startswith("ratchet: ")
    assert why in said[-1]
    assert not [line for line in said if line.startswith("Traceback")]


def test_what_is_our_own_bug_is_told_with_its_traceback() -> None:
    assert sentence(ValueError("x")) is None
    assert sentence(OSError("a socket's")) is None
    assert sentence(OSError(28, "No space left on device")) == (
        "the disk takes no more (No space left on device): free some space, or choose another place"
    )
    assert sentence(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")) == (
        "what was read is no text in UTF-8 (invalid start byte): name a text file"
    )


def test_a_file_is_replaced_whole_or_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "last-month.jsonl"
    path.write_text("kept\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"), replacing_file(path) as partial, partial.open("w") as file:
            file.write("x" * 5_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("last-month.jsonl", "kept\n")]
    with replacing_file(path) as partial:
        partial.write_text("new\n")
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("last-month.jsonl", "new\n")]
    with replacing_file(Path("/dev/null")) as device:
        assert device == Path("/dev/null")
