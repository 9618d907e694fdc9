"""Who lets anybody in: what this deployment leans on and other machines reach is asked as a stranger would, without a key or password.

A network that keeps strangers out is not seen from here: what answers nobody but us because of it is told all the same, because whoever
gets into one machine of it is no stranger any more.
"""

import os
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit, urlunsplit

import httpx

from app import wiring
from app.domain.errors import RatchetError
from app.settings import Settings, is_loopback
from pipelines.commands.examination.findings import Finding, fail, ok, warn

ASKED_S = 5.0
OF_OTHERS = {"vllm+": ("/v1/models", "start it with --api-key, and set RATCHET_VLLM_KEY"),
             "sglang+": ("/v1/models", "start it with --api-key, and set RATCHET_SGLANG_KEY")}  # fmt: skip
OURS = ("/versions", "set RATCHET_ENGINE_KEY for it and for everybody of the deployment")


def doors(settings: Settings) -> Iterator[Finding]:
    """Broker, database, registry, engines and Ray, each that is not on this machine alone."""
    found = [*broker(settings), *database(settings), *tracking(settings), *engines(settings), *ray(os.environ)]
    yield from found
    if not found:
        yield ok("doors", "everything that this deployment leans on is on this machine alone")


def broker(settings: Settings) -> Iterator[Finding]:
    """A cluster that takes us as we are, where we show nothing, takes everybody."""
    cluster = wiring.cluster(settings)
    hosts = [server.rpartition(":")[0] for server in (cluster.bootstrap or "").split(",")]
    if cluster.embedded or all(map(is_loopback, hosts)):
        return
    shown = cluster.options.sasl_mechanism or ("a certificate" if cluster.options.certificate_file else None)
    if shown is not None:
        yield ok("doors", f"the broker at {cluster.bootstrap} is shown who we are ({shown})")
        return
    try:
        wiring.topic_faults(settings)
    except RatchetError as error:
        yield _unasked("the broker", cluster.bootstrap, error)
    else:
        yield _open("the broker", cluster.bootstrap, "set security and sasl_mechanism in [kafka], and RATCHET_KAFKA_PASSWORD")


def database(settings: Settings) -> Iterator[Finding]:
    """PostgreSQL that lets our user in with a password that nobody chose."""
    for name, url in {"the database": settings.database_url, "the inbox": settings.inbox_url}.items():
        hosts = wiring.database_hosts(url)
        if (name == "the inbox" and url == settings.database_url) or all(map(is_loopback, hosts)):
            continue
        said = ", ".join(hosts)
        try:
            open_to_all = wiring.lets_strangers_in(url)
        except RatchetError as error:
            yield _unasked(name, said, error)
            continue
        yield _open(name, said, "let pg_hba.conf ask for scram-sha-256") if open_to_all else _shut(name, said)


def tracking(settings: Settings) -> Iterator[Finding]:
    """An MLflow server that shows its experiments to whoever asks."""
    parts = urlsplit(settings.mlflow_uri)
    if parts.scheme in ("http", "https") and not is_loopback(parts.hostname or ""):
        bare = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])).rstrip("/")
        cure = "start it with --app-name basic-auth, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        yield _asked("MLflow", bare, "/api/2.0/mlflow/experiments/search?max_results=1", cure)


def engines(settings: Settings) -> Iterator[Finding]:
    """Engines that tell a stranger what they hold, and so answer one too."""
    held = wiring.engine_ledger(settings).everywhere()
    for url in dict.fromkeys([*held, *settings.engines]):
        make = next((scheme for scheme in OF_OTHERS if url.startswith(scheme)), "")
        where = url.removeprefix(make).rstrip("/")
        if not is_loopback(urlsplit(where).hostname or ""):
            path, cure = OF_OTHERS.get(make, OURS)
            yield _asked("the engine", where, path, cure)


def ray(environment: Mapping[str, str]) -> Iterator[Finding]:
    """A cluster that is joined without a token runs anybody's code."""
    address = environment.get("RAY_ADDRESS", "")
    host = urlsplit(address).hostname if "://" in address else address.rpartition(":")[0]
    if not host or is_loopback(host):
        return
    if environment.get("RAY_AUTH_MODE") == "token":
        yield _shut("Ray", address)
    else:
        yield _open("Ray", address, "start the cluster with RAY_AUTH_MODE=token, and set that and RAY_AUTH_TOKEN_PATH here")


def _asked(what: str, url: str, path: str, cure: str) -> Finding:
    """The answer to a stranger."""
    try:
        status = httpx.get(url + path, timeout=ASKED_S, trust_env=False).status_code
    except httpx.HTTPError as error:
        return _unasked(what, url, error)
    if status in (401, 403):
        return _shut(what, url)
    return _open(what, url, cure) if status == 200 else _unasked(what, url, f"it answers {status}")


def _shut(what: str, where: str) -> Finding:
    return ok("doors", f"{what} at {where} asks who comes")


def _open(what: str, where: str | None, cure: str) -> Finding:
    return fail("doors", f"{what} at {where} lets anybody in who reaches it", cure)


def _unasked(what: str, where: str | None, why: object) -> Finding:
    return warn("doors", f"{what} at {where} could not be asked ({why})", "start it, and ask again")
