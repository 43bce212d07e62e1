"""Pages in host memory (S3-11), and the copies of their bytes there and back."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from motet.clock import Clock
from motet.errors import SetupError
from motet_runner.memory.copy_stream import CopyStream
from motet_runner.memory.marks import Mark
from motet_runner.memory.out_of_memory import is_out_of_memory
from motet_runner.memory.paged import PagedStore

PIECES, PIECE_BYTES = 4, 16 * 1024 * 1024
"""The number and the size of the staging buffers on a GPU, for pages on their way to the host and back"""


class SwapTime(NamedTuple):
    """How long the copies of pages between device and host took that have ended."""

    pages: int = 0
    seconds: float = 0.0


class HostPages:
    """For a device that shares the host's memory."""

    def __init__(self, device: PagedStore, count: int, *, clock: Clock) -> None:
        self._device = device
        # Only virtual memory: the operating system gives memory at the first write.
        self._data = torch.empty((count, *device.data.shape[1:]), dtype=device.data.dtype)
        self._clock = clock
        self._swapped = SwapTime()

    def take(self, pages: Sequence[int], to: Sequence[int]) -> None:
        """Copy pages of the device to pages of the host."""
        began = self._clock()
        self._data[list(to)] = self._device.copy_out(pages)
        self._count(len(pages), began)

    def give(self, pages: Sequence[int], to: Sequence[int]) -> None:
        """Copy pages of the host to pages of the device."""
        began = self._clock()
        self._device.copy_in(to, self._data[list(pages)])
        self._count(len(pages), began)

    def take_swap_time(self) -> SwapTime:
        swapped, self._swapped = self._swapped, SwapTime()
        return swapped

    def _count(self, pages: int, began: float) -> None:
        self._swapped = SwapTime(self._swapped.pages + pages, self._swapped.seconds + self._clock() - began)


class HostPagesAside:
    """For a GPU: pinned memory, and copies beside the model's work. That work waits only for pages that come back, and
    for a free staging buffer.

    Pages pass through staging buffers on the device, which are allocated once. They are copied one by one over the bus,
    but all at once between a buffer and the store, which is fast. So outgoing pages may be overwritten at once, and
    incoming pages are copied over the bus while the previous iteration still computes.
    """

    def __init__(self, device: PagedStore, count: int, stream: CopyStream) -> None:
        self._device = device
        self._stream = stream
        shape = device.data.shape[1:]
        self._data = _pinned((count, *shape), device)
        pages = pages_of_a_piece(device.shape.bytes_per_page())
        self.pieces = deque(
            _Piece(device.data.new_empty((pages, *shape)), stream.model_mark()) for _ in range(PIECES if count else 0)
        )
        self._under_way: deque[tuple[int, Mark, Mark]] = deque()

    def take(self, pages: Sequence[int], to: Sequence[int]) -> None:
        """Copy pages of the device to pages of the host. The pages of the device may be overwritten at once."""
        for piece, some, places in self._in_pieces(pages, to):
            if piece.copied is not None:
                self._stream.let_model_wait(piece.copied)  # until the buffer's last pages are copied
            self._device.gather(some, out=piece.data[: len(some)])
            self._stream.follow_model()
            began = self._stream.mark()  # the wait does not count as time of copies
            for place, data in zip(places, piece.data, strict=False):
                self._stream.copy(self._data[place], data)
            self._note(piece, len(some), began)

    def give(self, pages: Sequence[int], to: Sequence[int]) -> None:
        """Copy pages of the host to pages of the device, after all earlier copies to the host."""
        for piece, some, places in self._in_pieces(pages, to):
            self._stream.follow_model(piece.read)
            began = self._stream.mark()
            for page, data in zip(some, piece.data, strict=False):
                self._stream.copy(data, self._data[page])
            self._note(piece, len(some), began)
            self._stream.let_model_wait(piece.copied)
            self._device.copy_in(places, piece.data[: len(some)])
            piece.read = self._stream.model_mark()

    def take_swap_time(self) -> SwapTime:
        pages, seconds = 0, 0.0
        while self._under_way and self._under_way[0][2].passed():
            count, began, ended = self._under_way.popleft()
            pages += count
            seconds += ended.seconds_since(began)
        return SwapTime(pages, seconds)

    def _in_pieces(
        self, pages: Sequence[int], to: Sequence[int]
    ) -> Iterator[tuple["_Piece", Sequence[int], Sequence[int]]]:
        """Uses the least recently used buffer for each part."""
        size = len(self.pieces[0].data) if pages else 1
        for first in range(0, len(pages), size):
            self.pieces.rotate(-1)
            yield self.pieces[-1], pages[first : first + size], to[first : first + size]

    def _note(self, piece: "_Piece", pages: int, began: Mark) -> None:
        piece.copied = self._stream.mark()
        self._under_way.append((pages, began, piece.copied))


@dataclass(slots=True)
class _Piece:
    data: torch.Tensor
    """[pages, …]"""
    read: Mark
    """After the model's last read of the buffer"""
    copied: Mark | None = None
    """After the last copies from the buffer, or into it"""


def pages_of_a_piece(page_bytes: int) -> int:
    return max(1, PIECE_BYTES // page_bytes)


def bytes_beside_pages(page_bytes: int) -> int:
    """The bytes of the staging buffers on the device"""
    return PIECES * pages_of_a_piece(page_bytes) * page_bytes


def _pinned(shape: tuple[int, ...], device: PagedStore) -> torch.Tensor:
    try:
        return torch.empty(shape, dtype=device.data.dtype, pin_memory=device.device.type == "cuda")
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        mib = math.prod(shape) * device.data.itemsize / (1 << 20)
        raise SetupError(
            f"The {mib:.0f} MiB of host memory for the keys and values of parked requests cannot be pinned. Lower "
            "MOTET_RUNNER_HOST_KV_MIB, or raise the limit of locked memory (ulimit -l)."
        ) from error
