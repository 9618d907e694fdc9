"""The watched folder: which files there are, on which branch it is, and where a file went that is not at its place any more."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

RENAMED = 0.5
"""Share of lines in common from which a file counts as the moved one; git's own threshold."""
MOST_FILES, MOST_BYTES = 5_000, 1_000_000
"""What is looked through for a moved file."""
GIT_TIMEOUT_S = 10.0


class Tree:
    """A git working tree, or any folder."""

    def __init__(self, folder: Path) -> None:
        self.root = folder.resolve()

    def holds(self, path: str) -> bool:
        """Whether the path stays inside the folder."""
        return (self.root / path).resolve().is_relative_to(self.root)

    def branch(self) -> str | None:
        """What HEAD names, a commit where it is detached; None outside git."""
        return self._git("symbolic-ref", "-q", "HEAD") or self._git("rev-parse", "HEAD")

    def text(self, path: str, *, like: str) -> str:
        """The file as it is now: at its place, or where it was moved to, the file with most of its lines; empty where it is gone."""
        file = self.root / path
        if not file.is_file():
            file = self._moved(Path(path).suffix, like) or file
        return _read(file) if file.is_file() else ""

    def _moved(self, suffix: str, like: str) -> Path | None:
        lines = _lines(like)
        if not lines:
            return None
        scored = ((len(lines & found) / len(lines | found), file) for file in self._files(suffix) if (found := _lines(_read(file))))
        best = max(scored, default=(0.0, None), key=lambda pair: pair[0])
        return best[1] if best[0] >= RENAMED else None

    def _files(self, suffix: str) -> Iterator[Path]:
        """Files of that suffix: those that git knows or would know, else those in no hidden folder."""
        listed = self._git("ls-files", "-co", "--exclude-standard", "-z")
        paths = (self.root / name for name in listed.split("\0")) if listed is not None else self.root.rglob(f"*{suffix}")
        seen = 0
        for file in paths:
            hidden = any(part.startswith(".") for part in file.relative_to(self.root).parts)
            if file.suffix == suffix and not hidden and file.is_file() and file.stat().st_size <= MOST_BYTES and seen < MOST_FILES:
                seen += 1
                yield file

    def _git(self, *arguments: str) -> str | None:
        """What git says; None where this is no git tree or git is not installed."""
        try:
            done = subprocess.run(
                ["git", "-C", str(self.root), *arguments],
                capture_output=True,
                text=True,
                check=True,
                timeout=GIT_TIMEOUT_S,
                errors="replace",
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip("\n\0")


def _read(file: Path) -> str:
    return file.read_bytes().decode(errors="replace")


def _lines(text: str) -> set[str]:
    return {stripped for line in text.splitlines() if (stripped := line.strip())}
