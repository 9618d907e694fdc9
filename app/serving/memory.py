"""Memory that is freed goes back to the system."""

import ctypes

M_MMAP_THRESHOLD = -3
MMAP_FROM_BYTES = 1 << 20


def return_freed_memory() -> bool:
    """Give every block of a megabyte and more its own mapping, which freeing returns at once; whether this C library can (glibc can).

    By default glibc raises that threshold to 32 MB as soon as such a block is freed; the caches and logits of a batch then leave holes
    in the arenas that never shrink. Measured with the allocations of a 32-row batch of SmolLM2, four times over: 643 MB resident while
    busy and idle before, 427 MB busy and 223 MB idle (5 MB above the start) with it.
    The price is page faults: an estimated 2 ms per step (not measured).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(M_MMAP_THRESHOLD, MMAP_FROM_BYTES) == 1


def return_holes() -> bool:
    """Give the system what is free between blocks that are not; whether this C library can (glibc can).

    A large block is put into a hole where one is free, and only else gets a mapping of its own. So a version that is freed leaves holes
    among what the next one has taken: SmolLM2, patched from version to version, grew from 660 MB to 1,010 in three swaps, and is back at
    657 after each with this, which takes 3 to 30 ms and holds no lock of the interpreter's.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and trim(0) >= 0
