"""The MLflow projection: one registered model per policy, one model version per version, aliases that follow the SQL pointer.

MLflow is written, never read for a decision: an alias is an unconditional merge there, without an expected value or history
(`facts/gates.md`, section 8). `reconcile` repairs what drifted and says what it repaired, so that the drift can be alarmed on.
"""

import fcntl
import hashlib
import math
import os
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import Metric, Param, RunTag
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from app.domain.errors import Unavailable
from app.domain.release.versions import TrainingRun, Version

ALIASES = ("champion", "canary", "candidate", "previous", "anchor")
IMPATIENT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""MLflow's own defaults (seven tries, each later than the one before) held a cycle up for four minutes where nobody answered (measured);
the projection comes back every minute anyway."""
PARAM_LIMIT = 6000
"""MLflow refuses longer parameter values."""
METRICS_LIMIT = 1000
"""MLflow refuses more at once."""
NAME_LIMIT = 250
"""MLflow refuses longer names of metrics and parameters."""
UNFIT = re.compile(r"^\.+|[^\w\-. ]")
"""What MLflow refuses in them, such as the `=` and `,` of a segment, and `//`, `/./` and `..` where they would be paths."""


class MlflowRegistry:
    """The `VersionRegistry` port on MLflow."""

    def __init__(self, uri: str, *, weights: str | None = None) -> None:
        """`weights`: the URL below which versions lie, where that is no folder of this machine: a server takes no path of ours.

        A SQLite file that is not there is made. Raises `Unavailable` where it cannot be, or what is there cannot be opened.
        """
        file = _file_of(uri)
        self._login = "" if file else uri[uri.find("://") + len("://") : uri.rfind("@") + 1]
        """Who logs in there and with what, which no message says; empty where nobody does."""
        self._place = uri.replace(self._login, "", 1)
        self._weights = weights
        for name, value in IMPATIENT.items():
            os.environ.setdefault(name, value)
        mlflow.set_tracking_uri(uri)
        if file is not None:
            self._make(file)
        try:
            self.client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        except MlflowException as error:  # such as tables of an older MLflow, with the command that upgrades them
            raise Unavailable(f"MLflow at {self._place} is not opened: {self._said(error)}") from error
        except Exception as error:  # its database library's own errors come through
            cure = "ask its administrator" if file is None else "move the file away, and what is in use is written anew from the ledger"
            raise Unavailable(f"MLflow's tables in {self._place} are not whole ({_first_line(error)}): {cure}") from error

    def _make(self, file: Path) -> None:
        try:
            _make_whole(file)
        except Exception as error:  # the file system's, or its database library's own
            cure = f"let it write to {file.parent}, and give it space"
            raise Unavailable(f"MLflow's tables in {self._place} are not made ({_first_line(error)}): {cure}") from error

    def register(self, version: Version, *, folder: Path, run: TrainingRun | None, card: str) -> None:
        """Create the model version with its run, metrics, parameters and model card. Idempotent by digest. Raises `Unavailable`."""
        try:
            if self._find(version.policy, version.digest) is None:
                self._create(version, folder=folder, run=run, card=card)
        except MlflowException as error:
            raise Unavailable(f"MLflow at {self._place} did not take version {version.name}: {self._said(error)}") from error

    def reconcile(self, policy: str, wanted: Mapping[str, str]) -> list[str]:
        """Make the aliases of a policy what SQL says (alias → digest); returns a sentence per repair. Raises `Unavailable`.

        A version that somebody deleted in MLflow cannot be aliased: that is reported, and repaired by the next `register`.
        """
        try:
            return self._reconcile(policy, wanted)
        except MlflowException as error:
            raise Unavailable(f"MLflow at {self._place} did not take the aliases of {policy}: {self._said(error)}") from error

    def _said(self, error: MlflowException) -> str:
        """MLflow's own words, which have the whole address in them."""
        return str(error.message).replace(self._login, "") if self._login else str(error.message)

    def _reconcile(self, policy: str, wanted: Mapping[str, str]) -> list[str]:
        have = {alias: str(number) for alias, number in self.client.get_registered_model(policy).aliases.items()}
        repairs: list[str] = []
        for alias in ALIASES:
            digest = wanted.get(alias)
            found = self._find(policy, digest) if digest else None
            if digest and found is None:
                repairs.append(f"alias {alias}: version {digest[:12]} is missing in MLflow")
            elif found is not None and have.get(alias) != str(found.version):
                self.client.set_registered_model_alias(policy, alias, str(found.version))
                repairs.append(f"alias {alias} → version {found.version}")
            elif digest is None and alias in have:
                self.client.delete_registered_model_alias(policy, alias)
                repairs.append(f"alias {alias} removed")
        return repairs

    def _find(self, policy: str, digest: str) -> ModelVersion | None:
        found = self.client.search_model_versions(f"name = '{policy}' AND tag.digest = '{digest}'", max_results=1)
        return found[0] if found else None

    def _create(self, version: Version, *, folder: Path, run: TrainingRun | None, card: str) -> None:
        self._ensure_model(version.policy)
        started = run.started_at if run else version.created_at
        finished = (run.finished_at if run else None) or version.created_at
        experiment = self.client.get_experiment_by_name(version.policy)
        experiment_id = experiment.experiment_id if experiment else self.client.create_experiment(version.policy)
        known = self.client.search_runs([experiment_id], f"tags.digest = '{version.digest}'", max_results=1)  # of a try that was refused
        if not known:
            name, tagged = version.name, {"digest": version.digest}
            known = [self.client.create_run(experiment_id, start_time=_millis(started), run_name=name, tags=tagged)]
        run_id = known[0].info.run_id
        tags = {"digest": version.digest, "parent": version.parent or "", "kind": version.kind.value, "base_model": version.base_model}
        tags |= {"licence": version.licence, **version.tags}
        metrics = _metrics(run.metrics if run else {}, _millis(finished))
        for start in range(0, len(metrics), METRICS_LIMIT):
            self.client.log_batch(run_id, metrics=metrics[start : start + METRICS_LIMIT])
        self.client.log_batch(
            run_id,
            params=_params(run.config if run else {}),
            tags=[RunTag(key, value) for key, value in tags.items()],
        )
        self.client.set_terminated(run_id, end_time=_millis(finished))
        source = folder.as_uri() if self._weights is None else f"{self._weights.rstrip('/')}/{version.digest}"
        self.client.create_model_version(version.policy, source=source, run_id=run_id, tags=tags, description=card)

    def _ensure_model(self, policy: str) -> None:
        try:
            self.client.create_registered_model(policy)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise


