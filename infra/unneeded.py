"""Which installed packages Ratchet does not need, one a line: what the image takes out again.

The lock has everything, tests included, and what tests need needs more. Reached from the project's own dependencies with the extras named
as arguments; pip, setuptools and wheel stay.

    python infra/unneeded.py pyproject.toml s3 | xargs pip uninstall -y
"""

import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

KEPT = {"pip", "setuptools", "wheel"}


def needed(
    lines: Iterable[str], extras: frozenset[str], installed: dict[str, metadata.Distribution], seen: set[tuple[str, str]]
) -> Iterator[str]:
    """Every package that these requirements ask for on this machine, and everything that those ask for, extras of extras included."""
    for line in lines:
        requirement = Requirement(line)
        for extra in extras or {""}:
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
                continue
            other = str(canonicalize_name(requirement.name))
            if other in installed and (other, key := ",".join(sorted(requirement.extras))) not in seen:
                seen.add((other, key))
                yield other
                yield from needed(installed[other].requires or (), frozenset(requirement.extras), installed, seen)


def unneeded(project: Path, extras: frozenset[str]) -> list[str]:
    """Names of installed packages that nothing asks for."""
    declared = tomllib.loads(project.read_text())["project"]
    lines = [*declared["dependencies"], *(line for extra in extras for line in declared["optional-dependencies"][extra])]
    installed = {str(canonicalize_name(one.name)): one for one in metadata.distributions()}
    return sorted(set(installed) - set(needed(lines, frozenset(), installed, set())) - KEPT - {"ratchet"})


if __name__ == "__main__":
    sys.stdout.write("\n".join(unneeded(Path(sys.argv[1]), frozenset(sys.argv[2:]))) + "\n")
