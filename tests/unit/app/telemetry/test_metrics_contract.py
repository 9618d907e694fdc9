"""The names of metrics are a contract: the catalogue, what processes show, the page, the rules and the dashboards say the same."""

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.api.metrics import Metrics
from app.domain.errors import Unavailable
from app.domain.readings import Reading
from app.telemetry.catalogue import CATALOGUE, FROM_DATABASE, LIBRARY, Kind, of_process, page
from app.telemetry.instruments import Instruments
from tests.architecture.sources import ROOT, python_files


class Told:
    """A sight with one sample of everything that it may tell."""

    def readings(self) -> list[Reading]:
        return [
            Reading(metric=name, value=1.0, labels=dict.fromkeys(CATALOGUE[name].labels, "composer"))
            for name in sorted(FROM_DATABASE - {"ratchet_database_up"})
        ]


class Away:
    """A sight whose database does not answer."""

    def readings(self) -> list[Reading]:
        raise Unavailable("the database does not answer")


def shown(text: bytes) -> dict[str, str]:
    """Families of an exposition with their types, by the name in the catalogue; not the library's own, nor its `_created` beside each."""
    families = [f for f in text_string_to_metric_families(text.decode()) if not f.name.startswith(LIBRARY)]
    return {f"{f.name}_total" if f.type == "counter" else f.name: f.type for f in families if not f.name.endswith("_created")}


def test_the_api_shows_what_the_catalogue_says_of_it() -> None:
    metrics = Metrics(Told())
    assert shown(metrics.text()) == {name: described.kind.value for name, described in of_process("api").items()}


def test_a_database_that_is_away_is_said_and_nothing_stale_with_it() -> None:
    text = Metrics(Away()).text()
    assert b"ratchet_database_up 0.0" in text
    assert FROM_DATABASE & shown(text).keys() == {"ratchet_database_up"}


def test_a_key_for_one_policy_reads_no_sums_of_everybody() -> None:
    metrics = Metrics(Told())
    assert "ratchet_database_up" not in shown(metrics.text("composer"))
    assert "ratchet_rollbacks_total" in shown(metrics.text("composer"))
    assert shown(metrics.text("tab")) == {}


def test_every_metric_of_the_catalogue_is_shown_by_somebody_and_no_other() -> None:
    sources = "\n".join(p.read_text() for p in python_files("app", "pipelines") if p.name != "catalogue.py")
    spelled = set(re.findall(r'"((?:ratchet|gen_ai)_[a-z_]+)"', sources))
    made = {name for name in spelled if name in CATALOGUE}
    backlog = {f"ratchet_{name}" for name in ("inbox_unsent", "inbox_unapplied", "stream_lag", "labels_due", "dead_letters", "files_owing")}
    assert CATALOGUE.keys() == made | backlog | {"ratchet_observations_parked"}


@pytest.mark.parametrize(("process", "name"), [("relay", "ratchet_engine_load"), ("relay", "ratchet_run_mismatch")])
def test_a_process_shows_nothing_of_another_one(process: str, name: str) -> None:
    with pytest.raises(AssertionError, match="not a metric of relay"):
        Instruments(process).gauge(name)


def test_the_page_is_the_catalogue() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == page(), "run python -m app.telemetry.catalogue > docs/metrics.md"


def test_names_say_their_unit_and_what_only_grows() -> None:
    for name, described in CATALOGUE.items():
        assert name.endswith("_total") == (described.kind is Kind.COUNTER), name
        assert not re.search(r"_(s|ms|mb|kb|seconds_total)$", name), name
        assert bool(described.buckets) == (described.kind is Kind.HISTOGRAM), name
        assert list(described.buckets) == sorted(set(described.buckets)), name


def test_a_loop_that_does_not_ask_any_more_is_seen() -> None:
    own = Instruments("relay")
    stopping = own.rounds(lambda: False)
    assert [stopping(), stopping()] == [False, False]
    assert b"ratchet_process_rounds_total 2.0" in own.text()


def test_a_process_shows_what_it_takes_of_the_machine_and_in_a_test_it_need_not() -> None:
    shows = [b"process_resident_memory_bytes" in Instruments("relay", libraries=libraries).text() for libraries in (True, False)]
    assert shows == [True, False]


def test_a_process_says_which_one_it_is_and_when_it_is_ready() -> None:
    made = Instruments("relay", version="1.2.3", libraries=False)
    labels = {"process": "relay", "version": "1.2.3"}
    assert made.registry.get_sample_value("ratchet_process_info", labels) == 1.0
    assert made.registry.get_sample_value("ratchet_process_ready") == 0.0
    made.ready = True
    assert made.registry.get_sample_value("ratchet_process_ready") == 1.0
