"""Which weights of a tensor are alike, as both sides can see in the base: classes by magnitude.

A step of training moves every weight by about the same amount, and a float of half the magnitude has half the distance to its neighbour: it
moves twice as likely, and twice as far in places. Where steps are as small as those distances, that is most of what can be known about
which weights move. So positions are counted within classes of magnitudes, each with few or many changes of its own:

    class 0    the bins from `below[0]` on; its positions are counted among all elements, most of which are in it
    class j    from `below[j]` on, and below `below[j - 1]`
    class k    below `below[k - 1]`, the last one

The magnitude of a float is its bits without the sign, which are ordered as the values are; its bin is the highest eight of them, the
exponent of bfloat16. Other kinds have one class.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from app.policy.storage.delta_streams import FLOATS, Bits

BINS = 256
BUCKETS = 64
"""Of steps, by how many places they go: one each for the first ones, the last for all that go further."""
MOST_CLASSES = 8
CLASS_BITS = 1000.0
"""What a class costs beside its streams: the heads and tables of their frames."""
LISTED_BITS = 0.05
"""What has to be saved for each element that is listed because its class is not the first: listing it takes longer than a comparison."""


def magnitudes(bits: Bits, dtype: str) -> Bits:
    """Without the sign."""
    return bits & bits.dtype.type((1 << (8 * bits.itemsize - 1)) - 1) if dtype in FLOATS else bits


def bins_of(mags: Bits) -> NDArray[np.uint8]:
    """The highest eight bits."""
    return (mags >> mags.dtype.type(bin_shift(mags.itemsize))).astype(np.uint8)


def bin_shift(itemsize: int) -> int:
    """From a magnitude to its bin."""
    return max(0, 8 * itemsize - 1 - 8)


def class_table(below: Sequence[int]) -> NDArray[np.uint8]:
    """The class of each bin, by descending bounds."""
    return (np.arange(BINS)[:, None] < np.array(below, dtype=np.int64)).sum(1).astype(np.uint8)


def chosen(sizes: NDArray[np.float64], moved: NDArray[np.float64]) -> tuple[int, ...]:
    """Descending bounds of the classes with which a section costs least, from the [BINS] counts of elements, and the [BINS, BUCKETS] ones
    of changed elements by how far they went.

    The cheapest partition into neighbouring bins, by dynamic programming over their ends. A class of n elements with m changes costs
    n·H(m/n) bits for positions (n is all elements for the first class), the entropy of its steps, and `CLASS_BITS`; an element of any but
    the first class `LISTED_BITS`.
    """
    edges = _edges(moved.sum(1))
    if len(edges) < 3:
        return ()
    size, change = _sums(sizes, edges), _sums(moved, edges)
    steps = change[None, :] - change[:, None]
    changed, entropy = steps.sum(2), CLASS_BITS + _entropy(steps)
    deeper = _positions(size[None, :] - size[:, None], changed) + entropy + LISTED_BITS * (size[None, :] - size[:, None])
    deeper[np.tril_indices(len(edges))] = np.inf
    first = _positions(np.full(len(edges), size[-1]), changed[:, -1]) + entropy[:, -1]
    # best[j]: of the bins below edge j in some number of classes
    best, ways, cheapest = deeper[0], [np.zeros(len(edges), dtype=np.int64)], (float(first[0]), 0, 0)
    for count in range(1, MOST_CLASSES):
        whole = best + first
        whole[[0, -1]] = np.inf
        if (here := float(whole.min())) < cheapest[0]:
            cheapest = here, count, int(whole.argmin())
        partial = best[:, None] + deeper
        ways.append(partial.argmin(0))
        best = partial.min(0)
    return _traced(ways, edges, classes=cheapest[1], at=cheapest[2])


def _traced(ways: Sequence[NDArray[np.int64]], edges: NDArray[np.int64], *, classes: int, at: int) -> tuple[int, ...]:
    bounds: list[int] = []
    for count in range(classes, 0, -1):
        bounds.append(int(edges[at]))
        at = int(ways[count - 1][at])
    return tuple(bounds)


def _edges(changed: NDArray[np.float64]) -> NDArray[np.int64]:
    """Bounds that may part classes: those of the bins in which anything changed, thinned to some forty."""
    used = np.flatnonzero(changed)
    inner = np.unique(np.concatenate([used, used + 1]))
    inner = inner[(inner > 0) & (inner < BINS)]
    return np.concatenate([[0], inner[:: 1 + len(inner) // 40], [BINS]]).astype(np.int64)


def _sums(counts: NDArray[np.float64], edges: NDArray[np.int64]) -> NDArray[np.float64]:
    """Of the bins below each edge."""
    return np.concatenate([np.zeros_like(counts[:1]), np.cumsum(counts, axis=0)])[edges]


def _positions(n: NDArray[np.float64], m: NDArray[np.float64]) -> NDArray[np.float64]:
    n = np.maximum(n, 1e-9)
    share = np.clip(m / n, 1e-12, 1 - 1e-12)
    return -n * (share * np.log2(share) + (1 - share) * np.log2(1 - share))


def _entropy(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Bits of all of them together, over the last axis."""
    total = np.maximum(counts.sum(-1, keepdims=True), 1e-9)
    return -(counts * np.log2(np.maximum(counts, 1e-9) / total)).sum(-1)
