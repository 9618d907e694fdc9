"""Training on two machines that share no folder, one of which is killed in mid-update: `make bench-cluster`.

Not in it: Kubernetes and KubeRay, GPUs and NCCL, a network that drops packets, the loss of Ray's head (the driver ends with it, and the
loop that starts it again resumes), the loop itself and its database (runs are kept in a dict), a model of any size: 0.8 million parameters.

    driver ── Ray with a token ──▶ head: worker 0 ◀── gloo ──▶ worker 1 on the other machine
       └────────────── S3 (moto): segments, weights, checkpoints, states ────┘

Machines are network namespaces, each with an address, /tmp, /dev/shm and RATCHET_DATA of its own; the driver has a RATCHET_DATA that
neither worker sees, and the checkout is all that they share, read-only. In turn:

    refused        two machines and no object storage: one sentence, and no actor is started
    whole          an update of six steps on both machines
    cut, resumed   the same under another name; in its third step everything on the second machine is killed (SIGKILL), a machine with an
                   empty disk comes in its place, and the update is made again, as the loop does
    next           an update that continues from what that made: masters and moments come through storage
    alone          whole and next with two workers on one machine, in folders, without object storage

The same two workers compute the same sums in the same order wherever they are, so all weights have to be equal to the bit. `failover_s` is
from the kill to the first pass of the resumed update, the start of Ray on the new machine included; `steps_lost` counts the step that was
begun. Ends with {"nodes", "workers", "equal_to_one_node", "killed", "resumed", "steps_lost", "failover_s", "bytes_through_storage", …};
exit code 1 where a bound does not hold. Needs root, network namespaces, and two packages from the registry (moto, s3fs: .cache/parts).
"""

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx

from tests.bench.training_cluster.machines import Machine, Machines, machines, refusal
from tests.broker import wait_for_port
from tests.real.parts import ROOT, from_wheels

S3 = ("--no-deps", "--require-hashes", "-r", str(ROOT / "infra" / "s3.lock"))
MOTO = "moto[server]==5.2.5"
PORT = 8333
FAILOVER_S = 180.0
"""Two thirds of it are starts of Python with torch and Ray, which take five times as long on two cores beside other work."""
STEPS_LOST = 2
"""A checkpoint is written after every step: the one that was begun, and one whose checkpoint was under way."""
WATCHED_S = 900.0
Events = dict[str, dict[str, Any]]


def measure() -> dict[str, Any]:
    """All of it; figures. Raises `OSError` where machines cannot be made."""
    moto, s3 = from_wheels("moto", MOTO), from_wheels("s3", *S3)
    told = {
        "PYTHONPATH": f"{ROOT}:{s3}", "RATCHET_DATA": "/tmp/ratchet", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "ratchet", "AWS_SECRET_ACCESS_KEY": secrets.token_hex(16),
    }  # fmt: skip
    with machines(told) as all_:
        storage, head, worker = all_.add("storage"), all_.add("head"), all_.add("worker")
        url = _serve(storage, f"{ROOT}:{moto}")
        all_.environment["AWS_ENDPOINT_URL"] = url
        for place in ("SEGMENTS", "WEIGHTS", "STATES"):
            all_.environment[f"RATCHET_{place}"] = f"s3://ratchet/{place.lower()}"
        began = time.monotonic()
        all_.start_ray(head)
        all_.start_ray(worker, head=head)
        _note(f"two machines run Ray after {time.monotonic() - began:.0f} s")
        refused = dict(_watched(_driver(all_, head, "refused")))
        actors = sum(_actors(machine) for machine in (head, worker))
        found = _killed_and_resumed(all_, head, worker)
        through = httpx.get(f"{url}/-/bytes", trust_env=False).json()
        leaked = [str(file) for file in (head.home / "driver").rglob("*")]
        for machine in (head, worker, all_.all["another"]):
            machine.kill()
        one = dict(_watched(_alone(all_)))
    return _figures(found, one) | {
        "refused": refused.get("refused", {}).get("said", ""), "actors_of_the_refused": actors, "read_from_each_other": leaked,
        "bytes_through_storage": through["in"] + through["out"], "bytes_in": through["in"], "bytes_out": through["out"],
        "requests": through["requests"], "busy": round(os.getloadavg()[0], 1),
    }  # fmt: skip


def _killed_and_resumed(all_: Machines, head: Machine, worker: Machine) -> Events:
    """The driver's life on two machines, and the end of one of them."""
    found: Events = {}
    for event, line in _watched(_driver(all_, head, "cluster")):
        found[event] = line
        if event == "half":
            found["killed"] = {"at": time.time(), "processes": worker.kill()}
            another = all_.add("another")
            all_.start_ray(another, head=head)
            found["replaced"] = {"at": time.time(), "address": another.address}
            _note(f"{worker.name} was killed, another one runs Ray after {found['replaced']['at'] - found['killed']['at']:.0f} s")
    return found


