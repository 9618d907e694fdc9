"""The last view: what was found, three answers side by side, and what to do next. Boxes on a terminal, plain lines everywhere else."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipelines.commands.demonstration.comparing import Pair
from pipelines.commands.demonstration.outcome import NEXT, Outcome
from pipelines.simulation.diary import Entry

KEPT, DROPPED = "green", "dim strike"


def close(console: Console, outcome: Outcome, url: str) -> None:
    """Print it all."""
    if console.is_terminal:
        for shown in pages(outcome):
            console.print(shown)
    else:
        for line in _plain(outcome):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    for number, sentence in enumerate(NEXT, 1):
        console.print(f"{number}. {sentence.format(url=url)}", highlight=False, markup=False, soft_wrap=True)


def pages(outcome: Outcome) -> list[Table]:
    """The answers side by side, and the findings, for a terminal or a picture."""
    return [*(_side_by_side(pair, outcome) for pair in outcome.pairs), outcome.table()]


def _side_by_side(pair: Pair, outcome: Outcome) -> Table:
    """Both answers with what the person kept in green; what is struck through was deleted."""
    table = Table(title=Text(_heading(pair)), caption=Text(pair.first.question, style="cyan"), expand=True, show_lines=True)
    for name, entry in ((outcome.first, pair.first), (outcome.last, pair.last)):
        table.add_column(Text(f"{name}: {entry.share:.0%} kept"), ratio=1, overflow="fold")
    table.add_row(_marked(pair.first), _marked(pair.last))
    return table


def _heading(pair: Pair) -> str:
    ranks = {0.9: "one answer in ten gained as much or more", 0.7: "three answers in ten gained as much or more", 0.5: "the median gain"}
    return f"a held-out question by {pair.first.person} ({ranks.get(pair.quantile, 'a gain')}: {pair.gain:+.0%})"


def _marked(entry: Entry) -> Text:
    kept = {line.strip() for line in entry.kept.splitlines()}
    marked = Text()
    for line in entry.answer.splitlines():
        marked.append(f"{line}\n", style=KEPT if line.strip() in kept and entry.kept else DROPPED)
    marked.rstrip()
    return marked


def _plain(outcome: Outcome) -> list[str]:
    lines: list[str] = []
    for pair in outcome.pairs:
        lines += ["", _heading(pair), *(f"    | {line}" for line in pair.first.question.splitlines())]
        for name, entry in ((outcome.first, pair.first), (outcome.last, pair.last)):
            lines.append(f"  {name}, {entry.share:.0%} kept (+ kept, - deleted):")
            kept = {line.strip() for line in entry.kept.splitlines()} if entry.kept else set[str]()
            lines += [f"    {'+' if line.strip() in kept else '-'} {line}" for line in entry.answer.splitlines()]
    rows = outcome.rows()
    width = max(len(name) for name, _ in rows)
    return [*lines, "", outcome.title, *(f" {name:<{width}}  {text}" for name, text in rows), ""]
