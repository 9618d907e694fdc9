"""States and checkpoints on disk: whole or not at all, the newest few, and what an update starts from."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from app.domain.ports import Trainer
from pipelines.training.checkpoint import damage, newest_checkpoint, seal, write_checkpoint
from pipelines.training.config import LoraConfig, TrainingConfig
from pipelines.training.states import Inheritance, forget_states, inherited, keep_state, shape_of
from tests.fakes.releases import version


class Saving:
    """A trainer that saves a word; or breaks in the middle."""

    def __init__(self, word: str = "weights", *, breaks: bool = False) -> None:
        self.word, self.breaks = word, breaks

    def save_state(self, folder: Path) -> dict[str, str]:
        folder.mkdir(parents=True)
        (folder / "weights").write_text(self.word)
        if self.breaks:
            raise OSError("no space left")
        return {}


def trainer(word: str = "weights", *, breaks: bool = False) -> Trainer:
    return cast(Trainer, Saving(word, breaks=breaks))


PLAIN: dict[str, Any] = {}


def kept(root: Path, digest: str, **changes: Any) -> Path:
    return keep_state(root, changes.pop("trainer", trainer()), policy="p", digest=digest, shape=changes.pop("shape", PLAIN), base=None)


def test_a_state_is_inherited_whole_and_by_training_of_the_same_kind(tmp_path: Path) -> None:
    lora = shape_of(TrainingConfig(lora=LoraConfig(rank=4)))
    assert lora == {"rank": 4, "alpha": 32, "target_modules": list(LoraConfig().target_modules)}
    folder = keep_state(tmp_path, trainer(), policy="p", digest="d1", shape=lora, base="snapshot")
    assert folder == tmp_path / "p" / "d1"
    parent = replace(version("d1"), optimizer_uri=str(folder))
    found = inherited(parent, shape=lora)
    assert (found.kind, found.start, found.base, found.loss) == (Inheritance.INHERITED, folder, "snapshot", None)
    other = inherited(parent, shape=shape_of(TrainingConfig()))
    assert (other.kind, other.start) == (Inheritance.OTHER, None)
    assert str(other.loss).startswith(f"the parent's masters and optimizer state are other ({folder}): the update started anew")


def test_what_is_gone_or_damaged_is_said_and_what_never_was_is_not(tmp_path: Path) -> None:
    new = inherited(version("d0"), shape=PLAIN)
    assert (new.kind, new.start, new.loss) == (Inheritance.NEW, None, None)
    gone = inherited(replace(version("d0"), optimizer_uri=str(tmp_path / "gone")), shape=PLAIN)
    assert (gone.kind, gone.start) == (Inheritance.MISSING, None)
    assert f"are missing ({tmp_path / 'gone'})" in str(gone.loss)
    folder = kept(tmp_path, "d1")
    (folder / "weights").write_text("weightz")
    damaged = inherited(replace(version("d1"), optimizer_uri=str(folder)), shape=PLAIN)
    assert (damaged.kind, damaged.damaged, damaged.start) == (Inheritance.DAMAGED, (str(folder / "weights"),), None)
    assert f"are damaged ({folder / 'weights'})" in str(damaged.loss)


def test_a_state_from_before_its_kind_was_written_is_one_of_all_parameters(tmp_path: Path) -> None:
    folder = kept(tmp_path, "d1")
    (folder / "state.json").unlink()
    (folder / "MANIFEST").unlink()
    seal(folder)
    parent = replace(version("d1"), optimizer_uri=str(folder))
    assert inherited(parent, shape=PLAIN).kind is Inheritance.INHERITED
    assert inherited(parent, shape={"rank": 4}).kind is Inheritance.OTHER


def test_a_state_that_breaks_off_leaves_the_one_before_it_away_and_itself_too(tmp_path: Path) -> None:
    kept(tmp_path, "d1", trainer=trainer("first"))
    again = kept(tmp_path, "d1", trainer=trainer("second"))
    assert ((again / "weights").read_text(), damage(again)) == ("second", [])
    with pytest.raises(OSError, match="no space"):
        kept(tmp_path, "d2", trainer=trainer(breaks=True))
    assert not (tmp_path / "p" / "d2").exists()
    kept(tmp_path, "d2")
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == ["d1", "d2"], "what broke off is cleared away"


def test_four_newest_states_and_those_that_are_pinned_are_kept(tmp_path: Path) -> None:
    for age, digest in enumerate(("d6", "d5", "d4", "d3", "d2", "d1")):
        os.utime(kept(tmp_path, digest), (1000 + age, 1000 + age))
    keep_state(tmp_path, trainer(), policy="q", digest="other", shape=PLAIN, base=None)
    forget_states(tmp_path, policy="p", keep={"d6"})
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == ["d1", "d2", "d3", "d4", "d6"]
    assert (tmp_path / "q" / "other").is_dir()
    forget_states(tmp_path, policy="nobody's", keep=set())


def test_the_two_newest_checkpoints_are_kept_and_a_damaged_one_is_passed_over_by_name(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        write_checkpoint(tmp_path, trainer(f"step {step}"), {"next_step": step}, step=step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-00002", "checkpoint-00010"]
    whole = newest_checkpoint(tmp_path)
    assert (whole.folder, whole.progress, whole.damaged) == (tmp_path / "checkpoint-00010", {"next_step": 10}, ())
    (tmp_path / "checkpoint-00010" / "weights").unlink()
    older = newest_checkpoint(tmp_path)
    assert (older.folder, older.progress) == (tmp_path / "checkpoint-00002", {"next_step": 2})
    assert older.damaged == (str(tmp_path / "checkpoint-00010" / "weights"),)
    (tmp_path / "checkpoint-00002" / "MANIFEST").write_text("{")
    none = newest_checkpoint(tmp_path)
    assert (none.folder, none.progress) == (None, None)
    assert none.damaged == (*older.damaged, str(tmp_path / "checkpoint-00002" / "MANIFEST"))


def test_a_checkpoint_is_written_over_another_of_its_step(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, trainer("first"), {}, step=1)
    with pytest.raises(OSError, match="no space"):
        write_checkpoint(tmp_path, trainer(breaks=True), {}, step=1)
    assert Path(newest_checkpoint(tmp_path).folder or tmp_path).joinpath("weights").read_text() == "first"
    again = write_checkpoint(tmp_path, trainer("second"), {"a": 1}, step=1)
    assert (again / "weights").read_text() == "second"
    assert set(json.loads((again / "MANIFEST").read_text())) == {"progress.json", "weights"}