def _figures(found: Events, one: Events) -> dict[str, Any]:
    """Of what was said on two machines and on one."""
    cut, lost, whole = (found.get(name, {}) for name in ("made cut", "lost 1", "made whole"))
    killed, resumed_from = found.get("killed", {}), cut.get("resumed_from")
    alone = [one.get(f"made {name}", {}).get("candidate", "none") for name in ("whole", "next")]
    return {
        "nodes": len(set(found.get("placed", {}).get("nodes", ()))), "workers": len(found.get("placed", {}).get("nodes", ())),
        "equal_to_one_node": [whole.get("candidate"), found.get("made next", {}).get("candidate")] == alone,
        "killed": killed.get("processes", 0), "lost_after_s": _between(killed, lost), "said": lost.get("said", ""),
        "resumed": cut.get("candidate") is not None and cut.get("candidate") == whole.get("candidate"), "resumed_from_step": resumed_from,
        "steps_lost": None if resumed_from is None or not lost else lost["steps"] - resumed_from + 1,
        "attempts": sum(event.startswith("lost") for event in found) + 1, "inherited": found.get("made next", {}).get("optimizer"),
        "replaced_after_s": _between(killed, found.get("replaced", {})), "failover_s": _between(killed, found.get("goes_on", {})),
        "update_s": whole.get("took_s"), "update_on_one_s": one.get("made whole", {}).get("took_s"),
        "nodes_afterwards": found.get("goes_on", {}).get("nodes", []), "replaced_by": found.get("replaced", {}).get("address"),
    }  # fmt: skip


def missed(found: dict[str, Any]) -> list[str]:
    """Bounds that do not hold, a sentence each."""
    failover, lost = found["failover_s"], found["steps_lost"]
    bounds = {
        f"{found['workers']} workers are on {found['nodes']} machines, not two on two": (found["nodes"], found["workers"]) == (2, 2),
        "two machines made other weights than two workers on one": found["equal_to_one_node"],
        "nothing was killed": found["killed"] > 0,
        "the resumed update made other weights than the one that nobody disturbed": found["resumed"],
        f"the loss was told as {found['said']!r}": "was lost" in found["said"],
        f"steps_lost is {lost}, {STEPS_LOST} is the bound": lost is not None and 1 <= lost <= STEPS_LOST,
        f"failover_s is {failover}, {FAILOVER_S:g} is the bound": failover is not None and failover <= FAILOVER_S,
        f"the resumed update ran on {found['nodes_afterwards']}": found["replaced_by"] in found["nodes_afterwards"],
        f"the next update's optimizer is {found['inherited']}, inherited is the bound": found["inherited"] == "inherited",
        f"without object storage it said {found['refused']!r}": "name object storage" in found["refused"],
        f"{found['actors_of_the_refused']} workers were started without object storage": found["actors_of_the_refused"] == 0,
        f"the driver's files were seen by a worker: {found['read_from_each_other'][:3]}": not found["read_from_each_other"],
        "nothing went through storage": found["bytes_through_storage"] > 0,
    }  # fmt: skip
    return [sentence for sentence, holds in bounds.items() if not holds]


def _serve(machine: Machine, path: str) -> str:
    """The bucket; its server's address."""
    with (machine.home / "log").open("ab") as log:
        machine.start(
            sys.executable, "-m", "tests.bench.training_cluster.bucket", machine.address, str(PORT), log=log, PYTHONPATH=path,
        )  # fmt: skip
    wait_for_port(PORT, host=machine.address)
    url = f"http://{machine.address}:{PORT}"
    httpx.put(f"{url}/ratchet", trust_env=False).raise_for_status()
    return url


def _driver(all_: Machines, head: Machine, what: str) -> "subprocess.Popen[bytes]":
    """On the head's machine, with files of its own."""
    private = all_.folder / f"driver-{what}"
    private.mkdir()
    return head.start(
        sys.executable, "-m", "tests.bench.training_cluster.driver", what, log=subprocess.PIPE, private=private,
        RATCHET_DATA="/tmp/driver", RAY_ADDRESS=f"{head.address}:6379",
    )  # fmt: skip


def _alone(all_: Machines) -> "subprocess.Popen[bytes]":
    """A machine that needs no other one."""
    folders = {f"RATCHET_{place}": f"/tmp/ratchet/{place.lower()}" for place in ("SEGMENTS", "WEIGHTS", "STATES")}
    machine = all_.add("alone")
    return machine.start(sys.executable, "-m", "tests.bench.training_cluster.driver", "alone", log=subprocess.PIPE, private=None, **folders)


def _watched(driver: "subprocess.Popen[bytes]") -> Iterator[tuple[str, dict[str, Any]]]:
    """What it says, by event: `made NAME`, `lost ATTEMPT`, or one word. Raises `RuntimeError` where it fails."""
    assert driver.stdout is not None
    until = time.monotonic() + WATCHED_S
    with driver.stdout as told:
        for said in told:
            if time.monotonic() > until:
                raise RuntimeError(f"the driver was not done after {WATCHED_S:g} s")
            if not said.startswith(b"{"):  # Ray's own words about machines
                _note(said.decode(errors="replace").rstrip())
                continue
            line = json.loads(said)
            event = " ".join(str(line[key]) for key in ("event", "name", "attempt") if key in line)
            _note(f"{event}: {json.dumps({key: value for key, value in line.items() if key not in ('event', 'at')})}")
            yield event, line
    if driver.wait() != 0:
        raise RuntimeError(f"the driver ended with {driver.returncode}: its error is above")


def _actors(machine: Machine) -> int:
    """Training workers on a machine; Ray names its processes after the actor."""
    words = [_command(pid) for pid in machine.processes()]
    return sum("TrainingWorker" in word for word in words)


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _between(begin: dict[str, Any], end: dict[str, Any]) -> float | None:
    return round(end["at"] - begin["at"], 1) if begin and end else None


def _note(words: str) -> None:
    print(f"# {words}", file=sys.stderr, flush=True)


def main() -> int:
    """Run it, print it."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left running
    if (why := refusal()) is not None:
        print(f"no machines here: {why}", file=sys.stderr)
        return 2
    found = measure()
    told = missed(found)
    print(json.dumps({**found, "missed": told}))
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
