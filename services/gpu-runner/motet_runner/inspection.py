"""What an engine of this machine would make of a model: its memory, what each preset admits, what adapters cost.

It loads the model as a runner does, so a model that cannot be served is refused here with the same words.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isinf
from pathlib import Path

from motet import promises
from motet.errors import MotetError
from motet_runner.adapters.certification import certify
from motet_runner.adapters.peft_config import CONFIG_NAME
from motet_runner.engine import Engine
from motet_runner.interface import EngineConfig, EngineInfo
from motet_runner.plan import PRESETS


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A usual request, in tokens."""

    prompt: int
    max_tokens: int
    """What the client allows."""
    output: int
    """What the answer has, and is expected to have."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """What a preset admits of requests like the usual one."""

    preset: str
    promise: int
    """Pages of the first promise"""
    requests: int
    """How many of them the memory admits"""


@dataclass(frozen=True, slots=True)
class AdapterCost:
    name: str
    rank: int = 0
    pages: int = 0
    linears: int = 0
    refused: str = ""
    """Why it cannot be served"""


@dataclass(frozen=True, slots=True)
class Inspection:
    info: EngineInfo
    presets: list[Admitted]
    adapters: list[AdapterCost]


def inspect(config: EngineConfig, *, load: Load, adapters: Path | None = None) -> Inspection:
    info = Engine(config).info
    folders = () if adapters is None else _folders(adapters)
    return Inspection(info, admitted(info, load), [_cost(folder, info) for folder in folders])


def admitted(info: EngineInfo, load: Load) -> list[Admitted]:
    """For each preset, while no adapter takes memory."""
    found = []
    for name, preset in PRESETS.items():
        promise = promises.pages_by_rule(
            preset.promise,
            load.prompt,
            load.max_tokens,
            expected=load.output,
            context_tokens=info.max_model_length,
        )
        # Promises without a limit: what fits is decided by the pages that the tokens take.
        held = promises.max_pages(load.prompt, load.output) if isinf(preset.overcommit) else promise
        found.append(Admitted(name, promise, info.pages // held))
    return found


def _folders(adapters: Path) -> Iterable[Path]:
    """The folder itself if it is an adapter, else those in it."""
    if (adapters / CONFIG_NAME).is_file():
        return [adapters]
    return sorted(folder for folder in adapters.iterdir() if folder.is_dir())


def _cost(folder: Path, info: EngineInfo) -> AdapterCost:
    try:
        layout = certify(folder, info).layout
    except MotetError as error:
        return AdapterCost(folder.name, refused=str(error))
    rank = -(-layout.rank // info.adapter_rank_tile) * info.adapter_rank_tile
    pages = -(-rank * info.adapter_rank_bytes // info.page_bytes)
    return AdapterCost(folder.name, layout.rank, pages, len(layout.linears))
