"""Runner.Assets: sends a gateway the assets of the base model, by their digest."""

from collections.abc import AsyncIterator
from pathlib import Path

from motet.api.v1 import runner_pb2
from motet.digest import asset_files
from motet.domain import Digest
from motet.errors import NotFound

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
