"""`make bench-mutations`: plant the mistakes of tests/data/mutations one by one; a test has to turn red each time.

They are those that an audit of the tests found to survive, and V10 of the gates sheet: what each would have done in production stands
beside it. Works on a copy in a temporary folder, PostgreSQL left out as in `make bench-mutants`. A mutation whose text is no longer in the
source is an error, not a pass; a test that fails without the mutation too proves nothing. `ARGS="--only words"` plants those whose names
have the words in them. Ends with one JSON line; exit code 1 if a mutation survives.
"""

import argparse
import json
import sys
import tempfile
import tomllib
from pathlib import Path

import msgspec

from tests.bench.mutating.trying import Copy, Outcome, preload

ROOT = Path(__file__).resolve().parents[2]
PLANTED = ROOT / "tests" / "data" / "mutations"
LIMIT_S = 240.0


class Mutation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One planted mistake."""

    name: str
    would: str
    """What production would have done."""
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    """Test files, or tests of them, that have to notice; naming them keeps the check quick."""

    def planted(self, sound: str) -> str:
        """The source with the mistake in it. Raises `ValueError` where it no longer fits."""
        if sound.count(self.old) != 1:
            raise ValueError(f"mutation {self.name!r} no longer fits {self.file}: write it for the new text")
        return sound.replace(self.old, self.new)


def mutations(folder: Path = PLANTED) -> list[Mutation]:
    """Those of all files."""
    texts = [path.read_text() for path in sorted(folder.glob("*.toml"))]
    return [mutation for text in texts for mutation in msgspec.convert(tomllib.loads(text)["mutation"], list[Mutation])]


def main() -> int:
    """Plant each; print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description="Mistakes that tests once let through.")
    parser.add_argument("--only", default="", help="those whose names have these words in them")
    options = parser.parse_args()
    wanted = [mutation for mutation in mutations() if options.only in mutation.name]
    preload()
    found: dict[str, Outcome] = {}
    print("| mutation | what production would do | the test that noticed |\n|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="ratchet-mutations-") as folder:
        copy = Copy(Path(folder))
        copy.fill(ROOT)
        copy.load()
        for mutation in wanted:
            outcome = found[mutation.name] = copy.attempt(mutation.file, mutation.planted, mutation.tests, limit_s=LIMIT_S)
            print(f"| {mutation.name} | {mutation.would} | {outcome.failed or 'NONE, it survived'} |", flush=True)
    survived = [name for name, outcome in found.items() if not is_caught(outcome)]
    print(json.dumps({"mutations": len(found), "caught": len(found) - len(survived), "survived": survived}))
    return 1 if survived else 0


def is_caught(outcome: Outcome) -> bool:
    """Whether a test noticed: one that is named, and that passes without the mutation."""
    return outcome.failed is not None and outcome.failed.startswith("tests/")


if __name__ == "__main__":
    sys.exit(main())
