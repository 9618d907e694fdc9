"""Which installed packages Ratchet does not need, one a line: what the image takes out again.

The lock has everything, tests included, and what tests need needs more. Reached from `ratchet` with the extras named as arguments; pip,
setuptools and wheel stay.

    python infra/unneeded.py s3 | xargs pip uninstall -y
"""

import sys
from collections.abc import Iterator
from importlib import metadata

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

KEPT = {"pip", "setuptools", "wheel"}


def needed(name: str, extras: frozenset[str], installed: dict[str, metadata.Distribution], seen: set[tuple[str, str]]) -> Iterator[str]:
    """The package and everything that it asks for on this machine, extras of extras included."""
    yield name
    for line in installed[name].requires or ():
        requirement = Requirement(line)
        for extra in extras or {""}:
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
                continue
            other = str(canonicalize_name(requirement.name))
            if other in installed and (other, key := ",".join(sorted(requirement.extras))) not in seen:
                seen.add((other, key))
                yield from needed(other, frozenset(requirement.extras), installed, seen)


def unneeded(extras: frozenset[str]) -> list[str]:
    """Names of installed packages that nothing asks for."""
    installed = {str(canonicalize_name(one.name)): one for one in metadata.distributions()}
    return sorted(set(installed) - set(needed("ratchet", extras, installed, set())) - KEPT)


if __name__ == "__main__":
    sys.stdout.write("\n".join(unneeded(frozenset(sys.argv[1:]))) + "\n")
