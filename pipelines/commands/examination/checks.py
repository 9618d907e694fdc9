"""The assumptions of a deployment, in the order in which they fail: configuration, database, clock, broker, storage, secrets, engines, …"""

import asyncio
import os
import stat
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from app import wiring
from app.domain.errors import Unavailable
from app.domain.learning.boxes import BoxSpec, Limits
from app.domain.ports import EngineState
from app.settings import Settings, read_toml
from pipelines.commands.examination.doors import doors
from pipelines.commands.examination.findings import Check, Finding, fail, ok, warn
from pipelines.config import loop_config
from pipelines.ingestion.config import streaming_config
from pipelines.preflight import require_policies, require_space, require_writable

DAY_S = 86_400.0
BACKUP_S, DRILL_S = 26 * 3600.0, 7 * DAY_S
"""As infra/prometheus/rules alarms at."""
BOX = Limits(cpu_s=5, memory_bytes=256 << 20, file_bytes=1 << 20)


def checks_of(settings: Settings) -> list[tuple[str, Check]]:
    """Every check, by name."""
    return [
        ("configuration", lambda: configuration(settings)), ("schema", lambda: schema(settings)), ("database", lambda: database(settings)),
        ("clock", lambda: clock(settings)), ("broker", lambda: broker(settings)), ("storage", lambda: storage(settings)),
        ("tracking", lambda: tracking(settings)), ("secrets", lambda: secrets(settings)), ("engines", lambda: engines(settings)),
        ("doors", lambda: doors(settings)),
        ("boxes", lambda: boxes(settings)), ("audit", lambda: audit(settings)), ("backup", lambda: backup(settings)),
    ]  # fmt: skip


def configuration(settings: Settings) -> Iterator[Finding]:
    """It can be read, names policies whose models are there, and leaves room on the disk."""
    toml = read_toml(settings.config)
    loop_config(toml)
    streaming_config(toml)
    declared = wiring.load_policies(settings)
    require_policies(declared, config=settings.config)
    require_writable(settings.data)
    require_space(settings.data)
    yield ok("configuration", f"{settings.config or 'defaults'}: policies {', '.join(declared)}")


def schema(settings: Settings) -> Iterator[Finding]:
    """Both databases are at a revision that this code runs on."""
    wiring.open_state(settings).dispose()
    wiring.open_inbox(settings).dispose()
    yield ok("schema", f"at {wiring.schema_revision(settings)}, which this code runs on")


def database(settings: Settings) -> Iterator[Finding]:
    """A commit is durable, on one machine or two, and nothing waits for ever."""
    state = wiring.deployment_state(settings)
    server = state.server()
    if server is None:
        yield ok("database", "SQLite: one machine, durable with its disk")
        return
    yield ok("database", f"PostgreSQL {server.version}, timeline {server.timeline}")
    for weak in server.weaknesses():
        yield (fail if weak.here else _weight(settings))("database", weak.what, weak.cure)
    if (told := server.unarchived()) is not None:
        yield warn("database", *told)
    if server.encoding != "UTF8":
        yield fail("database", f"its encoding is {server.encoding}", "create it with ENCODING 'UTF8'")
    if missing := state.unlimited():
        yield fail("database", f"no {', '.join(missing)}", "take it out of the `options` of RATCHET_DATABASE_URL, which says 0")


def clock(settings: Settings) -> Iterator[Finding]:
    """This machine's clock is the database's."""
    yield ok("clock", f"{wiring.clock(settings).skew_s():+.3f} s from the database's")


def broker(settings: Settings) -> Iterator[Finding]:
    """It answers, and its topics are what is configured."""
    differs = wiring.topic_faults(settings)
    for sentence in differs:
        yield fail("broker", sentence)
    if not differs:
        yield ok("broker", f"{settings.kafka_bootstrap or 'the embedded one'}: topics as configured")


def storage(settings: Settings) -> Iterator[Finding]:
    """Segments and weights are ours alone, and their places keep what we need."""
    identity = wiring.deployment_state(settings).identity()
    for setting, location in wiring.places(settings).items():
        wiring.claim_place(location, identity, setting=setting)
        found = wiring.place_faults(location, setting=setting)
        for fault in found:
            yield warn("storage", fault, "use storage that answers 412 (SeaweedFS, Garage, RustFS, S3 do)")
        if not found:
            yield ok("storage", f"{location}: ours alone, reads what was written, makes nothing twice")


def tracking(settings: Settings) -> Iterator[Finding]:
    """MLflow answers; the loop goes on without it, and repairs it later."""
    try:
        wiring.check_tracking(settings)
    except Unavailable as error:
        yield warn("tracking", str(error), "start it; the loop goes on without, and repairs it later")
    else:
        yield ok("tracking", settings.mlflow_uri.split("@")[-1])


