"""The first process of a box with a workspace: runs programs in it, one after the other, for whoever speaks to it from outside.

    python -I -S keeper.py WORKSPACE [GATEWAY-SOCKET]

Reads lines of marshalled dictionaries, writes lines of JSON, both with bytes in base64; made by hand, because importing json takes longer
than everything else that opens a box. As the first process of its namespace nothing in the box can kill it, and, not dumpable,
nothing can look into it or at its pipes. When a program has ended, was late, or said too much, everything else in the namespace is killed
before the answer goes out: no tool leaves a process behind. With a socket it serves it on 127.0.0.1:8080, the only address that answers.

Run as a program of its own, with the standard library alone; nothing imports it. So it shares no code with
`app.sandbox.child`: its `drain` and `feed` are its own.
"""

import binascii
import ctypes
import marshal
import os
import select
import sys
import time

SET_DUMPABLE = 4
KILL = 9
CHUNK = 1 << 16
GATEWAY_PORT = 8080
TOLD = ("PATH", "HOME", "PYTHONDONTWRITEBYTECODE", "LD_LIBRARY_PATH")
ENVIRONMENT = {name: os.environ[name] for name in TOLD if name in os.environ} | {"LC_ALL": "C.UTF-8"}
RESOLVE_FLAGS = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_RDONLY


def main(argv: list[str]) -> int:
    """Serve until the one outside lets go."""
    if os.getpid() != 1:
        return 3  # it kills everything that it can reach: in nobody's namespace but its own
    ctypes.CDLL(None).prctl(SET_DUMPABLE, 0, 0, 0, 0)
    workspace = argv[0]
    os.chdir(workspace)
    if len(argv) > 1:
        serve_gateway(argv[1])
    reader = os.fdopen(os.dup(0), "rb")
    answers = os.dup(1)
    nothing = os.open("/dev/null", os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    answer(answers, {})
    for line in reader:
        asked = marshal.loads(binascii.a2b_base64(line))
        if asked["op"] == "exec":
            said = execute(asked)
        elif asked["op"] == "put":
            said = put(workspace, asked["path"], asked["data"])
        else:
            said = {}
        answer(answers, said)
    return 0


def answer(to: int, said: dict[str, bytes]) -> None:
    """One line of JSON out: texts by plain names, in base64."""
    fields = [b'"%s": "%s"' % (name.encode(), binascii.b2a_base64(text, newline=False)) for name, text in said.items()]
    left = memoryview(b"{" + b", ".join(fields) + b"}\n")
    while left:
        left = left[os.write(to, left) :]


def execute(asked: dict) -> dict[str, bytes]:
    """Run a program to its end, its deadline or the bound on what it says; then end what it left behind."""
    given, told = os.pipe()
    out, out_end = os.pipe()
    err, err_end = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, given, 0), (os.POSIX_SPAWN_DUP2, out_end, 1), (os.POSIX_SPAWN_DUP2, err_end, 2)]
    try:
        program = os.posix_spawn(asked["argv"][0], asked["argv"], ENVIRONMENT, file_actions=actions)
    except OSError as error:
        for descriptor in (given, told, out, out_end, err, err_end):
            os.close(descriptor)
        return {"ended": b"exited", "code": b"127", "stdout": b"", "stderr": f"{error}\n".encode()}
    for descriptor in (given, out_end, err_end):
        os.close(descriptor)
    said = {out: bytearray(), err: bytearray()}
    ended = converse(program, told, asked["stdin"], said, time.monotonic() + asked["deadline_s"], asked["most"])
    code = clear(program)
    for pipe, text in said.items():
        drain(pipe, text, asked["most"])
        os.close(pipe)
    code = 128 - code if code < 0 else code
    most = asked["most"]
    return {"ended": ended.encode(), "code": b"%d" % code, "stdout": bytes(said[out][:most]), "stderr": bytes(said[err][:most])}


