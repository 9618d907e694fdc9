"""A rolling upgrade under load, and back: `make bench-upgrade` (`ARGS=--quick` with shorter rests, `--images` from image to image)

    the release before (a git revision's tree) ─ all processes, two of each, people at work ─▶ p99 while nothing happens
    `ratchet prepare` of this code ─▶ replace one process after the other by this code's ─▶ rest
    replace one process after the other by the release before's, on the new schema ─▶ what was promised against the database

A replacement is ready before the balancer forgets the process that it replaces, which then is told to end, as the chart does it. No
attempt is repeated: what fails once is an error. With `--images` (root, podman) both releases are images, each built by its own Dockerfile;
else both run on this environment's packages. Without `--from` the release before is what came before the newest revision of the schema.

p99 is that of answers while processes are replaced over that of rest. It is not judged where others took more than a quarter of the cores
before anything was started here (`others`, `p99_judged`): then it tells of them.

Ends with {"from", "to", "errors", "p99_ratio", "lost", "doubled", …}; exit code 1 where a bound does not hold, 2 where there is no
release before (a clone without history).
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from sqlalchemy import Engine

from app.db.engine import open_engine
from app.db.migrate import head_revision
from tests.bench.fleet.accounts import doubled, ended_cycles, held_up, lost, slots_lost, unlabelled
from tests.bench.fleet.deployment import ROLES, ROOT, Fleet
from tests.bench.fleet.images import Images
from tests.bench.fleet.people import People
from tests.broker import free_port
from tests.killable_postgres import KillablePostgres
from tests.real.containers.podman import built_image

SETTLE_S = 120.0
BOUNDS = {"errors": 0, "lost": 0, "doubled": 0, "slots_lost": 0}
P99_RATIO = 1.5
OTHERS = 0.25
"""Share of the cores that other programs may take for answers' times to say something."""
LOOK_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long to rest between the acts."""

    calm_s: float
    rest_s: float


class NoReleaseBefore(Exception):
    """There is nothing to upgrade from; the message says why."""


def release_before(into: Path, revision: str | None) -> str:
    """Lay the tree of a revision out in `into`, without its caches; returns the revision. Raises `NoReleaseBefore`."""
    chosen = revision or f"{_commit_of_head()}^"
    found = _git("rev-parse", "--short", "--verify", f"{chosen}^{{commit}}")
    if found is None:
        raise NoReleaseBefore(f"git knows no revision {chosen} here: fetch the history (`git fetch --unshallow`), or name one with --from")
    packed = subprocess.run(["git", "archive", found], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(into)], input=packed, check=True)
    (into / ".cache").symlink_to(ROOT / ".cache")
    return found


def _commit_of_head() -> str:
    """The commit that brought the schema's newest revision."""
    files = [file for file in (ROOT / "migrations" / "versions").glob("*.py") if f'revision = "{head_revision()}"' in file.read_text()]
    brought = _git("log", "--diff-filter=A", "--format=%H", "-1", "--", str(files[0].relative_to(ROOT)))
    if not brought:
        raise NoReleaseBefore(
            f"git has no history of {files[0].name} here: fetch it (`git fetch --unshallow`), or name a revision with --from"
        )
    return brought


