"""What stands above a trusted program: it gives the program's end on, and lets nothing of it live on."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from app.sandbox.processes import REAPER
from tests.ports.test_boxes_port import alive, gone

LEAVES = "setsid /bin/sh -c 'sleep 600; : {mark}' & setsid setsid /bin/sh -c 'sleep 600; : {mark}' & echo on; {then}"
SOON_S = 20.0


def reaped(*argv: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, str(REAPER), *argv], stdout=subprocess.PIPE, stdin=subprocess.PIPE)


@pytest.mark.parametrize(("program", "code"), [("exit 7", 7), ("kill -9 $$", 137), ("true", 0)])
def test_the_programs_end_is_the_reapers(program: str, code: int) -> None:
    with reaped("/bin/sh", "-c", program) as running:
        assert running.wait(SOON_S) == code


def test_a_pipe_ends_where_the_program_lets_go_of_it_though_the_reaper_is_at_work() -> None:
    with reaped("/bin/sh", "-c", "tr a-z A-Z; exec >&- <&-; sleep 600") as running:
        assert running.stdin is not None
        assert running.stdout is not None
        running.stdin.write(b"words")
        running.stdin.close()
        assert running.stdout.read() == b"WORDS", "whoever reads to the end waits for nobody who says nothing more"
        running.terminate()


def test_nothing_of_a_program_that_ended_lives_on(tmp_path: Path) -> None:
    mark = f"LEFT-{tmp_path.name}-{time.monotonic_ns()}"
    with reaped("/bin/sh", "-c", LEAVES.format(mark=mark, then="exit 3")) as running:
        assert running.wait(SOON_S) == 3
        assert alive(mark) == [], "whoever sees the reaper's end sees everybody's"


@pytest.mark.parametrize("how", [signal.SIGTERM, "its starter is gone"])
def test_a_reaper_that_is_told_to_stop_takes_everybody_along(tmp_path: Path, how: object) -> None:
    mark = f"STOPPED-{tmp_path.name}-{time.monotonic_ns()}"
    program = ["/bin/sh", "-c", LEAVES.format(mark=mark, then="sleep 600")]
    if how is signal.SIGTERM:
        with reaped(*program) as running:
            assert running.stdout is not None
            assert running.stdout.readline() == b"on\n"
            running.terminate()
            assert running.wait(SOON_S) == 128 + signal.SIGTERM
            assert alive(mark) == []
    else:
        starter = f"import subprocess, sys\nsubprocess.Popen([sys.executable, {str(REAPER)!r}, *{program!r}]).wait()"
        with subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE) as running:
            assert running.stdout is not None
            assert running.stdout.readline() == b"on\n"
            running.kill()
            running.wait(SOON_S)
            assert gone(mark)
