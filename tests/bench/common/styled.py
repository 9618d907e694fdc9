"""What benches in the world of styles share: their arguments, and the base that every line begins with."""

import argparse
import gc
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tests.learning.styles import write_base


def styled_arguments() -> argparse.ArgumentParser:
    """Seeds, cycles, and where a base is that was made before."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--base", type=Path, help="A base that was made before.")
    return parser


@contextmanager
def base_for(made: Path | None) -> Iterator[Path]:
    """The base that was made before, or one made now; on one thread, and without warnings of guards that are out of the way."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    gc.freeze()
    with tempfile.TemporaryDirectory() as folder:
        base = made or Path(folder) / "base"
        if made is None:
            write_base(base)
        yield base