def secrets(settings: Settings) -> Iterator[Finding]:
    """They are there, long, ours, and nobody else's to read."""
    wiring.actor_salt(settings)
    wiring.session_secrets(settings)()
    wiring.webhook_keys(settings)
    if settings.reached_by is not None:
        wiring.refuse_weak_secrets(settings)
    loose = [str(path) for path in _files(settings.secrets) if stat.S_IMODE(path.stat().st_mode) & 0o077]
    for path in loose:
        yield fail("secrets", f"others may read {path}", f"chmod 600 {path}")
    keys = wiring.key_book(settings)
    if not keys.all():
        says = "no API key is good, so nobody gets in" if keys.ever() else "no API key was ever made: this machine may do everything"
        yield _weight(settings)("secrets", says, "ratchet people first NAME, then ratchet login")
    if not loose:
        yield ok("secrets", "salt, session secret and webhook key are there")


def engines(settings: Settings) -> Iterator[Finding]:
    """They answer, every champion is held, and nobody holds what this deployment does not know."""
    asyncio.run(_ping(settings))
    state = wiring.deployment_state(settings)
    champions, held = state.champions(), state.held()
    holding: dict[tuple[str, str], int] = defaultdict(int)
    for version in held:
        holding[version.policy, version.digest] += version.state == EngineState.READY
        if version.state == EngineState.FAILED:
            yield fail("engines", f"{version.engine} cannot hold {version.digest[:12]}: {version.detail}", "see the engine's log")
        elif version.state == EngineState.READY and version.detail is not None:
            yield fail("engines", f"{version.engine} computes other log-probabilities for {version.digest[:12]}: {version.detail}",
                       "restart it; where it stays so, take it out")  # fmt: skip
    for digest in sorted(state.unknown({version.digest for version in held})):
        yield fail("engines", f"an engine holds {digest[:12]}, which this database does not know",
                   "after a restore: start the engines again, and promote nothing until `ratchet audit verify` is clean")  # fmt: skip
    for policy, digest in champions.items():
        if holding[policy, digest]:
            yield ok("engines", f"{holding[policy, digest]} hold the champion of {policy}, {digest[:12]}")
        else:
            yield fail("engines", f"none holds the champion of {policy}, {digest[:12]}", "start one (`ratchet engine`), or see its log")
    if not champions:
        yield fail("engines", "no policy is deployed", "ratchet prepare")


async def _ping(settings: Settings) -> None:
    async with wiring.open_engines(settings) as opened:
        await opened.ping()


def boxes(settings: Settings) -> Iterator[Finding]:
    """Programs that models wrote run where they harm nobody; only `execute` suites need it."""
    offline = loop_config(read_toml(settings.config)).offline
    keeper = wiring.boxes(trusted=offline.allow_weak_isolation)
    box = keeper.open(BoxSpec(limits=BOX))
    box.stop()
    yield ok("boxes", ", ".join(f"{name} {value}" for name, value in keeper.describe().items()))
    if offline.allow_weak_isolation:
        yield warn("boxes", "offline.allow_weak_isolation is set: what a model writes runs as this user", "take it out")


def audit(settings: Settings) -> Iterator[Finding]:
    """Nobody edited what was done."""
    found = wiring.release_views(settings).verify()
    if found.problem is None:
        yield ok("audit", f"{found.entries} entries, head {found.head[:12]}")
    else:
        yield fail("audit", found.problem, "compare with what was sent to Kafka and to webhooks; restore from before it")


def backup(settings: Settings) -> Iterator[Finding]:
    """There is one, it is young, and one was restored lately."""
    ages = wiring.deployment_state(settings).ages_s()
    made = "make one (docs/backup.md), then `ratchet backup note`"
    restored = "restore one (docs/backup.md), then `ratchet backup note --drill`"
    for name, limit, cure in (("backup", BACKUP_S, made), ("drill", DRILL_S, restored)):
        age = ages[name]
        if age is None:
            yield warn("backup", f"there never was a {name}", cure)
        elif age > limit:
            yield warn("backup", f"the last {name} was {age / DAY_S:.1f} days ago", cure)
        else:
            yield ok("backup", f"the last {name} was {age / 3600:.1f} hours ago")


def _weight(settings: Settings):  # noqa: ANN202 - `fail` or `warn`
    """What only matters where others depend on it fails there, and is a warning on a laptop."""
    return fail if settings.standby_required or settings.reached_by is not None else warn


def _files(folder: Path) -> list[Path]:
    return [Path(found.path) for found in os.scandir(folder)] if folder.is_dir() else []