def _file_of(uri: str) -> Path | None:
    """The file of a SQLite database; None for a server and for a database in memory."""
    scheme, _, path = uri.partition("?")[0].partition(":///")
    return Path(path) if scheme.startswith("sqlite") and path not in ("", ":memory:") else None


def _make_whole(file: Path) -> None:
    """Make MLflow's tables beside the file, and give it its name when all are there; nothing where it is there.

    MLflow makes them one by one in the file itself: a process killed meanwhile leaves what no later one can open, and of two that begin
    at once one ends in the other's tables (both measured).
    """
    with _alone(file):
        if file.exists():
            return
        half = file.with_name(f"{file.name}.half")
        for left in file.parent.glob(f"{half.name}*"):
            left.unlink()
        MlflowClient(tracking_uri=f"sqlite:///{half}")
        half.replace(file)


@contextmanager
def _alone(file: Path) -> Generator[None]:
    """Wait until no other process of this machine has it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_name(f"{file.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _millis(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)


def _metrics(tree: Mapping[str, Any], at: int, prefix: str = "", step: int = 0) -> list[Metric]:
    """Numbers of a nested dict as `a.b.c` metrics; lists, of numbers or of dicts of them, become metrics with steps. What is not finite
    is left out: MLflow stores it as a huge number."""
    found: list[Metric] = []
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found += _metrics(value, at, f"{name}.", step)
        elif isinstance(value, bool | int | float) and math.isfinite(value):
            found.append(Metric(_named(name), float(value), at, step))
        elif isinstance(value, list):
            for place, entry in enumerate(value):
                found += _metrics(entry, at, f"{name}.", place) if isinstance(entry, Mapping) else _metrics({name: entry}, at, "", place)
    return found


def _params(tree: Mapping[str, Any], prefix: str = "") -> list[Param]:
    found: list[Param] = []
    for key, value in tree.items():
        found += (
            _params(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [Param(_named(f"{prefix}{key}"), str(value)[:PARAM_LIMIT])]
        )
    return found


def _named(name: str) -> str:
    """A name that MLflow takes; of two long ones that begin alike each keeps its own."""
    fit = UNFIT.sub("_", name)
    if len(fit) <= NAME_LIMIT:
        return fit
    mark = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:12]
    return f"{fit[: NAME_LIMIT - len(mark) - 1]}-{mark}"
