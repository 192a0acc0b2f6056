"""The tables of all commands: a bold title at the left, names at the left, numbers at the right."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence as Seq

from rich import box
from rich.table import Table


def table(title: str, heads: Seq[str], rows: Iterable[Seq[str]] = (), left: Collection[int] = (0,)) -> Table:
    """A table with its rows; further ones can be added. `left`: columns of text, which are not aligned as numbers."""
    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for i, head in enumerate(heads):
        made.add_column(head, justify="left" if i in left else "right", no_wrap=i == 0)
    for row in rows:
        made.add_row(*row)
    return made
