"""`make bench-weight-faults`: everything that can go wrong between a publisher and an engine's folder, on the real store and real files.

    killed     SIGKILL before each operation on the storage, of a publisher (delta, keyframe) and of a reader
    corrupt    one byte of each kind of file changed or cut off
    missing    a link of the chain gone: parent's READY, parent whole, delta, PARENT
    twice      the same version published twice, at once, and from two parents
    reordered  READY is seen before what it stands for
    full       no room: each write of the storage fails once, and a real limit on the size of files
    unkept     a storage that does not refuse to create what is there (no conditional writes)

After each fault a reader with an empty cache asks for the version: it gets its weights or a refusal in words, never others. Then the
publisher runs again without the fault, and a reader has to get them: that is what recovered means.

    python -m tests.bench.weight_faults --quick      fewer places for the changed byte
"""

import argparse
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType] - its PathLike has no parameter

from app.domain.errors import RatchetError
from app.policy.storage.delta import apply_delta
from app.policy.storage.remote import DELTA, KEYFRAME, RemoteWeights
from app.policy.storage.snapshot import PARENT, READY, WEIGHTS, snapshot_digest, verify_snapshot, write_snapshot
from app.policy.storage.weights import digest_of

TINY = Path(".cache/models/tiny")
CHANGING = frozenset({"put_file", "pipe_file", "rm_file", "get_file", "cat_file", "ls"})
"""Operations of the storage before which something may happen."""
MOST_OPERATIONS = 80


class Faulty:
    """A storage that does something before its n-th operation."""

    def __init__(self, files: Any, before: Callable[[int, str], None], *, promises: bool = True) -> None:
        self._files, self._before, self._promises, self._count = files, before, promises, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._files, name)
        if name not in CHANGING:
            return found

        def act(*given: Any, **more: Any) -> Any:
            self._count += 1
            self._before(self._count, name)
            if not self._promises:
                more.pop("mode", None)
            return found(*given, **more)

        return act


@dataclass
class Field:
    """One trial's storage, and what was seen in all of them."""

    folders: list[Path]
    """Of versions, each made from the one before."""
    root: Path
    trials: Counter[str] = field(default_factory=Counter[str])
    refused: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])
    lost: list[str] = field(default_factory=list[str])

    def store(self, cache: str, wrap: Callable[[Any], Any] = lambda files: files, *, keyframe_every: int = 3) -> RemoteWeights:
        return RemoteWeights(f"local://{self.root}/remote", cache=self.root / cache, keyframe_every=keyframe_every, wrap=wrap)

    def fresh(self, upto: int) -> None:
        """An empty storage with the first versions in it."""
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir(parents=True)
        publisher = self.store("publisher")
        for folder in self.folders[:upto]:
            publisher.publish(folder)
        publisher.settle()

    def place(self, index: int) -> Path:
        return self.root / "remote" / snapshot_digest(self.folders[index])

    def judge(self, fault: str, index: int, *, recover: bool = True) -> None:
        """Ask for a version with an empty cache; publish it again from a whole storage below; ask once more."""
        self.trials[fault] += 1
        self._ask(fault, index, cache="asked")
        if not recover:
            return
        publisher = self.store("mending")
        for folder in self.folders[: index + 1]:
            self._mend(folder)
            publisher.publish(folder)
        publisher.settle()
        if not self._ask(fault, index, cache="again"):
            self.lost.append(fault)

    def _mend(self, folder: Path) -> None:
        """What the refusal's cure says: where a version cannot be read, it is deleted there and published again."""
        digest, shelf = snapshot_digest(folder), self.store("looking")
        try:
            shelf.path(digest)
        except (RatchetError, OSError):
            shutil.rmtree(self.root / "remote" / digest, ignore_errors=True)

    def _ask(self, fault: str, index: int, *, cache: str) -> bool:
        """Whether the version was got; whatever is got must be it. As a snapshot, and as an engine would patch it."""
        digest = snapshot_digest(self.folders[index])
        shutil.rmtree(self.root / cache, ignore_errors=True)
        store, got = self.store(cache), False
        try:
            held = {snapshot_digest(folder): folder for folder in self.folders[:index]}
            way = store.way(digest, held)
            if way is not None:
                state, at = load_file(held[way.base] / WEIGHTS), way.base
                for delta in way.deltas:
                    state = apply_delta(state, delta, base_digest=at)
                    at = digest_of(state)
                if at != digest:
                    self.wrong.append(f"{fault}: patched to {at[:12]}")
        except (RatchetError, OSError):
            self.refused[fault] += 1
        try:
            found = verify_snapshot(store.path(digest))
            got = True
            if found != digest:
                self.wrong.append(f"{fault}: {found[:12]} under the name {digest[:12]}")
        except (RatchetError, OSError):
            self.refused[fault] += 1
        return got


def in_child(work: Callable[[], None]) -> int:
    """Run in a process of its own; its exit code (negative: the signal)."""
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(timeout=60)
    assert child.exitcode is not None, "the child hangs"
    return child.exitcode


def killing(at: int) -> Callable[[Any], Any]:
    def before(count: int, _: str) -> None:
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)

    return lambda files: Faulty(files, before)


def killed(found: Field) -> None:
    """SIGKILL before each operation: publishing a delta (with its keyframe behind it), and fetching."""
    for at in range(1, MOST_OPERATIONS):
        found.fresh(3)

        def publish(at: int = at) -> None:
            publisher = found.store("publisher", killing(at))
            publisher.publish(found.folders[3])
            publisher.settle()

        ended = in_child(publish)
        found.judge("killed publisher", 3)
        if ended == 0:
            break
    found.fresh(4)
    for at in range(1, MOST_OPERATIONS):
        shutil.rmtree(found.root / "asked", ignore_errors=True)
        ended = in_child(lambda at=at: (found.store("asked", killing(at)).path(snapshot_digest(found.folders[3])), None)[1])
        found.trials["killed reader"] += 1
        digest = snapshot_digest(found.folders[3])
        if verify_snapshot(found.store("asked").path(digest)) != digest:
            found.wrong.append("killed reader")
        if ended == 0:
            break


