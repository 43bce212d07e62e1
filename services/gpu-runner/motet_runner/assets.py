"""Runner.Assets: what a gateway needs of the base model to speak to it, by digest."""

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
    """Every asset file that exists, in pieces of at most 256 KiB. Raises NotFound for another digest than `digest`."""
    if request.digest != digest:
        raise NotFound(f"there are no assets {request.digest!r} here; this runner's are {digest}.")
    for name in asset_files(folder):
        with (folder / name).open("rb") as file:
            data = file.read(CHUNK_BYTES)
            while True:
                following = file.read(CHUNK_BYTES)
                yield runner_pb2.AssetChunk(name=name, data=data, last=not following)
                if not following:
                    break
                data = following
