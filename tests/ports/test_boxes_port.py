"""One suite over every keeper of boxes: bubblewrap's, and plain processes for what is trusted; then what only a box can promise."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.domain.errors import Refused
from app.domain.learning.boxes import Box, Boxes, BoxSpec, Ended, Limits, TalkEnded
from app.sandbox import control_groups
from app.sandbox.bubblewrap import BubblewrapBoxes
from app.sandbox.processes import ProcessBoxes
from app.sandbox.system_calls import seccomp_filter

LIMITS = Limits(cpu_s=2, memory_bytes=256 << 20, file_bytes=1 << 20)
KEEPERS: dict[str, Callable[[], Boxes]] = {"bubblewrap": BubblewrapBoxes, "processes": ProcessBoxes}
SOON_S = 20.0


@pytest.fixture(params=KEEPERS)
def boxes(request: pytest.FixtureRequest) -> Boxes:
    return KEEPERS[request.param]()


@pytest.fixture
def box(boxes: Boxes) -> Iterator[Box]:
    opened = boxes.open(BoxSpec(limits=LIMITS))
    yield opened
    opened.stop()


def python(boxes: Boxes, program: str) -> list[str]:
    return [boxes.python, "-I", "-S", "-c", program]


def alive(mark: str) -> list[str]:
    """Processes anywhere on this machine whose command line has the mark."""
    found: list[str] = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and mark.encode() in (folder / "cmdline").read_bytes():
                found.append(folder.name)
        except OSError:
            continue
    return found


def gone(mark: str) -> bool:
    """Whether they are all gone, at once or very soon."""
    until = time.monotonic() + SOON_S
    while alive(mark) and time.monotonic() < until:
        time.sleep(0.02)
    return not alive(mark)


def test_a_program_s_words_and_exit_code_come_back(boxes: Boxes, box: Box) -> None:
    program = "import sys; sys.stdout.write(sys.stdin.read().upper()); sys.stderr.write('err'); sys.exit(3)"
    done = box.exec(python(boxes, program), stdin=b"hello", deadline_s=20, most_output_bytes=1000)
    assert (done.ended, done.code, done.stdout, done.stderr) == (Ended.EXITED, 3, b"HELLO", b"err")


def test_a_signal_s_death_is_128_and_its_number(boxes: Boxes, box: Box) -> None:
    done = box.exec(python(boxes, "import os; os.kill(os.getpid(), 9)"), deadline_s=20, most_output_bytes=1000)
    assert (done.ended, done.code) == (Ended.EXITED, 137)


def test_what_hangs_ends_at_its_deadline(boxes: Boxes, box: Box) -> None:
    started = time.monotonic()
    done = box.exec(python(boxes, "import time; print('on', flush=True); time.sleep(600)"), deadline_s=3, most_output_bytes=1000)
    assert (done.ended, done.code) == (Ended.TIMEOUT, None)
    assert time.monotonic() - started < 3 + SOON_S


def test_what_talks_without_end_is_cut_off(boxes: Boxes, box: Box) -> None:
    done = box.exec(python(boxes, "while True: print('x' * 1000)"), deadline_s=60, most_output_bytes=5000)
    assert (done.ended, done.code, done.stdout[:1], len(done.stdout)) == (Ended.OUTPUT_LIMIT, None, b"x", 5000)


def test_a_child_in_the_background_holds_nothing_up_and_ends_with_the_program(boxes: Boxes, box: Box) -> None:
    mark = f"BACKGROUND-{os.getpid()}-{time.monotonic_ns()}"
    child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600) # {mark}'], "
    program = child + "start_new_session=True); print('done')"
    done = box.exec(python(boxes, program), deadline_s=60, most_output_bytes=1000)
    assert (done.ended, done.code, done.stdout) == (Ended.EXITED, 0, b"done\n")
    assert gone(mark)


def test_a_program_is_spoken_to_line_by_line(boxes: Boxes, box: Box) -> None:
    talk = box.talk(python(boxes, "import sys\nfor line in sys.stdin: print(line.strip()[::-1], flush=True)"))
    for word in (b"abc", b"x" * 100_000):
        talk.send(word, deadline=time.monotonic() + 20)
        assert talk.receive(deadline=time.monotonic() + 20, most_bytes=1 << 20) == word[::-1]
    talk.stop()
    talk.stop()


@pytest.mark.parametrize(
    ("program", "ended"),
    [
        ("pass", Ended.EXITED),
        ("import time; time.sleep(600)", Ended.TIMEOUT),
        ("while True: print('x' * 1000, end='')", Ended.OUTPUT_LIMIT),
    ],
)
def test_a_talk_says_why_it_ended(boxes: Boxes, box: Box, program: str, ended: Ended) -> None:
    talk = box.talk(python(boxes, program))
    with pytest.raises(TalkEnded) as refused:
        talk.receive(deadline=time.monotonic() + 3, most_bytes=1000)
    assert refused.value.ended is ended


def test_the_last_words_of_a_program_that_ends_at_once_are_heard(boxes: Boxes, box: Box) -> None:
    talk = box.talk(python(boxes, "import os; os.write(1, b'last\\n'); os._exit(0)"))
    assert talk.receive(deadline=time.monotonic() + 20, most_bytes=1000) == b"last"


def test_a_box_ends_with_everything_in_it(boxes: Boxes) -> None:
    mark = f"STOPPED-{os.getpid()}-{time.monotonic_ns()}"
    box = boxes.open(BoxSpec(limits=LIMITS))
    program = f"import os, time; os.fork() or (os.setsid(), print('on', flush=True)); time.sleep(600) # {mark}"
    box.talk(python(boxes, program)).receive(deadline=time.monotonic() + 20, most_bytes=1000)
    box.stop()
    box.stop()
    assert gone(mark)


# ── only a box ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def strict() -> BubblewrapBoxes:
    return BubblewrapBoxes()


@pytest.fixture
def strict_box(strict: BubblewrapBoxes) -> Iterator[Box]:
    opened = strict.open(BoxSpec(limits=LIMITS))
    yield opened
    opened.stop()


HOG = """import os, time
for _ in range(6):
    if os.fork() == 0:
        x = b'1' * (60 << 20)
        time.sleep(600)
