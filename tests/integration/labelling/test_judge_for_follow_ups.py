"""A judge model in the classifier's place: the real openai client against a small server on loopback."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from sqlalchemy import insert

from app.db.engine import open_engine, writing
from app.db.migrate import upgrade
from app.db.tables import observations
from app.domain.errors import BadConfig, BadRequest
from app.domain.learning.rewards import TermScore
from pipelines.commands.labels import labels
from pipelines.labelling.follow_up.judge_model import INSTRUCTION_VERSION, JudgeModel
from pipelines.labelling.rule_set import default_toml, parse_rule_set, starting_toml
from tests.fakes.labelling import facts, observed
from tests.integration.batching.rows import NOON, add_turn

PRAISE = observed("follow_up", "Thank you, this is perfect!")


@contextmanager
def judge_saying(words: str, seen: list[dict[str, Any]]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append(body | {"key": self.headers["Authorization"]})
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": words}}
            answer = json.dumps({"id": "x", "object": "chat.completion", "created": 1, "model": "judge", "choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()


def follow_up(judge: JudgeModel) -> TermScore:
    terms = parse_rule_set(default_toml(), read=judge).terms
    return next(term.score(facts(), [PRAISE], weight=w) for term, w in terms if term.name == "follow_up")


def scored(words: str, seen: list[dict[str, Any]]) -> TermScore:
    with judge_saying(words, seen) as url:
        judge = JudgeModel(url=url, model="judge-1", key="secret")
        try:
            return follow_up(judge)
        finally:
            judge.close()


def test_the_judge_is_asked_and_its_word_counts_instead_of_the_classifiers() -> None:
    seen: list[dict[str, Any]] = []
    score = scored('{"dissatisfied": 0.9, "satisfied": 0.0, "refinement": 0.1}', seen)
    assert score.value == pytest.approx(-0.9)  # the classifier reads praise
    assert score.detail["moods"] == ["dissatisfied"]
    assert score.detail["by"] == [f"judge:judge-1/judge/{INSTRUCTION_VERSION}"]
    assert (seen[0]["model"], seen[0]["temperature"], seen[0]["key"]) == ("judge-1", 0.0, "Bearer secret")
    assert json.loads(seen[0]["messages"][1]["content"])["user"] == PRAISE.value


@pytest.mark.parametrize("words", ["Happy, I would say.", '{"glad": 1}', "{}", '{"satisfied": -1, "neutral": 2}'])
def test_a_judge_that_answers_something_else_is_no_reading(words: str) -> None:
    score = scored(words, [])
    assert (score.value, score.abstained, score.evidence) == (None, "unread", ("o",))


def test_a_judge_that_is_away_stops_no_label() -> None:
    judge = JudgeModel(url="http://127.0.0.1:9/v1", model="m", key="")
    assert follow_up(judge).abstained == "unread"
    judge.close()


def test_the_configured_file_is_what_policies_start_with(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text('name = "mine"\n[[terms]]\nname = "rating"\nweight = 1.0\n')
    assert parse_rule_set(starting_toml("rules.toml", config=tmp_path / "ratchet.toml")).config.name == "mine"
    assert starting_toml(None, config=None) == default_toml()
    with pytest.raises(BadConfig, match="correct the path"):
        starting_toml(str(tmp_path / "none.toml"), config=None)


def at_work(folder: Path, url: str, moods: list[str]) -> Path:
    """A deployment whose people wrote these follow-ups, each labelled; returns its data folder."""
    data = folder / "data"
    data.mkdir()
    (data / "ratchet.toml").write_text(
        f'[policies.composer]\nmodel = "."\nbase_name = "t"\nbase_model = "t"\n[labelling]\njudge_url = "{url}"\njudge_model = "judge-1"\n'
    )
    upgrade(f"sqlite:///{data / 'ratchet.db'}")
    engine = open_engine(f"sqlite:///{data / 'ratchet.db'}")
    for number, said in enumerate(moods):
        add_turn(engine, f"turn-{number}", completion="an answer")
        row = {
            "source": "api", "id": f"o{number}", "name": "follow_up", "value": said, "occurred_at": NOON, "received_at": NOON, "tags": {},
            "status": "joined", "policy": "composer", "inference_id": f"turn-{number}", "actor": "a",
        }  # fmt: skip
        with writing(engine) as connection:
            connection.execute(insert(observations).values(row))
    engine.dispose()
    return data


def test_people_and_judge_are_compared_from_the_command_line(tmp_path: Path) -> None:
    with judge_saying('{"dissatisfied": 0.98, "satisfied": 0.01, "refinement": 0.01, "neutral": 0.0}', []) as url:
        data, file = at_work(tmp_path, url, ["No, that is wrong", "Thank you, that works perfectly!"]), tmp_path / "sample.jsonl"

        def ratchet(*words: str) -> Result:
            environment = {"RATCHET_DATA": str(data), "RATCHET_CONFIG": str(data / "ratchet.toml")}
            return CliRunner().invoke(labels, words, env=environment)

        assert "2 follow-ups" in ratchet("sample", "composer", "--out", str(file)).output
        refused = ratchet("agreement", str(file))
        assert isinstance(refused.exception, BadRequest)
        drawn = [json.loads(line) for line in file.read_text().splitlines()]
        moods = {"No, that is wrong": "dissatisfied", "Thank you, that works perfectly!": "satisfied"}
        file.write_text("".join(json.dumps(one | {"mood": moods[one["text"]]}) + "\n" for one in drawn))
        found = json.loads(ratchet("agreement", str(file), "--json").output)
        assert (found["judge"]["kappa"], found["judge"]["precision_punished"]) == (0.0, 0.5)  # it says the same of everything
        assert found["classifier"]["kappa"] == 1.0
        assert "judge: kappa 0.00" in ratchet("agreement", str(file)).output
        few = ratchet("distil", "composer", "--out", str(tmp_path / "model.json"))
        assert isinstance(few.exception, BadConfig)
        assert "a classifier needs 300" in str(few.exception)
