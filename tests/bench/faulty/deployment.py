"""A deployment to be tormented: its processes, and between each of them and what it talks to a wire that fails."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from app.db.migrate import upgrade
from tests.bench.faulty.locks import Lock
from tests.bench.faulty.wire import Pair, Wire
from tests.bench.faulty.world import World, environment
from tests.broker import free_port
from tests.standby_postgres import ReplicatedPostgres

Url = Callable[[str], str]
"""Of a database, by its file's name where it is a file."""


@dataclass(frozen=True, kw_only=True)
class Torment:
    """What happens to a deployment."""

    name: str
    kill_every_s: float
    pause_s: float = 0.0
    """The longest pause; 0: nobody is paused."""
    lock_s: float = 0.0
    """How long a database stays locked; 0: none is."""
    wires: bool = False
    """Connections fail, and PostgreSQL fails over."""
    replicas: int = 4


class Restarted:
    """PostgreSQL, killed and started again."""

    def __init__(self, pair: ReplicatedPostgres) -> None:
        self._pair = pair

    def kill(self) -> bool:
        """False while it is down already, or fails over."""
        return self._pair.kill_primary()


@contextmanager
def tormented(folder: Path, database: str, torment: Torment) -> Iterator[tuple[World, Url]]:
    """Everything started; what may be killed beside processes is among `World.servers`."""
    with ExitStack() as parts:
        # Several doors over one SQLite file would only wait for each other.
        world = World(folder=folder, doors=torment.replicas if database == "postgres" else 1, replicas=torment.replicas)
        url = _database(world, database, torment, parts)
        through = url("") if database == "postgres" else None
        world.environment = environment(folder, database_url=through)
        for target in {url(file) for file in ("ratchet", "inbox")}:
            upgrade(target)
        broker_port = free_port()
        broker = _wire(world, parts, to=broker_port)
        doors = [_wire(world, parts, to=port) for port in world.door_ports]
        world.api_ports = [wire.port for wire in doors]
        if torment.wires:
            world.servers |= {f"wire:{who}-broker": Pair(broker, who) for who in ("relay", "ingest")}
            world.servers |= {f"wire:client-api-{n + 1}": Pair(wire, "client") for n, wire in enumerate(doors)}
        if torment.lock_s:
            for table, file in (("inbox", "inbox"), ("turns", "ratchet")):
                lock = Lock(url(file), table=table, seconds=torment.lock_s)
                world.servers[f"lock:{table}"] = lock
                parts.callback(lock.close)
        parts.callback(world.stop)
        world.start(broker_port=broker_port, broker_front=broker.port)
        world.await_doors()
        yield world, url


def _wire(world: World, parts: ExitStack, *, to: int) -> Wire:
    wire = Wire(port=free_port(), to=to, whose=world.whose)
    parts.callback(wire.close)
    return wire


def _database(world: World, kind: str, torment: Torment, parts: ExitStack) -> Url:
    if kind == "sqlite":
        return lambda file: f"sqlite:///{world.folder}/{file}.db"
    wire = _wire(world, parts, to=0)
    pair = parts.enter_context(ReplicatedPostgres(moved=wire.point))
    world.servers["postgres"] = Restarted(pair)
    if torment.wires:
        world.servers["failover"] = pair
        world.servers |= {f"wire:{who}-postgres": Pair(wire, who) for who in ("api", "relay", "ingest", "label")}
    return lambda _: f"postgresql+psycopg://postgres@127.0.0.1:{wire.port}/postgres"