os.wait()
"""
EATERS = {"many processes": HOG, "files in memory": "for n in range(6):\n    open(f'/tmp/{n}', 'wb').write(b'1' * (60 << 20))"}


@pytest.mark.parametrize("eater", EATERS)
def test_memory_is_held_for_all_of_a_box_together(strict: BubblewrapBoxes, eater: str) -> None:
    roomy = Limits(cpu_s=20, memory_bytes=256 << 20, file_bytes=1 << 30)
    box = strict.open(BoxSpec(limits=roomy))
    done = box.exec(python(strict, EATERS[eater]), deadline_s=60, most_output_bytes=1000)
    box.stop()
    if control_groups.find() is not None:
        assert done.ended is Ended.OOM
    else:  # then there are no more than four processes, each within its address space
        assert (done.ended, done.code) == (Ended.EXITED, 1)


BOMB = """import os, time
born = 0
while True:
    try:
        if os.fork() == 0:
            time.sleep(600)
        born += 1
    except OSError:
        print(born, flush=True)
        break
"""


def test_a_fork_bomb_stays_in_its_box(strict: BubblewrapBoxes, strict_box: Box) -> None:
    done = strict_box.exec(python(strict, BOMB), deadline_s=60, most_output_bytes=1000)
    assert done.ended is Ended.EXITED
    assert 0 < int(done.stdout) < LIMITS.processes


def test_a_box_sees_no_other_process_no_network_and_no_environment(strict: BubblewrapBoxes, strict_box: Box) -> None:
    look = (
        "import os; print(sorted(p for p in os.listdir('/proc') if p.isdigit()), os.path.exists('/sys'), "
        "[l.split(':')[0].strip() for l in open('/proc/net/dev').readlines()[2:]], sorted({*os.environ} - {'LD_LIBRARY_PATH'}), "
        "os.getuid(), os.uname().nodename)"
    )
    done = strict_box.exec(python(strict, look), deadline_s=20, most_output_bytes=2000)
    assert done.stdout.decode().strip() == (
        "['1', '2'] False ['lo'] ['HOME', 'LC_CTYPE', 'PATH', 'PWD', 'PYTHONDONTWRITEBYTECODE'] 1000 box"
    )


def test_the_python_of_a_box_is_ours_to_the_last_digit_with_its_own_shared_library(strict: BubblewrapBoxes, strict_box: Box) -> None:
    """Another of the same name may lie among the system's, and is found where nobody says where ours is."""
    look = "import sys; print(sys.version, {l.split()[-1] for l in open('/proc/self/maps') if 'libpython' in l})"
    done = strict_box.exec(python(strict, look), deadline_s=20, most_output_bytes=2000)
    libraries = {Path(line.split()[-1]).name for line in Path("/proc/self/maps").read_text().splitlines() if "libpython" in line}
    expected = {str(Path(strict.python).parents[1] / "lib" / name) for name in libraries}
    assert done.stdout.decode().strip() == f"{sys.version} {expected or set()}"


