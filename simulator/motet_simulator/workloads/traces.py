"""The traces that others have published, each as it lies in its repository. A file's first line says which it is.

| trace                     | first line                                    | has                                    |
|---------------------------|-----------------------------------------------|----------------------------------------|
| a workload of our own     | `{"at": …, "prompt_tokens": …, …}`            | all                                    |
| Azure LLM inference 2023  | `TIMESTAMP,ContextTokens,GeneratedTokens`     | times, lengths                         |
| Mooncake                  | `{"timestamp": …, "hash_ids": […], …}`        | times, lengths, blocks of 512 tokens   |
| lengths (LMSYS, ShareGPT) | `ContextTokens,GeneratedTokens`               | lengths                                |
| Arena with adapters (VTC) | `req_id,prompt_len,output_len,req_time,adapter` | all                                  |
| GenTD26, requests         | `gmt_create,…,groupId,…`                      | times, tenants, models as adapters     |
| GenTD26, adapters         | `predict_type,…,loras`                        | adapters, in their order               |
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

from motet.domain import ObjectName
from motet.errors import SetupError
from motet.runner_info import RequestClass
from motet_simulator.lines import BadRow, Row, csv_rows, json_object, numbered_lines
from motet_simulator.workloads.request import BLOCK_TOKENS

CLASSES = tuple(one.name.lower() for one in RequestClass)
MAX_BLOCKS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """A request as far as its trace knows it. None: the trace does not say."""

    line: int
    at: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    max_tokens: int = 0
    tenant: str = ""
    adapter: str | None = None
    request_class: str = "standard"
    blocks: tuple[int, ...] = ()
    block_tokens: int = BLOCK_TOKENS


def read(file: Path) -> Iterator[TraceRow]:
    """The rows of a trace, in order of time. Raises SetupError for a file of another form, and BadRow for its rows."""
    lines = numbered_lines(file)
    first = next(lines, None)
    if first is None:
        raise SetupError(f"{file} is empty.")
    return _in_order(file, _rows(file, first, lines))


def _rows(file: Path, first: tuple[int, str], lines: Iterator[tuple[int, str]]) -> Iterable[TraceRow]:
    number, line = first
    all_lines = chain([first], lines)
    if line.lstrip().startswith("{"):
        keys = json_object(file, number, line).keys()
        reader = _mooncake if "hash_ids" in keys else _own if "at" in keys else None
        if reader is not None:
            return (reader(Row(file, at, json_object(file, at, text))) for at, text in all_lines)
    else:
        columns, rows = csv_rows(file, all_lines)
        for wanted, of_row in _CSV_FORMS:
            if wanted <= set(columns):
                return map(of_row, rows)
    raise SetupError(
        f"{file} is no workload: its first line is of none of the known forms. docs/guides/capacity.md shows Motet's "
        "own."
    )


def _in_order(file: Path, rows: Iterable[TraceRow]) -> Iterator[TraceRow]:
    """Times begin with 0."""
    first: float | None = None
    newest, newest_line = 0.0, 0
    for row in rows:
        if row.at is None:
            yield row
            continue
        if first is None:
            first = newest = row.at
        if row.at < newest:
            raise BadRow(
                file,
                row.line,
                f"its time is {newest - row.at:g} s before that of line {newest_line}; sort the file by time",
            )
        newest, newest_line = row.at, row.line
        yield replace(row, at=row.at - first) if first else row


# -- the forms -----------------------------------------------------------------------------------------------------


def _own(row: Row) -> TraceRow:
    unknown = row.names - _KEYS
    if unknown:
        raise row.bad(f"there is no {min(unknown)!r} in a workload; it has {', '.join(sorted(_KEYS))}")
    request_class = row.text("class", default="standard")
    if request_class not in CLASSES:
        raise row.bad(f"class is {request_class!r}: it must be one of {', '.join(CLASSES)}")
    block_tokens = row.tokens("block_tokens") if row.get("block_tokens") is not None else BLOCK_TOKENS
    if block_tokens % 16:
        raise row.bad(f"block_tokens is {block_tokens}: it must be a multiple of 16, the tokens of a page")
    return TraceRow(
        line=row.line,
        at=row.number("at"),
        prompt_tokens=row.tokens("prompt_tokens"),
        output_tokens=row.tokens("output_tokens"),
        max_tokens=row.tokens("max_tokens") if row.get("max_tokens") is not None else 0,
        tenant=row.text("tenant"),
        adapter=_adapter(row, row.text("adapter")),
        request_class=request_class,
        blocks=_blocks(row, "blocks") if row.get("blocks") is not None else (),
        block_tokens=block_tokens,
    )


def _mooncake(row: Row) -> TraceRow:
    return TraceRow(
        line=row.line,
        at=row.number("timestamp") / 1000,
        prompt_tokens=row.tokens("input_length"),
        output_tokens=row.tokens("output_length"),
        blocks=_blocks(row, "hash_ids"),
    )


def _azure(row: Row) -> TraceRow:
    return TraceRow(
        line=row.line,
        at=_time(row, "TIMESTAMP"),
        prompt_tokens=row.tokens("ContextTokens"),
        output_tokens=row.tokens("GeneratedTokens"),
    )


def _lengths(row: Row) -> TraceRow:
    return TraceRow(
        line=row.line, prompt_tokens=row.tokens("ContextTokens"), output_tokens=row.tokens("GeneratedTokens")
    )


def _arena(row: Row) -> TraceRow:
    return TraceRow(
        line=row.line,
        at=row.number("req_time"),
        prompt_tokens=row.tokens("prompt_len"),
        output_tokens=row.tokens("output_len"),
        adapter=_adapter(row, row.text("adapter")),
    )


def _gentd26(row: Row) -> TraceRow:
    return TraceRow(
        line=row.line,
        at=_time(row, "gmt_create"),
        tenant=row.text("groupId"),
        adapter=_adapter(row, row.text("checkpoint_model_version_id")),
    )


def _gentd26_adapters(row: Row) -> TraceRow:
    """An image may be made with several adapters: the first one counts."""
    return TraceRow(line=row.line, adapter=_adapter(row, row.text("loras", most=4000).partition(":")[0]))


_KEYS = {
    "at", "prompt_tokens", "output_tokens", "max_tokens", "tenant", "adapter", "class", "blocks", "block_tokens",
}  # fmt: skip

_CSV_FORMS: list[tuple[set[str], Callable[[Row], TraceRow]]] = [
    ({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}, _azure),
    ({"ContextTokens", "GeneratedTokens"}, _lengths),
    ({"prompt_len", "output_len", "req_time", "adapter"}, _arena),
    ({"gmt_create", "groupId", "checkpoint_model_version_id"}, _gentd26),
    ({"loras", "base_model"}, _gentd26_adapters),
]


def _adapter(row: Row, text: str) -> str:
    """One name for each adapter: without the default namespace."""
    found = ObjectName.parse(text)
    if text and ("/" in found.name or not found.name.strip() or not found.namespace.strip()):
        raise row.bad(f"the adapter is {text!r}: it must be a name, or a namespace and a name with one / between")
    return found.name if found.namespace == "default" else text


def _blocks(row: Row, name: str) -> tuple[int, ...]:
    found = row.get(name)
    if not isinstance(found, list) or len(found) > MAX_BLOCKS:
        raise row.bad(f"{name} must be a list of at most {MAX_BLOCKS} numbers")
    if not all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one < 1 << 31 for one in found):
        raise row.bad(f"{name} must have whole numbers from 0 to {(1 << 31) - 1}")
    return tuple(found)


def _time(row: Row, name: str) -> float:
    text = row.text(name)
    try:
        found = datetime.fromisoformat(text[:26])  # a seventh digit of a second is more than it reads
    except ValueError:
        raise row.bad(f"{name} is {text!r}: it must be a date and a time") from None
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()
