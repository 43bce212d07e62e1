"""How a model would run on this machine: its memory, the requests that each preset admits, the cost of adapters.

`inspect` loads the model like a runner, and refuses a model that cannot be served with the same message.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isinf
from pathlib import Path

from motet import promises
from motet.domain import adapter_pages
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
    """The client's limit of the answer"""
    output: int
    """The answer's real and expected length"""


@dataclass(frozen=True, slots=True)
class Admitted:
    """The number of usual requests that a preset admits."""

    preset: str
    promise: int
    """Pages of the first promise"""
    requests: int
    """The number of such requests that the memory admits"""


@dataclass(frozen=True, slots=True)
class AdapterCost:
    name: str
    rank: int = 0
    pages: int = 0
    linears: int = 0
    refused: str = ""
    """Why the adapter cannot be served"""


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
            page_tokens=info.page_tokens,
        )
        # This preset does not limit promises: the pages of the tokens decide how many requests fit.
        held = promise
        if isinf(preset.overcommit):
            held = promises.max_pages(load.prompt, load.output, page_tokens=info.page_tokens)
        found.append(Admitted(name, promise, info.pages // held))
    return found


def _folders(adapters: Path) -> Iterable[Path]:
    """The folder itself if it is an adapter, else its subfolders."""
    if (adapters / CONFIG_NAME).is_file():
        return [adapters]
    return sorted(folder for folder in adapters.iterdir() if folder.is_dir())


def _cost(folder: Path, info: EngineInfo) -> AdapterCost:
    try:
        layout = certify(folder, info).layout
    except MotetError as error:
        return AdapterCost(folder.name, refused=str(error))
    pages = adapter_pages(
        layout.rank, rank_bytes=info.adapter_rank_bytes, tile=info.adapter_rank_tile, page_bytes=info.page_bytes
    )
    return AdapterCost(folder.name, layout.rank, pages, len(layout.linears))
