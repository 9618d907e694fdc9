"""An engine that was busy gives its memory back."""

import subprocess
import sys

SCRIPT = """
import ctypes, sys, threading, torch
from app.serving.memory import return_freed_memory

def resident_mb():
    return next(int(line.split()[1]) // 1024 for line in open("/proc/self/status") if line.startswith("VmRSS"))

class Mallinfo(ctypes.Structure):  # of glibc: the fourth number counts blocks with a mapping of their own
    _fields_ = [(name, ctypes.c_int) for name in ("arena", "free", "fast", "mapped", "mapped_bytes", "a", "b", "c", "d", "e")]

def mapped():
    asked = ctypes.CDLL(None).mallinfo
    asked.restype = Mallinfo
    return asked().mapped

def work():
    keep = []
    for _ in range(3):
        caches = [torch.ones(32, 3, 128, 64, dtype=torch.bfloat16) for _ in range(60)]
        keep.append(torch.ones(3000))
        del caches

able = return_freed_memory()
before = resident_mb()
thread = threading.Thread(target=work)
thread.start()
thread.join()
left = resident_mb() - before
already = mapped()
caches = [torch.ones(32, 3, 128, 64, dtype=torch.bfloat16) for _ in range(60)]
print(int(able), left, mapped() - already)
"""


HOLES = """
from app.serving.memory import return_freed_memory, return_holes

def resident_mb():
    return next(int(line.split()[1]) // 1024 for line in open("/proc/self/status") if line.startswith("VmRSS"))

return_freed_memory()
blocks = [b"x" * 700_000 for _ in range(200)]  # below the size from which a block has its own mapping
full = resident_mb()
del blocks[::2]
able = return_holes()
print(int(able), full - resident_mb())
"""


def test_holes_between_blocks_go_back_to_the_system() -> None:
    able, less_mb = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True).stdout.split()
    assert (able, int(less_mb) > 50) == ("1", True), f"{less_mb} of 70 MB"


def test_the_caches_of_a_batch_go_back_to_the_system() -> None:
    able, left_mb, mapped = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout.split()
    assert able == "1", "the C library is not glibc, which alone has the switch: an engine keeps what its largest batch took"
    assert int(left_mb) < 30, "a round takes 90 MB"
    # an arena may happen to shrink too, so that little is left whatever the switch says: what it does is looked at as well
    assert mapped == "60", "each block of 1.5 MB has a mapping of its own"
