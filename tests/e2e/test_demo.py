"""The demo with the tiny model is the end-to-end test: it ends with exit code 0 only if all that it promises happened."""

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.collector import Collected, Collector, collecting
from tests.e2e.running import ROOT, free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]


WAY = ["TRAINED", "OFFLINE", "QUEUED", "CANARY", "READY", "APPROVED", "PROMOTING"]
"""The states of a release on its way to being champion."""


def demo(folder: Path, **environment: str) -> tuple["subprocess.CompletedProcess[str]", dict[str, Any]]:
    """It ends by itself: when all has happened, or when nothing moves any more. The limit here is for a demo that does neither."""
    command = [sys.executable, "-m", "pipelines", "demo", "--model", "tiny", "--data", str(folder), "--port", str(free_port()), "--json"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=1700, check=False)
    return done, json.loads(done.stdout.strip().splitlines()[-1])


def test_the_demo_promotes_shows_the_gain_catches_the_harm_and_ends_well(tmp_path: Path) -> None:
    with collecting() as collector:
        done, summary = demo(tmp_path, RATCHET_TRACES=collector.url, RATCHET_TRACES_SHARE="0.2")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert summary["failures"] == []
    assert summary["promoted"]
    assert summary["persistence"]["low"] > 0
    assert summary["harm"]["state"] in ("ABORTED", "REJECTED", "ROLLED_BACK")
    assert summary["harm"]["requests"] > 0
    assert len(summary["anchor_budget_used"]) == len(summary["promoted"])
    assert all(share < 1 for share in summary["anchor_budget_used"])
    # three answers side by side, and what comes next
    assert done.stdout.count("a held-out question by") == 3
    assert "Connect a product" in done.stdout
    # without a terminal: a line per event, a bar now and then, no boxes
    assert "[#" in done.stdout
    assert not set("│─┌┐└┘┃━") & set(done.stdout)
    a_turn_is_followed_to_the_release_of_what_learned_from_it(collector, summary["promoted"][0])
    no_words_are_told(collector, tmp_path)


def a_turn_is_followed_to_the_release_of_what_learned_from_it(collector: Collector, promoted: str) -> None:
    """From the gateway to the label in one trace, and from the batch to the promotion in another that is linked to it."""
    spans = collector.spans
    assert {one.service for one in spans} == {f"ratchet-{name}" for name in ("api", "relay", "ingest", "label", "loop", "watch")}
    chats = {one.place: one for one in spans if one.name == "chat composer"}
    followed: dict[tuple[bytes, bytes], set[str]] = {place: set() for place in chats}
    for one in spans:
        followed.get((one.span.trace_id, one.span.parent_span_id), set()).add(one.name.split(" ")[0])
    whole = {place for place, names in followed.items() if {"commit", "publish", "apply", "label"} <= names}
    assert len(whole) > 50

    way = [one for one in spans if one.name.startswith("release ") and one.attributes["ratchet.version"] == promoted]
    assert sorted({one.name for one in way}) == sorted(f"release {state}" for state in WAY)
    (trace,) = {one.span.trace_id for one in way}
    slot: dict[str, Collected] = {one.name: one for one in spans if one.span.trace_id == trace and one.service == "ratchet-loop"}
    assert {"cycle", "batch", "train", "register", "open", "judge", "queue"} <= slot.keys()
    assert {slot[name].span.parent_span_id for name in ("batch", "train", "judge")} == {slot["cycle"].span.span_id}
    assert slot["batch"].links
    assert slot["batch"].links <= whole, "a batch is of labelled turns"
    assert slot["batch"].attributes["ratchet.traced_turns"] == len(slot["batch"].links)
    assert slot["train"].attributes["ratchet.run_id"]


def no_words_are_told(collector: Collector, folder: Path) -> None:
    """Neither what was asked nor what was answered."""
    told = b"".join(collector.bodies)
    with closing(sqlite3.connect(folder / "ratchet.db")) as database:
        answers = {str(words) for (words,) in database.execute("SELECT completion FROM turn_words") if len(words) > 12}
    assert len(answers) > 100
    assert not [words for words in answers if words.encode() in told]
    assert b"def " not in told, "the questions are functions to be written"
