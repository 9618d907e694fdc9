"""Engines in two regions over narrow lines, one of which is cut: `make bench-regions` (`ARGS=--quick`: fewer versions, a shorter cut)

Not in it: a real distance (the kernel here has no netem: lines are narrow, by tbf, and add no delay), more than one engine and gateway a
region, gates and approval (a candidate is a row, and the pointer is moved by the compare-and-swap that a release ends with), starts of
gateways and engines while they are cut off (they need the database), a storage that is away alone, a model of any size: 14 MB.

    control plane  PostgreSQL, S3 (moto), broker, relay, ingest ──┬── 20 Mbit/s ── eu: gateway, engine, people    cut, and mended
                                                                  └── 20 Mbit/s ── us: gateway, engine, people

Real processes, each region in a network namespace. In turn: engines fetch the first version whole; a version comes as a delta; one comes
whole, as where its parent is not known; the line of `eu` is cut without a word, a version is released meanwhile, and the line comes back.

| figure | what it is |
|---|---|
| versions | of each and each region: bytes that crossed the line until its engine held it; `ready_s` from when it was wanted until then; |
|  | `served_s` from the promotion until people got it |
| failed | requests of people that were not answered, in all phases |
| answers_in_the_cut, versions_in_the_cut | of people in `eu` while it was cut: how many, and of which versions |
| says_so_s | from the cut until `/health` of its gateway says since when, and what is served |
| sampled_elsewhere_before | tokens that people in `eu` had got from the other region's engine by the end of the cut |
| spooled_bytes | answers that waited on the gateway's disk at the end of the cut |
| back_s | from the line's return until people in `eu` get the new champion, from whichever region |
| own_engine_back_s | until the engine of `eu` holds it |
| lost, doubled | turns that were answered and are not in the database a while after; that are there without a request, or twice |

Ends with one line of JSON; exit code 1 where a bound does not hold. Needs root, network namespaces, tc and two packages from the registry
(moto, s3fs: .cache/parts).
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, func, insert, select, update

from app.db.engine import open_engine, reading, writing
from app.db.release.engine_reads import read_engines
from app.db.release.pointer import read_pointer, swap_pointer
from app.db.tables import inbox, releases, turns
from app.domain.ids import utc_now
from app.domain.ports import EngineState
from app.domain.release.regions import regions_of
from app.domain.release.releases import ReleaseState
from app.policy.storage.remote import RemoteWeights
from tests.bench.cluster import MOTO, S3
from tests.bench.fleet import network
from tests.bench.fleet.network import Network
from tests.bench.regional.deployment import Deployment, Region
from tests.bench.regional.models import moved, padded
from tests.broker import free_port
from tests.killable_postgres import KillablePostgres
from tests.real.parts import from_wheels

POLICY, RATE = "composer", "20mbit"
NAMES = ("eu", "us")
PATIENCE_S = 120.0
IN_FLIGHT = 16
"""Tokens of answers that are being written while they are counted."""
SAYS_SO_S, BACK_S, SHARE = 15.0, 30.0, 0.1
"""A database that is silent is given up after five seconds; connections come back within three; a delta is a few per cent."""
Figures = dict[str, Any]


@dataclass(kw_only=True)
class Bench:
    """The deployment, and what was found."""

    deployment: Deployment
    database: Engine
    weights: RemoteWeights
    folder: Path
    quick: bool
    newest: Path
    digest: str = ""
    versions: list[Figures] = field(default_factory=list[Figures])

    @property
    def regions(self) -> list[Region]:
        """Both."""
        return list(self.deployment.regions.values())

    def begin(self) -> None:
        """The first version, whole, into regions that have nothing."""
        with reading(self.database) as connection:
            pointer = read_pointer(connection, POLICY)
        assert pointer is not None
        self.digest = pointer.digest
        before = self._crossed()
        began = time.time()
        for region in self.regions:
            self.deployment.start_engine(region)
        for region in self.regions:
            self.deployment.start_gateway(region)
        ready = {
            region.name: self._until(lambda region=region: self._holds(region, self.digest), f"{region.name} holds it")
            for region in self.regions
        }
        after = self._crossed()
        self._note("first", "whole", before, after, {name: at - began for name, at in ready.items()}, {})
        for region in self.regions:
            self.deployment.start_people(region)
        for region in self.regions:
            self._until(lambda region=region: region.first_of(self.digest, 0.0), f"{region.name} is answered")

    def release(self, name: str, *, whole: bool = False, to: tuple[str, ...] = NAMES) -> None:
        """Publish a version, have it wanted as a candidate is, and make it the champion when these regions hold it."""
        folder = self.folder / name
        digest = moved(self.newest, folder, seed=len(self.versions), whole=whole)
        assert self.weights.publish(folder) == digest
        self.newest = folder
        chosen = [region for region in self.regions if region.name in to]
        before, began = self._crossed(), time.time()
        with writing(self.database) as connection:
            held = read_pointer(connection, POLICY)
            assert held is not None
            row = {"policy": POLICY, "digest": digest, "version_name": name, "state": ReleaseState.QUEUED.value, "generation": 1}
            of = {"champion_digest": held.digest, "champion_generation": held.generation, "config": {}}
            connection.execute(insert(releases), {"id": name, **row, **of, "created_at": utc_now(), "changed_at": utc_now()})
        ready = {r.name: self._until(lambda r=r: self._holds(r, digest), f"{r.name} holds {name}") - began for r in chosen}
        after, began = self._crossed(), time.time()
        with writing(self.database) as connection:
            now = replace(held, digest=digest, previous=held.digest, generation=held.generation + 1, changed_at=utc_now())
            swap_pointer(connection, now, expected=held.generation, action="promote", actor="bench", reason=None)
            connection.execute(update(releases).where(releases.c.id == name).values(state=ReleaseState.CHAMPION.value))
        self.digest = digest
        served = {r.name: self._until(lambda r=r: r.first_of(digest, began), f"people in {r.name} get {name}") - began for r in chosen}
        self._note(name, "whole" if whole else "delta", before, after, ready, served)

    def cut(self) -> Figures:
        """Cut `eu` off, promote a version meanwhile, mend the line."""
        eu, old = self.deployment.regions["eu"], self.digest
        net = self.deployment.network
        net.cut("eu")
        began = time.time()
        says = self._until(lambda: self._says_so(eu, began, old), "its gateway says that it is cut off", missing=None)
        self.release("meanwhile", to=("us",))
        time.sleep(max(0.0, (12.0 if self.quick else 40.0) - (time.time() - began)))
        engine, ends = self.deployment.look_at_engine(eu), time.time()
        elsewhere = abs(engine.get("sampled_tokens", -1) - sum(said.get("tokens", 0) for said in list(eu.answers)))
        region = next(r for r in self._regions() if r["region"] == "eu")
        spooled = sum(file.stat().st_size for file in (eu.folder / "spool").rglob("*") if file.is_file())
        net.heal("eu")
        back = self._until(lambda: eu.first_of(self.digest, ends), "eu is back", missing=None)
        own = self._until(lambda: self._holds(eu, self.digest), "the engine of eu is back", missing=None)
        answers = eu.good(began, ends)
        said = [health["health"].get("control_plane", "") for health in eu.healths if began <= health["at"] < ends]
        return {
            "cut_s": round(ends - began, 1), "says_so_s": _since(began, says), "answers_in_the_cut": len(answers),
            "slowest_answer_in_the_cut_s": round(max((answer["took"] for answer in answers), default=0.0), 2),
            "versions_in_the_cut": sorted({answer["version"][:12] for answer in answers}), "champion_before_the_cut": old[:12],
            "gateway_said": said[-1] if said else "", "engine_said": (engine.get("cut_off") or {}).get("says", ""),
            "engine_may_be_old": old in (engine.get("cut_off") or {}).get("may_be_old", []),
            "engines_heard_of": region["engines"], "champions_behind": region["champions"], "spooled_bytes": spooled,
            "back_s": _since(ends, back), "own_engine_back_s": _since(ends, own), "sampled_elsewhere_before": elsewhere,
        }  # fmt: skip

    def settle(self) -> Figures:
        """Everything that was answered has to be in the database, once."""
        time.sleep(2.0)
        self.deployment.stop_people()
        ids = {str(said["id"]) for region in self.regions for said in region.answers if said["status"] == 200}
        requests, lost = sum(len(region.answers) for region in self.regions), set[str]()

        def arrived() -> bool:
            with reading(self.database) as connection:
                lost.clear()
                lost.update(ids - set(connection.execute(select(turns.c.inference_id)).scalars()))
            return not lost

        self._until(arrived, "turns arrive", missing=False)
        with reading(self.database) as connection:
            rows = connection.execute(select(func.count()).select_from(turns)).scalar_one()
            served = select(inbox.c.event_id).where(inbox.c.type == "ratchet.turn.v1")
            again = served.group_by(inbox.c.event_id).having(func.count() > 1).subquery()
            doubled = connection.execute(select(func.count()).select_from(again)).scalar_one()
        failed = [said for region in self.regions for said in region.answers if said["status"] != 200]
        logs = {part: self.deployment.lines_of(f"eu-{part}", " part=database") for part in ("api", "engine")}
        return {
            "requests": requests, "failed": len(failed), "first_failed": failed[:3],
            "lost": len(lost), "turns": rows, "doubled": doubled + max(0, rows - requests), "lines_of_the_cut": logs,
        }  # fmt: skip

    def _regions(self) -> list[Figures]:
        now = utc_now()
        with reading(self.database) as connection:
            return regions_of(read_engines(connection, POLICY, now=now), now=now)

    def _holds(self, region: Region, digest: str) -> float | None:
        with reading(self.database) as connection:
            entries = [entry for entry in read_engines(connection, POLICY, now=utc_now()) if entry["region"] == region.name]
        ready = [v for entry in entries for v in entry["versions"] if v["state"] == EngineState.READY.value and v["digest"] == digest]
        return ready[0]["since"].timestamp() if ready else None

    def _says_so(self, region: Region, began: float, digest: str) -> float | None:
        said = [health for health in list(region.healths) if health["at"] >= began]
        return next((health["at"] for health in said if digest in health["health"].get("control_plane", "")), None)

    def _crossed(self) -> dict[str, int]:
        return {region.name: self.deployment.network.crossed(region.name)[0] for region in self.regions}

    def _note(
        self, name: str, way: str, before: dict[str, int], after: dict[str, int], ready: dict[str, float], served: dict[str, float]
    ) -> None:
        for region, seconds in ready.items():
            found: Figures = {"version": name, "way": way, "region": region, "bytes": after[region] - before[region]}
            found |= {"ready_s": round(seconds, 2)} | ({"served_s": round(served[region], 2)} if served else {})
            self.versions.append(found)
            print(f"# {json.dumps(found)}", file=sys.stderr, flush=True)

    def _until(self, holds: Callable[[], Any], what: str, **missing: Any) -> Any:
        """What it says once it says something true. Raises `TimeoutError`, or returns `missing` where that is given."""
        until = time.monotonic() + PATIENCE_S
        while not (found := holds()):
            if time.monotonic() > until:
                if missing:
                    return missing["missing"]
                raise TimeoutError(f"after {PATIENCE_S:g} s not: {what}\n{self.deployment.ends_of_logs()}")
            time.sleep(0.05)
        return found


def _since(began: float, at: float | None) -> float | None:
    return None if at is None else round(at - began, 1)


def measure(*, quick: bool) -> Figures:
    """All of it; figures."""
    packages = {"moto": from_wheels("moto", MOTO), "s3": from_wheels("s3", *S3)}
    sys.path.insert(0, str(packages["s3"]))  # this process publishes
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="ratchet-regions-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        net, port = stack.enter_context(Network()), free_port()
        stack.enter_context(KillablePostgres(port=port, host=net.outside, clients=net.range))
        url = f"postgresql+psycopg://postgres@{net.outside}:{port}/postgres"
        deployment = Deployment(folder=folder / "data", network=net, database=url, packages=packages)
        stack.callback(deployment.stop)
        padded(folder / "model", seed=7)
        deployment.prepare(folder / "model")
        os.environ.update({name: value for name, value in deployment.environment.items() if name.startswith("AWS_")})
        for name in NAMES:
            deployment.join(name, rate=RATE)
        deployment.start_control_plane()
        database = open_engine(url)
        stack.callback(database.dispose)
        weights = RemoteWeights("s3://ratchet/weights", cache=folder / "publisher")
        bench = Bench(
            deployment=deployment, database=database, weights=weights, folder=folder, quick=quick, newest=folder / "model"
        )  # fmt: skip
        bench.begin()
        bench.release("next")
        if not quick:
            bench.release("without-parent", whole=True)
            bench.release("another")
        found = bench.cut() | bench.settle()
        return {"versions": bench.versions, **found, "rate": RATE, "busy": round(os.getloadavg()[0], 1)}


def missed(found: Figures) -> list[str]:
    """Bounds that do not hold, a sentence each."""
    whole = [version["bytes"] for version in found["versions"] if version["way"] == "whole"]
    delta = [version["bytes"] for version in found["versions"] if version["way"] == "delta"]
    says, back = found["says_so_s"], found["back_s"]
    bounds = {
        f"a delta took {max(delta)} bytes of a line and a whole version {min(whole)}": max(delta) <= SHARE * min(whole),
        f"failed is {found['failed']}, 0 is the bound": found["failed"] == 0,
        f"lost is {found['lost']}, 0 is the bound": found["lost"] == 0,
        f"doubled is {found['doubled']}, 0 is the bound": found["doubled"] == 0,
        "nobody was answered in the cut": found["answers_in_the_cut"] > 0,
        f"in the cut versions {found['versions_in_the_cut']} served": found["versions_in_the_cut"] == [found["champion_before_the_cut"]],
        f"says_so_s is {says}, {SAYS_SO_S:g} is the bound": says is not None and says <= SAYS_SO_S,
        f"the engine said {found['engine_said']!r}": "the database since" in found["engine_said"] and found["engine_may_be_old"],
        f"the ledger heard of {found['engines_heard_of']} engines that were cut off": found["engines_heard_of"] == 0,
        f"the ledger says {found['champions_behind']} champions behind, 1 is so": found["champions_behind"] == 1,
        "nothing was spooled": found["spooled_bytes"] > 0,
        f"back_s is {back}, {BACK_S:g} is the bound": back is not None and back <= BACK_S,
        f"another region's engine sampled {found['sampled_elsewhere_before']} tokens": found["sampled_elsewhere_before"] <= IN_FLIGHT,
        f"the cut was said as {found['lines_of_the_cut']}": all(len(lines) == 2 for lines in found["lines_of_the_cut"].values()),
    }  # fmt: skip
    return [sentence for sentence, holds in bounds.items() if not holds]


def refusal() -> str | None:
    """Why this cannot be measured here, in a sentence; None where it can."""
    if shutil.which("tc") is None:
        return "`tc` is not here: install iproute2"
    return network.refusal()


def main() -> int:
    """Run it, print it."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.regions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one version less, a shorter cut")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left running
    if (why := refusal()) is not None:
        print(f"no regions here: {why}", file=sys.stderr)
        return 2
    found = measure(quick=options.quick)
    told = missed(found)
    print(json.dumps({**found, "missed": told}))
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
