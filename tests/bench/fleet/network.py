"""A network of one's own for every process: namespaces joined by a bridge, so that one of them can be cut off without a word.

    bridge 10.77.N.1 (database, broker, people) ──┬── veth ── namespace 10.77.N.2
                                                  ├── veth ── namespace 10.77.N.3   cut: its end leaves the bridge, packets vanish
                                                  └── veth ── namespace 10.77.N.4   poor: nft drops a fifth of them, tc leaves 2 Mbit/s

Needs root and iproute2; `refusal` says why there is none, `refusal_of_poor` why no line can be made poor (nftables).
"""

import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self


def refusal() -> str | None:
    """Why no network can be made here, in a sentence; None where it can."""
    if os.geteuid() != 0:
        return "not root: network namespaces cannot be made"
    if shutil.which("ip") is None:
        return "`ip` is not here: install iproute2"
    name = f"ratchet-probe-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        return f"the kernel makes no network namespaces here ({tried.stderr.strip()})"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return None


LOST, RATE = 20, "2mbit"
"""Of a poor line: per cent of packets in each direction, and how much passes."""
LOSING = f"""
table inet poor {{
  chain in {{ type filter hook input priority 0; iifname "eth0" numgen random mod 100 < {LOST} drop; }}
  chain out {{ type filter hook output priority 0; oifname "eth0" numgen random mod 100 < {LOST} drop; }}
}}
"""


def refusal_of_poor() -> str | None:
    """Why no line can be made poor here, in a sentence; None where it can."""
    missing = [program for program in ("nft", "tc") if shutil.which(program) is None]
    return f"`{missing[0]}` is not here: install nftables and iproute2" if missing else refusal()


@dataclass
class Network:
    """One bridge and its namespaces; gone at the end of the block."""

    _number: int = field(default_factory=lambda: os.getpid() % 250)
    _names: list[str] = field(default_factory=list[str])
    _cut: set[str] = field(default_factory=set[str])

    @property
    def outside(self) -> str:
        """Address at which namespaces reach this machine."""
        return f"10.77.{self._number}.1"

    @property
    def range(self) -> str:
        """All addresses of this network."""
        return f"10.77.{self._number}.0/24"

    @property
    def _bridge(self) -> str:
        return f"rbr{self._number}"

    def __enter__(self) -> Self:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self.outside}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._names:  # a line first: with its namespace it goes some time later
            subprocess.run(["ip", "link", "del", self._end(name)], check=False, capture_output=True)
            subprocess.run(["ip", "netns", "del", self._namespace(name)], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self._bridge], check=False, capture_output=True)

    def join(self, name: str) -> str:
        """A new namespace for `name`; returns its address."""
        self._names.append(name)
        place, space, end = len(self._names) + 1, self._namespace(name), self._end(name)
        address = f"10.77.{self._number}.{place}"
        _ip("netns", "add", space)
        _ip("link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", end, "master", self._bridge, "up")
        for words in (("link", "set", "lo", "up"), ("addr", "add", f"{address}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
            _ip("-n", space, *words)
        return address

    def inside(self, name: str) -> tuple[str, ...]:
        """What goes before a command line, so that it runs in the namespace of `name`."""
        return ("ip", "netns", "exec", self._namespace(name))

    def cut(self, name: str) -> None:
        """From now on no packet gets through in either direction, and nobody is told."""
        _ip("link", "set", self._end(name), "nomaster")
        self._cut.add(name)

    def spoil(self, name: str) -> None:
        """From now on its line is poor."""
        subprocess.run([*self.inside(name), "nft", "-f", "-"], input=LOSING, text=True, check=True, capture_output=True)
        shape = ("tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", RATE, "burst", "16kb", "latency", "400ms")
        subprocess.run([*self.inside(name), *shape], check=True, capture_output=True)

    def narrow(self, name: str, rate: str) -> None:
        """From now on no more than that passes in either direction (`20mbit`), and what comes faster waits in line."""
        shape = ("root", "tbf", "rate", rate, "burst", "64kb", "latency", "400ms")
        for before, device in ((self.inside(name), "eth0"), ((), self._end(name))):
            subprocess.run([*before, "tc", "qdisc", "replace", "dev", device, *shape], check=True, capture_output=True)

    def crossed(self, name: str) -> tuple[int, int]:
        """Bytes that went to it and that came from it so far, heads of packets included."""
        counted = Path("/sys/class/net") / self._end(name) / "statistics"
        return int((counted / "tx_bytes").read_text()), int((counted / "rx_bytes").read_text())

    def mend(self, name: str) -> None:
        """Its line is a good one again."""
        for words in (("nft", "delete", "table", "inet", "poor"), ("tc", "qdisc", "del", "dev", "eth0", "root")):
            subprocess.run([*self.inside(name), *words], check=True, capture_output=True)

    def heal(self, name: str) -> None:
        """Packets go through again; harmless where they did."""
        if name in self._cut:
            _ip("link", "set", self._end(name), "master", self._bridge)
            self._cut.discard(name)

    def _namespace(self, name: str) -> str:
        return f"r{self._number}-{name}"

    def _end(self, name: str) -> str:
        return f"rv{self._number}x{self._names.index(name)}"


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