def test_a_box_writes_nowhere_but_into_its_own_temporary_folder(strict: BubblewrapBoxes, strict_box: Box) -> None:
    places = "['/usr/x', '/x', '/dev/x', '/dev/shm/x', '/proc/sys/kernel/core_pattern', '/etc/x', '/python/x', '/tmp/x']"
    program = f"for p in {places}:\n    try:\n        open(p, 'w').write('x'); print(p)\n    except OSError:\n        pass"
    assert strict_box.exec(python(strict, program), deadline_s=20, most_output_bytes=1000).stdout == b"/tmp/x\n"
    again = strict_box.exec(python(strict, "import os; print(os.listdir('/tmp'))"), deadline_s=20, most_output_bytes=1000)
    assert again.stdout == b"[]\n", "the folder belongs to one program"


def test_nobody_in_a_box_can_make_a_namespace_or_become_somebody(strict: BubblewrapBoxes, strict_box: Box) -> None:
    program = (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\nprint([libc.unshare(f) for f in (0x10000000, 0x20000, 0x40000000)], libc.setuid(0))"
    )
    assert strict_box.exec(python(strict, program), deadline_s=20, most_output_bytes=1000).stdout == b"[-1, -1, -1] -1\n"


CALLS = """import ctypes, platform, socket
libc = ctypes.CDLL(None, use_errno=True)
numbers = {"x86_64": (101, 321, 425, 298, 250, 435), "aarch64": (117, 280, 425, 241, 219, 435)}[platform.machine()]
print([(libc.syscall(number, 0, 0, 0, 0, 0), ctypes.get_errno()) for number in numbers])
for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_NETLINK, socket.AF_PACKET, socket.AF_ALG, socket.AF_VSOCK):
    try:
        socket.socket(family, socket.SOCK_STREAM)
        print("made")
    except OSError as error:
        print(error.errno)
"""


def test_what_the_kernel_is_asked_for_is_filtered(strict: BubblewrapBoxes, strict_box: Box) -> None:
    said = strict_box.exec(python(strict, CALLS), deadline_s=20, most_output_bytes=2000).stdout.decode().splitlines()
    # ptrace, bpf, io_uring_setup, perf_event_open, keyctl: not permitted (1); clone3: unknown (38)
    assert said[0] == str([(-1, 1)] * 5 + [(-1, 38)])
    assert said[1:] == ["made", "made", "1", "1", "1", "1"], "vsock above all: no namespace holds it"


CHILDREN = """import subprocess, threading
thread = threading.Thread(target=lambda: print("thread", flush=True))
thread.start()
thread.join()
print(subprocess.run(["/bin/echo", "child"], capture_output=True, check=True).stdout.decode().strip())
"""


def test_threads_and_children_are_made_all_the_same(strict: BubblewrapBoxes, strict_box: Box) -> None:
    assert strict_box.exec(python(strict, CHILDREN), deadline_s=20, most_output_bytes=2000).stdout == b"thread\nchild\n"


def test_on_a_processor_whose_calls_are_not_known_there_are_no_boxes() -> None:
    with pytest.raises(Refused, match="run boxes on aarch64 or x86_64"):
        seccomp_filter("vax")


DISPATCHER = """
import sys, time
from app.domain.learning.boxes import BoxSpec, Limits
from app.sandbox.bubblewrap import BubblewrapBoxes
boxes = BubblewrapBoxes()
for number in range(3):
    box = boxes.open(BoxSpec(limits=Limits(cpu_s=600, memory_bytes=1 << 28, file_bytes=1 << 20)))
    program = "import os, time; os.fork(); os.setsid(); print('on', flush=True); time.sleep(600) # " + sys.argv[1]
    box.talk([boxes.python, "-I", "-S", "-c", program]).receive(deadline=time.monotonic() + 60, most_bytes=1000)
print("ready", flush=True)
time.sleep(600)
"""


def test_a_killed_dispatcher_leaves_nothing_that_the_next_one_does_not_take_away(strict: BubblewrapBoxes) -> None:
    mark = f"ORPHAN-{os.getpid()}-{time.monotonic_ns()}"
    dispatcher = subprocess.Popen([sys.executable, "-c", DISPATCHER, mark], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    assert dispatcher.stdout is not None
    assert dispatcher.stdout.readline() == b"ready\n"
    assert alive(mark)
    dispatcher.send_signal(signal.SIGKILL)
    dispatcher.wait()
    dispatcher.stdout.close()
    assert gone(mark)
    groups = control_groups.find()
    theirs = f"{control_groups.NAME}-{dispatcher.pid}-*"
    strict.sweep()
    assert not [folder for parent in (groups.parents if groups else ()) for folder in parent.glob(theirs)]
