"""One started program against a deadline and a bound, each from both sides, and an end that happens once."""

import os
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

from app.domain.learning.boxes import Ended, Executed, TalkEnded
from app.sandbox.child import CHUNK_BYTES, Child

LONG_S = 20.0


def started(command: str, kills: list[str] | None = None) -> Child:
    process = subprocess.Popen(
        ["/bin/sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, process_group=0,
    )  # fmt: skip

    def kill() -> None:
        if kills is not None:
            kills.append("kill")
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    return Child(process, kill=kill)


def run(command: str, *, stdin: bytes = b"", deadline_s: float = LONG_S, most: int = 1000) -> Executed:
    return started(command).run(stdin, deadline_s=deadline_s, most_output_bytes=most)


def soon() -> float:
    return time.monotonic() + LONG_S


@pytest.mark.parametrize(("command", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -15 $$", 143)])
def test_a_program_that_ended_by_itself_has_its_own_code_and_a_signal_is_128_above(command: str, code: int) -> None:
    done = run(command)
    assert (done.ended, done.code) == (Ended.EXITED, code)


def test_what_it_is_told_it_says_back_whole_and_both_of_its_voices_are_kept_apart() -> None:
    told = b"x" * (3 * CHUNK_BYTES + 1)
    done = run("cat; echo wrong >&2", stdin=told, most=len(told) + 100)
    assert (done.ended, done.code, done.stdout == told, done.stderr) == (Ended.EXITED, 0, True, b"wrong\n")
    assert run("cat; echo end").stdout == b"end\n", "nothing to be told is an end of its input"


def test_a_program_that_does_not_listen_is_heard_all_the_same() -> None:
    done = run("exec 0<&-; sleep 0.05; echo deaf", stdin=b"x" * (1 << 20))
    assert (done.ended, done.code, done.stdout) == (Ended.EXITED, 0, b"deaf\n")


@pytest.mark.parametrize(("said", "ended", "kept"), [(1000, Ended.EXITED, 1000), (1001, Ended.OUTPUT_LIMIT, 1000)])
@pytest.mark.parametrize("voice", ["", ">&2"])
def test_a_program_may_say_so_much_and_not_a_byte_more(voice: str, said: int, ended: Ended, kept: int) -> None:
    done = run(f"head -c {said} /dev/zero {voice}", most=1000)
    assert (done.ended, len(done.stdout) + len(done.stderr)) == (ended, kept)
    assert done.code == (0 if ended is Ended.EXITED else None)


def test_the_bound_is_of_both_voices_together() -> None:
    done = run("head -c 600 /dev/zero; head -c 600 /dev/zero >&2; sleep 20", most=1000)
    assert done.ended is Ended.OUTPUT_LIMIT
    assert run("head -c 500 /dev/zero; head -c 500 /dev/zero >&2", most=1000).ended is Ended.EXITED


def test_a_program_that_is_late_is_ended_at_its_deadline_with_what_it_said() -> None:
    began = time.monotonic()
    done = run("echo begun; sleep 20", deadline_s=1.1)
    assert (done.ended, done.code, done.stdout) == (Ended.TIMEOUT, None, b"begun\n")
    assert 1.1 <= time.monotonic() - began < 10


def test_whoever_was_left_behind_with_the_pipe_is_not_waited_for() -> None:
    began = time.monotonic()
    done = run("sleep 20 & echo on")
    assert (done.ended, done.code, done.stdout) == (Ended.EXITED, 0, b"on\n")
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("act", [lambda child: child.run(b"", deadline_s=LONG_S, most_output_bytes=10), lambda child: None])
def test_the_tree_is_ended_once_and_every_pipe_is_let_go_of(act: Callable[[Child], object]) -> None:
    kills: list[str] = []
    child = started("exit 3", kills)
    act(child)
    child.stop()
    child.stop()
    assert kills == ["kill"], "though it ended by itself, what it started may live"
    assert child.process.returncode is not None
    for pipe in (child.process.stdin, child.process.stdout, child.process.stderr):
        assert pipe is not None
        assert pipe.closed
    with pytest.raises(OSError, match=r"."):
        os.fstat(child._pidfd)
    assert child._pidfd == -1


# --- spoken to -----------------------------------------------------------------------------------------------------------------


def test_lines_go_in_and_come_out_one_by_one_however_they_arrive() -> None:
    child = started('while read line; do echo "<$line>"; echo "[$line]"; done')
    child.send(b"one", deadline=soon())
    assert [child.receive(deadline=soon(), most_bytes=100) for _ in range(2)] == [b"<one>", b"[one]"]
    child.send(b"x" * (2 * CHUNK_BYTES), deadline=soon())
    assert len(child.receive(deadline=soon(), most_bytes=3 * CHUNK_BYTES)) == 2 * CHUNK_BYTES + 2
    child.stop()


def test_its_last_words_are_heard_though_they_come_with_its_end() -> None:
    child = started("printf 'a\\nb\\n'")
    child.process.wait(LONG_S)
    assert [child.receive(deadline=soon(), most_bytes=100) for _ in range(2)] == [b"a", b"b"]
    with pytest.raises(TalkEnded) as ended:
        child.receive(deadline=soon(), most_bytes=100)
    assert (ended.value.ended, str(ended.value)) == (Ended.EXITED, "it ended")
    child.stop()


@pytest.mark.parametrize(("bytes_", "refused"), [(100, False), (101, True)])
def test_a_line_without_an_end_is_refused_above_its_bound(bytes_: int, refused: bool) -> None:
    child = started(f"head -c {bytes_} /dev/zero; sleep 0.1; echo; sleep 20")
    if refused:
        with pytest.raises(TalkEnded, match="it said more than 100 bytes at once") as ended:
            child.receive(deadline=soon(), most_bytes=100)
        assert ended.value.ended is Ended.OUTPUT_LIMIT
    else:
        assert len(child.receive(deadline=soon(), most_bytes=100)) == 100
    child.stop()


def test_a_program_that_says_nothing_or_hears_nothing_is_late_and_one_that_is_gone_has_ended() -> None:
    silent = started("sleep 20")
    with pytest.raises(TalkEnded, match="still running at its deadline") as ended:
        silent.receive(deadline=time.monotonic() + 0.05, most_bytes=100)
    assert ended.value.ended is Ended.TIMEOUT
    with pytest.raises(TalkEnded) as full:
        silent.send(b"x" * (1 << 20), deadline=time.monotonic() + 0.05)
    assert full.value.ended is Ended.TIMEOUT
    silent.stop()
    gone = started("exec 0<&-; exit 0")
    gone.process.wait(LONG_S)
    with pytest.raises(TalkEnded) as over:
        gone.send(b"x", deadline=soon())
    assert over.value.ended is Ended.EXITED
    gone.stop()


def test_what_it_complained_of_is_heard_and_no_more_of_it_than_a_piece() -> None:
    child = started(f"head -c {CHUNK_BYTES + 50_000} /dev/zero >&2")
    time.sleep(0.05)
    first = child.heard()
    assert 0 < len(first) <= 2 * CHUNK_BYTES
    assert not first.strip(b"\0")
    child.stop()