def converse(program: int, told: int, stdin: bytes, said: dict[int, bytearray], deadline: float, most: int) -> str:
    """Feed it and hear it out; how it ended."""
    over = os.pidfd_open(program)
    poll, left = select.poll(), memoryview(stdin)
    for pipe in (over, *said):
        os.set_blocking(pipe, False)
        poll.register(pipe, select.POLLIN)
    os.set_blocking(told, False)
    poll.register(told, select.POLLOUT)
    ended = ""
    while not ended:
        ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not ready:
            ended = "timeout"
        for pipe, _ in ready:
            if pipe == told:
                left = left[feed(told, left) :]
                if not left:
                    poll.unregister(told)
                    os.close(told)
                    told = -1
            elif pipe != over and not drain(pipe, said[pipe], most):
                poll.unregister(pipe)
        if sum(map(len, said.values())) > most:
            ended = "output_limit"
        elif any(pipe == over for pipe, _ in ready):
            ended = "exited"
    os.close(over)
    if told >= 0:
        os.close(told)
    return ended


def feed(told: int, left: memoryview) -> int:
    """How much of it went in; all of it where nobody listens."""
    try:
        return os.write(told, left[:CHUNK]) if left else 0
    except BlockingIOError:
        return 0
    except OSError:
        return len(left)


def drain(pipe: int, into: bytearray, most: int) -> bool:
    """Take what is there; False where the pipe has ended."""
    while len(into) <= most:
        try:
            chunk = os.read(pipe, CHUNK)
        except BlockingIOError:
            return True
        if not chunk:
            return False
        into += chunk
    return True


def clear(program: int) -> int:
    """Kill everything in the namespace but ourselves, see it gone; the program's own exit code."""
    code = 0
    ended, status = os.waitpid(program, os.WNOHANG)
    if ended == program:
        code, program = os.waitstatus_to_exitcode(status), -2
    while True:
        try:  # noqa: SIM105 - importing contextlib takes longer than opening a box may
            os.kill(-1, KILL)
        except ProcessLookupError:
            pass
        try:
            ended, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return code
        if ended == program:
            code = os.waitstatus_to_exitcode(status)


def put(workspace: str, path: str, data: bytes) -> dict[str, bytes]:
    """Write a file of the workspace; no link on the way is followed, wherever it leads."""
    folder = os.open(workspace, RESOLVE_FLAGS)
    try:
        *folders, name = path.split("/")
        for part in folders:
            try:  # noqa: SIM105
                os.mkdir(part, dir_fd=folder)
            except FileExistsError:
                pass
            inner = os.open(part, RESOLVE_FLAGS, dir_fd=folder)
            os.close(folder)
            folder = inner
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644, dir_fd=folder)
        left = memoryview(data)
        while left:
            left = left[os.write(file, left) :]
        os.close(file)
        return {}
    except OSError as error:
        return {"refused": str(error).encode()}
    finally:
        os.close(folder)


def serve_gateway(path: str) -> None:
    """Pass connections to 127.0.0.1:8080 on to the socket; threads, because everything that is a process is killed between programs."""
    import socket
    from _thread import start_new_thread
    from contextlib import suppress

    def pass_on(source: socket.socket, sink: socket.socket) -> None:
        try:
            while chunk := source.recv(CHUNK):
                sink.sendall(chunk)
        except OSError:
            pass  # who no longer listens may still have an answer on its way, which is the other thread's
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def connect(inside: socket.socket) -> None:
        outside = socket.socket(socket.AF_UNIX)
        try:
            outside.connect(path)
        except OSError:
            inside.close()
            return
        start_new_thread(pass_on, (inside, outside))
        start_new_thread(pass_on, (outside, inside))

    def accept() -> None:
        while True:
            connect(listening.accept()[0])  # nothing here holds on to it: it is closed when both of its threads have ended

    listening = socket.create_server(("127.0.0.1", GATEWAY_PORT), backlog=16)
    start_new_thread(accept, ())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
