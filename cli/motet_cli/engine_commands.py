"""Carries out the commands of `motet engine`."""

import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import structlog
import typer

from motet.errors import SetupError
from motet_cli.printer import Printer
from motet_runner.engine_imports import for_an_engine
from motet_runner.interface import EngineConfig
from motet_runner.settings import KERNEL_CACHE

if TYPE_CHECKING:
    from motet_runner.inspection import Inspection

KIB, MIB = 1024, 1024 * 1024
REFUSED = 1


def inspect(
    model: Path,
    *,
    adapters: Path | None,
    kv_cache_mib: int | None,
    dtype: str,
    prompt: int,
    output: int,
    max_tokens: int,
    as_json: bool,
) -> int:
    """Exit status 1: an adapter would be refused."""
    if adapters is not None and not adapters.is_dir():
        raise SetupError(f"--adapters: {adapters} is no folder. Name a folder of adapters, or one adapter.")
    structlog.configure(
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
    )
    with for_an_engine(KERNEL_CACHE.expanduser(), beside_peft=True):
        from motet_runner import inspection  # imports torch, which takes seconds

    found = inspection.inspect(
        EngineConfig(model=model, dtype=dtype, kv_cache_mib=kv_cache_mib),
        load=inspection.Load(prompt=prompt, max_tokens=max(max_tokens, output), output=output),
        adapters=adapters,
    )
    if as_json:
        typer.echo(orjson.dumps(_document(found), option=orjson.OPT_INDENT_2).decode())
    else:
        _print(found, prompt=prompt, output=output)
    return REFUSED if any(one.refused for one in found.adapters) else 0


def _document(found: "Inspection") -> dict[str, object]:
    info = found.info
    return {
        "family": info.architecture,
        "layers": info.layers,
        "vocabulary": info.vocabulary,
        "context": info.max_model_length,
        "dtype": info.dtype,
        "device": info.device,
        "kv_bytes_per_token": info.page_bytes // info.page_tokens,
        "pages": info.pages,
        "page_tokens": info.page_tokens,
        "kv_tokens": info.pages * info.page_tokens,
        "linears": len(info.target_modules),
        "presets": [asdict(one) for one in found.presets],
        "adapters": [asdict(one) for one in found.adapters],
    }


def _print(found: "Inspection", *, prompt: int, output: int) -> None:
    info, printer = found.info, Printer()
    printer.line(
        f"{info.architecture}: {info.layers} layers, vocabulary {info.vocabulary:,}, "
        f"context {info.max_model_length:,}; {info.dtype} on {info.device}"
    )
    memory = info.pages * info.page_bytes / MIB
    printer.line(
        f"A token's keys and values take {info.page_bytes / info.page_tokens / KIB:.1f} KiB. {memory:,.0f} MiB hold "
        f"{info.pages * info.page_tokens:,} tokens, in {info.pages:,} pages of {info.page_tokens}, which adapters "
        "share."
    )
    printer.table(
        ("preset", "first promise", "admitted"),
        [(one.preset, f"{one.promise} pages", f"{one.requests}") for one in found.presets],
        title=f"Requests of {prompt} + {output} tokens",
        frame=True,
    )
    printer.line(f"Of those admitted, {info.max_sequences} are computed at once (engine.maxConcurrentSequences).")
    if found.adapters:
        rows = []
        for cost in found.adapters:
            size = f"{cost.pages * info.page_bytes / MIB:.1f}"
            values = ["", "", "", ""] if cost.refused else [f"{cost.rank}", f"{cost.linears}", f"{cost.pages}", size]
            rows.append((cost.name, *values, cost.refused))
        printer.table(("adapter", "rank", "linears", "pages", "MiB", "refused because"), rows, frame=True)
