"""An engine that was busy gives its memory back."""

import subprocess
import sys

SCRIPT = """
import sys, threading, torch
from app.serving.memory import return_freed_memory

def resident_mb():
    return next(int(line.split()[1]) // 1024 for line in open("/proc/self/status") if line.startswith("VmRSS"))

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
print(int(able), resident_mb() - before)
"""


def test_the_caches_of_a_batch_go_back_to_the_system() -> None:
    able, left_mb = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout.split()
    assert able == "1", "the C library is not glibc, which alone has the switch: an engine keeps what its largest batch took"
    assert int(left_mb) < 30, "a round takes 90 MB"
