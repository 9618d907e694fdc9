"""A place for files belongs to one deployment and keeps what object storage has to keep for us."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from app.domain.errors import BadConfig, Unavailable
from app.policy.storage.claiming import claim, faults

SETTING = "RATCHET_WEIGHTS"


class Forgetful(MemoryFileSystem):
    """Takes a second file of the same name, and reads something else than was written."""

    protocol = "forgetful"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        super().pipe_file(path, value, mode="overwrite")

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        return b"stale"


class Away(MemoryFileSystem):
    """Answers nothing."""

    protocol = "away"

    def exists(self, path: str, **_: Any) -> bool:
        raise OSError("connection refused")

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        raise OSError("connection refused")


@pytest.fixture(autouse=True)
def others() -> Iterator[None]:
    for kind in (Forgetful, Away):
        fsspec.register_implementation(str(kind.protocol), kind, clobber=True)
    yield
    MemoryFileSystem.store.clear()


def test_the_first_to_use_a_place_has_it_and_another_one_is_refused_with_both_names(tmp_path: Path) -> None:
    place = f"{tmp_path}/bucket/weights/"
    claim(place, "one", setting=SETTING)
    claim(place, "one", setting=SETTING)
    assert (tmp_path / "bucket/weights/DEPLOYMENT").read_text() == "one"
    with pytest.raises(BadConfig, match=rf"belongs to another deployment \(one\), and this is two: .*in {SETTING}; .*delete DEPLOYMENT"):
        claim(place, "two", setting=SETTING)
    assert (tmp_path / "bucket/weights/DEPLOYMENT").read_text() == "one"


def test_a_mark_that_somebody_wrote_by_hand_is_read_without_its_line_end(tmp_path: Path) -> None:
    (tmp_path / "DEPLOYMENT").write_text("one\n")
    claim(str(tmp_path), "one", setting=SETTING)
    assert (tmp_path / "DEPLOYMENT").read_text() == "one\n"


def test_a_place_that_keeps_everything_has_no_faults_and_nothing_is_left_there(tmp_path: Path) -> None:
    assert faults(f"{tmp_path}/new", setting=SETTING) == []
    assert list((tmp_path / "new").iterdir()) == []


def test_what_a_place_does_not_keep_is_said_in_a_sentence_each() -> None:
    assert faults("forgetful://bucket", setting=SETTING) == [
        "forgetful://bucket does not read what was just written",
        "forgetful://bucket makes a second time what exists (it ignores If-None-Match)",
    ]
    assert not any("probe" in name for name in Forgetful.store)


def test_a_place_that_is_away_or_that_nobody_here_can_look_at_is_told_with_the_cure() -> None:
    with pytest.raises(Unavailable, match=r"away://bucket does not answer \(connection refused\): check RATCHET_WEIGHTS"):
        claim("away://bucket", "one", setting=SETTING)
    with pytest.raises(Unavailable, match=r"away://bucket does not take files \(connection refused\): check RATCHET_WEIGHTS"):
        faults("away://bucket", setting=SETTING)
    with pytest.raises(BadConfig, match="cannot look at nowhere: pip install fsspec's package for nowhere"):
        claim("nowhere://bucket", "one", setting=SETTING)