def _git(*words: str) -> str | None:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def upgrade_and_back(
    folder: Path, before: Path, database: str, *, plan: Plan, roles: Sequence[str] = ROLES, count: int = 2, images: Images | None = None
) -> dict[str, Any]:
    """The whole story; figures."""
    fleet = Fleet(folder=folder, database=database, tree=before, roles=roles, count=count, images=images)
    people = People(key=fleet.prepare(), retries=0, own_answers="engine" not in roles)
    fleet.on_join = lambda replica: people.add(replica.url) if replica.role == "api" else None
    fleet.on_leave = lambda replica: people.remove(replica.url) if replica.role == "api" else None
    took: dict[str, float] = {}
    try:
        fleet.start(in_turn=True)  # two loops of the release before that begin at once end in each other's MLflow tables
        people.start()
        time.sleep(plan.rest_s)  # the first answers find cold caches
        _phase(people, "calm", plan.calm_s)
        for act, tree in (("upgrade", ROOT), ("back", before)):
            people.phase, began = act, time.monotonic()
            if act == "upgrade":
                fleet.command("prepare", tree=tree)
            for replica in [r for role in roles for r in fleet.running(role)]:
                fleet.replace(replica, tree=tree)
                print(f"# {act}: {replica.name} replaced after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            took[act] = round(time.monotonic() - began, 1)
            _phase(people, f"after {act}", plan.rest_s)
        people.stop()
        return _judged(people, database, labelled="label" in roles) | {"took_s": took}
    finally:
        people.stop()
        fleet.stop()


def _phase(people: People, name: str, seconds: float) -> None:
    people.phase = name
    time.sleep(seconds)


def _judged(people: People, database: str, *, labelled: bool) -> dict[str, Any]:
    book = people.book

    def waiting(engine: Engine) -> int:
        return unlabelled(engine) if labelled else 0

    with closing(_Opened(database)) as opened:
        until = time.monotonic() + SETTLE_S
        while time.monotonic() < until and (lost(opened.engine, book) or waiting(opened.engine)):
            time.sleep(0.5)
        stuck = held_up(opened.engine)
        gone, twice, slots = lost(opened.engine, book), doubled(opened.engine), slots_lost(opened.engine)
        left, cycles = waiting(opened.engine), len(ended_cycles(opened.engine))
    p99 = {phase: round(float(np.percentile(seconds, 99)), 3) for phase, seconds in book.seconds.items()}
    moving = [s for phase in ("upgrade", "back") for s in book.seconds.get(phase, [])]
    return {
        "errors": len(book.failed), "p99_ratio": round(float(np.percentile(moving, 99)) / p99["calm"], 2) if moving else None,
        "lost": len(gone), "doubled": sum(twice.values()), "slots_lost": len(slots), "unlabelled": left, "requests": book.requests,
        "answers": len(book.answers), "cycles": cycles, "p99_s": p99, "first_errors": book.failed[:3], "first_lost": gone[:3],
        "held_up": stuck,
        "twice": {kind: count for kind, count in twice.items() if count}, "slots": slots[:3],
    }  # fmt: skip


class _Opened:
    """An engine that `closing` can close."""

    def __init__(self, url: str) -> None:
        self.engine = open_engine(url)

    def close(self) -> None:
        self.engine.dispose()


def missed(found: dict[str, Any]) -> list[str]:
    """Bounds that do not hold."""
    told = [f"{name} is {found[name]}, {bound} is the bound" for name, bound in BOUNDS.items() if found[name] > bound]
    if found["p99_judged"] and (found["p99_ratio"] is None or found["p99_ratio"] > P99_RATIO):
        told.append(f"p99_ratio is {found['p99_ratio']}, {P99_RATIO} is the bound")
    return told + ([f"{found['unlabelled']} turns have no label"] if found["unlabelled"] else [])


def _images(before: Path, folder: Path, revision: str) -> Images:
    """Both releases', built."""
    folder.mkdir()
    return Images(of={before: built_image(f"localhost/ratchet-before:{revision}", before), ROOT: built_image()}, folder=folder)


def main() -> int:
    """Run it, print it."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.upgrade")
    parser.add_argument("--quick", action="store_true", help="shorter rests")
    parser.add_argument("--count", type=int, default=2, help="replicas of each process")
    parser.add_argument("--from", dest="revision", help="the release before, as a git revision")
    parser.add_argument("--images", action="store_true", help="from the release before's image to this one's")
    parser.add_argument("--roles", default=",".join(ROLES), help="which processes there are")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left running
    plan = Plan(calm_s=12, rest_s=4) if options.quick else Plan(calm_s=60, rest_s=20)
    with tempfile.TemporaryDirectory(prefix="ratchet-upgrade-") as name:
        folder, before, port = Path(name) / "data", Path(name) / "before", free_port()
        before.mkdir()
        try:
            revision = release_before(before, options.revision)
        except NoReleaseBefore as error:
            print(json.dumps({"from": None, "why": str(error)}))
            return 2
        images = _images(before, folder, revision) if options.images else None
        others = round(psutil.cpu_percent(LOOK_S) / 100, 2)
        print(f"# from {revision} to this code ({head_revision()}); others take {others:.0%} of the cores", file=sys.stderr, flush=True)
        with KillablePostgres(port=port):
            url = f"postgresql+psycopg://postgres@127.0.0.1:{port}/postgres"
            found = upgrade_and_back(folder, before, url, plan=plan, roles=options.roles.split(","), count=options.count, images=images)
    found |= {"others": others, "p99_judged": others <= OTHERS}
    told = missed(found)
    print(json.dumps({"from": revision, "to": head_revision(), "images": images is not None, **found, "missed": told}))
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
