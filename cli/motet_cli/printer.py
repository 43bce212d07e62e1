"""Prints lines and tables. The only place that uses rich, which would take `[…]` in a text for its markup.

What is printed may come from a model's files or from another tenant, so it appears as it is: nothing in it sets a
colour, moves the cursor or fails.
"""

from collections.abc import Iterable, Sequence

from rich.box import HEAVY_HEAD
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

Part = str | tuple[str, str]
"""A text, or a text and its style, such as `bold` or `green`."""


class Printer:
    def __init__(
        self, *, to_errors: bool = False, folds_lines: bool = True, width_of_a_pipe: int | None = None
    ) -> None:
        self._console = Console(stderr=to_errors, markup=False, emoji=False, highlight=False)
        self._folds_lines = folds_lines
        if width_of_a_pipe is not None and not self._console.is_terminal:
            self._console.width = width_of_a_pipe

    def line(self, *parts: Part, end: str = "\n") -> None:
        self._console.print(_text(*parts), end=end, soft_wrap=not self._folds_lines)

    def whole_line(self, *parts: Part) -> None:
        """A line that is never folded."""
        self._console.print(_text(*parts), soft_wrap=True)

    def table(
        self, columns: Sequence[str], rows: Iterable[Sequence[Part]], *, title: str = "", frame: bool = False
    ) -> None:
        if frame:
            table = Table(title=_text(title) if title else None, box=HEAVY_HEAD)
        else:
            table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
        for column in columns:
            table.add_column(_text(column), overflow="ellipsis" if frame else "fold")
        for row in rows:
            table.add_row(*(_text(cell) for cell in row))
        self._console.print(table)

    def waiting(self) -> "Waiting | None":
        """A spinner, if this is a terminal."""
        return Waiting(self._console) if self._console.is_terminal else None


class Waiting:
    def __init__(self, console: Console) -> None:
        self._status = Status(_text("starting"), console=console)
        self._status.start()

    def update(self, text: str) -> None:
        self._status.update(_text(text))

    def stop(self) -> None:
        self._status.stop()


def visible(text: str) -> str:
    """The text with control characters written out, as in Python: a terminal would obey them."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in text)


def _text(*parts: Part) -> Text:
    text = Text()
    for part in parts:
        content, style = (part, "") if isinstance(part, str) else part
        text.append(visible(content), style=style)
    return text