def corrupt(found: Field, *, places: int) -> None:
    """A byte of each file changed, and the file cut."""
    chosen = random.Random(3)
    for index, name in ((1, DELTA), (1, PARENT), (1, READY), (0, WEIGHTS), (3, WEIGHTS), (3, KEYFRAME), (2, DELTA)):
        for trial in range(places):
            found.fresh(4)
            file = found.place(index) / name
            content = bytearray(file.read_bytes())
            place = chosen.randrange(len(content))
            content[place] ^= 1 << chosen.randrange(8)
            file.write_bytes(bytes(content[:place]) if trial % 3 == 2 else bytes(content))
            found.judge(f"corrupt {name}", max(index, 2))


def missing(found: Field) -> None:
    """A link gone."""
    for index, name in ((1, READY), (1, None), (2, DELTA), (2, PARENT), (0, None)):
        found.fresh(3)
        if name is None:
            shutil.rmtree(found.place(index))
        else:
            (found.place(index) / name).unlink()
        found.judge("missing link", 2)


def twice(found: Field) -> None:
    """Published again, at once, and from two parents."""
    for promises in (True, False):
        found.fresh(2)
        wraps = [lambda files, promises=promises: Faulty(files, lambda *_: None, promises=promises)] * 3
        stores = [found.store(f"publisher{index}", wrap) for index, wrap in enumerate(wraps)]
        threads = [threading.Thread(target=store.publish, args=(found.folders[2],)) for store in stores]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stores[0].publish(found.folders[2])
        found.judge("twice", 2)
    found.fresh(2)
    other = found.root / "other"
    shutil.copytree(found.folders[2], other)
    (other / PARENT).write_text(snapshot_digest(found.folders[0]) + "\n")
    for folder, cache in ((other, "publisher1"), (found.folders[2], "publisher2")):
        (found.place(2) / READY).unlink(missing_ok=True)
        found.store(cache).publish(folder)
    found.judge("two parents", 2)


def reordered(found: Field) -> None:
    """READY is seen first."""
    for name in (DELTA, PARENT, "config.json"):
        found.fresh(3)
        (found.place(2) / name).rename(found.root / "late")
        found.trials["reordered"] += 1
        found._ask("reordered", 2, cache="early")
        (found.root / "late").rename(found.place(2) / name)
        if not found._ask("reordered", 2, cache="again"):
            found.lost.append("reordered")
    found.fresh(1)
    late = found.store("publisher")
    late.publish(found.folders[2])  # before its parent
    found.judge("reordered", 2)


def full(found: Field) -> None:
    """No room at each operation once, and a real limit on files."""
    for at in range(1, MOST_OPERATIONS):
        found.fresh(3)
        hit: list[int] = []

        def before(count: int, _: str, at: int = at, hit: list[int] = hit) -> None:
            if count == at:
                hit.append(count)
                raise OSError(28, "No space left on device")

        publisher = found.store("publisher", lambda files, before=before: Faulty(files, before))
        try:
            publisher.publish(found.folders[3])
            publisher.settle()
        except (OSError, RatchetError):
            found.refused["full"] += 1
        found.judge("full", 3)
        if not hit:
            break
    for room in (50, 2_000, 60_000, 600_000):
        found.fresh(3)

        def cramped(room: int = room) -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
            found.store("cramped").publish(found.folders[3])

        in_child(cramped)
        found.judge("full", 3)


def unkept(found: Field) -> None:
    """The kills of a publisher once more, on a storage without conditional writes."""
    for at in range(1, MOST_OPERATIONS, 3):
        found.fresh(3)

        def publish(at: int = at) -> None:
            def before(count: int, _: str) -> None:
                if count == at:
                    os.kill(os.getpid(), signal.SIGKILL)

            store = found.store("publisher", lambda files: Faulty(files, before, promises=False))
            assert store.publish(found.folders[3])
            store.settle()

        ended = in_child(publish)
        found.judge("unkept", 3)
        if ended == 0:
            break


def lineage(scratch: Path, length: int) -> list[Path]:
    """Versions, each a little on from the one before."""
    folders = [TINY]
    for step in range(length):
        tensors = load_file(folders[-1] / WEIGHTS)
        for name in sorted(tensors)[:4]:
            tensors[name] = tensors[name].clone()
            tensors[name].view(-1)[step::37] *= 1.01
        write_snapshot(scratch / f"v{step}", tensors, like=folders[-1])
        folders.append(scratch / f"v{step}")
    return folders


def main(arguments: list[str] | None = None) -> int:
    """Run as a program; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.weight_faults")
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args(arguments).quick
    with tempfile.TemporaryDirectory() as scratch:
        found = Field(folders=lineage(Path(scratch), 3), root=Path(scratch) / "field")
        killed(found)
        corrupt(found, places=3 if quick else 40)
        missing(found)
        twice(found)
        reordered(found)
        full(found)
        unkept(found)
    trials = sum(found.trials.values())
    print(json.dumps({
        "trials": trials, "by_fault": dict(found.trials), "refused_in_words": dict(found.refused),
        "wrong_weight_answers": len(found.wrong), "recovered": trials - len(found.lost), "missed": [*found.wrong, *found.lost],
    }))  # fmt: skip
    return 1 if found.wrong or found.lost else 0


if __name__ == "__main__":
    sys.exit(main())
