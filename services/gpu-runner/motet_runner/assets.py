"""Runner.Assets: sends a gateway the assets of the base model, or the chat template of an adapter, by their digest."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from motet.api.v1 import runner_pb2
from motet.digest import asset_files
from motet.domain import Digest
from motet.errors import NotFound
from motet_runner.adapters.cache import TEMPLATE, kept_template
from motet_runner.adapters.registry import AdapterRegistry

CHUNK_BYTES = 256 * 1024


async def stream_assets(
    folder: Path, digest: Digest, request: runner_pb2.AssetsRequest
) -> AsyncIterator[runner_pb2.AssetChunk]:
    """All asset files that exist, in pieces of at most 256 KiB. Raises NotFound for another digest."""
    if request.digest != digest:
        raise NotFound(f"This runner has no assets {request.digest!r}. Its assets are {digest}.")
    for name in asset_files(folder):
        with (folder / name).open("rb") as file:
            data = file.read(CHUNK_BYTES)
            while True:
                following = file.read(CHUNK_BYTES)
                yield runner_pb2.AssetChunk(name=name, data=data, last=not following)
                if not following:
                    break
                data = following


async def stream_template(
    adapters: AdapterRegistry, request: runner_pb2.AssetsRequest
) -> AsyncIterator[runner_pb2.AssetChunk]:
    """The chat template of an adapter that this runner has checked. Raises NotFound for any other. One that the disk
    has lost is written again."""
    life, content = adapters.get(request.adapter), b""
    held = life.held if life is not None else None
    checked = held.certification if held is not None else None
    if held is not None and checked is not None and checked.certificate.template_digest == request.digest:
        content = checked.template or await asyncio.to_thread(kept_template, held.folder, request.digest)
        if not content:
            adapters.template_lost(held.digest)
    if not content:
        raise NotFound(f"This runner has no chat template {request.digest!r} of an adapter {request.adapter!r}.")
    for start in range(0, len(content), CHUNK_BYTES):
        data = content[start : start + CHUNK_BYTES]
        yield runner_pb2.AssetChunk(name=TEMPLATE, data=data, last=start + CHUNK_BYTES >= len(content))
