"""The terminal against a service that answers late, badly or not at all: an act happens once, and what went wrong is said in its words."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from app.domain.errors import Refused
from pipelines.commands.operating import TRIES, MovedOn, NotAllowed, Remote, Silent
from pipelines.commands.terminal.kept import keep_token, kept_token
from tests.architecture.sources import ROOT
from tests.fakes.gateway import serving


@contextmanager
def answering(*answers: Response) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A service that gives these answers one after the other; its address, and what it was sent."""
    left, got = list(answers), list[dict[str, Any]]()

    async def answer(request: Request) -> Response:
        body = await request.body()
        got.append({"path": request.url.path, "authorization": request.headers.get("authorization"), **(json.loads(body) if body else {})})
        return left.pop(0)

    with serving(Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])) as url:
        yield url, got


def busy() -> Response:
    return PlainTextResponse("no upstream", status_code=503)


def test_an_act_whose_answer_got_lost_is_asked_for_again_under_the_same_name() -> None:
    with answering(busy(), JSONResponse({"state": "APPROVED"})) as (url, got):
        assert Remote(url, "token").act("/v1/releases/r/approve", {"reason": "looked", "evidence_digest": None}) == {"state": "APPROVED"}
    assert len(got) == 2
    assert got[0] == got[1], "the service knows it again by its request_id"
    assert set(got[0]) == {"path", "authorization", "reason", "request_id"}
    assert got[0]["authorization"] == "Bearer token"


def test_an_act_that_is_lost_each_time_ends_with_the_services_own_words() -> None:
    with answering(*(busy() for _ in range(TRIES))) as (url, got), pytest.raises(Silent, match=r"no upstream \(HTTP 503\)"):
        Remote(url, None).act("/v1/releases/r/approve", {})
    assert len(got) == TRIES


def test_what_is_no_act_is_asked_once() -> None:
    with answering(busy(), JSONResponse({})) as (url, got), pytest.raises(Silent):
        Remote(url, None).send("POST", "/v1/erasures/sweep")
    assert len(got) == 1


@pytest.mark.parametrize(
    ("status", "kind"), [(401, NotAllowed), (403, NotAllowed), (409, MovedOn), (404, Refused), (422, Refused), (500, Silent)]
)
def test_each_refusal_is_of_its_kind_and_tells_the_sentence(status: int, kind: type[Exception]) -> None:
    said = JSONResponse({"error": {"message": "a person has to look"}}, status_code=status)
    with answering(said) as (url, _), pytest.raises(kind, match=rf"a person has to look \(HTTP {status}\)"):
        Remote(url, None).get("/v1/releases")


def test_a_service_that_is_away_is_told_with_the_option_that_names_another() -> None:
    with pytest.raises(Silent, match="name the service with --url"):
        Remote("http://127.0.0.1:9", None).get("/v1/releases")
    with pytest.raises(Silent, match="name the service with --url"):
        Remote("http://127.0.0.1:9", None).health()
    with answering(PlainTextResponse("<html>")) as (url, _), pytest.raises(Silent, match="does not answer"):
        Remote(url, None).health()


def test_a_release_is_found_by_what_one_of_them_is_called_and_by_nothing_that_fits_two() -> None:
    rows = [{"id": "0198-aaaa", "version_name": "tiny-s1"}, {"id": "0198-bbbb", "version_name": "tiny-s2"}]

    def found(text: str) -> dict[str, Any]:
        with answering(JSONResponse({"data": rows})) as (url, _):
            return Remote(url, None).find(text)

    assert [found(text)["id"] for text in ("tiny-s1", "bbbb")] == ["0198-aaaa", "0198-bbbb"]
    with pytest.raises(Refused, match="2 releases are called '0198'"):
        found("0198")


def test_a_file_of_tokens_that_is_broken_or_open_to_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = keep_token("http://one/", "first")
    keep_token("http://two", "second")
    assert (kept_token("http://one"), kept_token("http://two/")) == ("first", "second")
    keep_token("http://one", None)
    assert (kept_token("http://one"), kept_token("http://two")) == (None, "second")
    path.write_text("[]")
    with pytest.raises(Exception, match="remove it and sign in again"):
        kept_token("http://two")
    path.chmod(0o644)
    with pytest.raises(Exception, match="chmod 600"):
        kept_token("http://two")


# --- following -----------------------------------------------------------------------------------------------------------


@contextmanager
def following(data: Path, *command: str) -> Iterator[Callable[[], str]]:
    """A command that goes on until it is ended; gives its next line."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pipelines", *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, "RATCHET_DATA": str(data), "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    output: IO[str] = process.stdout
    with process:
        try:
            yield lambda: output.readline().rstrip("\n")
        finally:
            process.terminate()  # no Ctrl-C: whoever was begun in the background of a shell is deaf to it, and so are those it begins


def test_a_log_is_followed_over_the_moment_when_it_was_begun_anew(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "api.log"
    log.parent.mkdir()
    log.write_text("old\nready\nsomebody ")
    with following(tmp_path, "logs", "api", "--follow", "--lines", "1") as line:
        assert line() == "api ready"
        with log.open("a") as file:
            file.write("asked \x1b[31m\nhalf a ")
        assert line() == "api somebody asked �[31m", "what somebody wrote into a log moves no cursor"
        with log.open("a") as file:
            file.write("line\n")
        assert line() == "api half a line"
        log.write_text("new\n")
        assert line() == "api new"


def test_what_is_done_is_shown_as_it_is_done_and_once(tmp_path: Path) -> None:
    def chain(*numbers: int) -> Response:
        entry = {"occurred_at": "2026-11-21T12:00:00.5Z", "actor": "user:ada", "action": "release.approved", "subject": "r", "detail": {}}
        return JSONResponse({"data": [entry | {"seq": number} for number in numbers]})

    with (
        answering(chain(2, 1), chain(2, 1), chain(4, 3, 2), *(chain(4, 3) for _ in range(99))) as (url, _),
        following(tmp_path, "tail", "--lines", "1", "--url", url) as line,
    ):
        told = [line().split()[0] for _ in range(4)]
    assert told == ["1", "2", "3", "4"]
