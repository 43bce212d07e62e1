"""Pages in host memory (S3-11), and how their bytes come there and back."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from motet.clock import Clock
from motet_runner.memory.paged import PagedStore


class SwapTime(NamedTuple):
    """How long copies of pages between device and host took, once they had ended."""

    pages: int = 0
    seconds: float = 0.0


class HostPages:
    """Beside a device whose memory is the host's, too."""

    def __init__(self, device: PagedStore, count: int, *, clock: Clock) -> None:
        self._device = device
        # Virtual memory: the machine gives a page of it when it is first written.
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


class HostPagesOfGpu:
    """Pinned, and copied on a stream of their own: the model's stream goes on meanwhile, and waits only for the pages
    that it needs back."""

    def __init__(self, device: PagedStore, count: int) -> None:
        self._device = device
        self._data = torch.empty((count, *device.data.shape[1:]), dtype=device.data.dtype, pin_memory=True)
        self._stream = torch.cuda.Stream(device.device)
        self._under_way: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()

    def take(self, pages: Sequence[int], to: Sequence[int]) -> None:
        """Copy pages of the device to pages of the host. The pages of the device may be written again at once."""
        together = self._device.gather(pages)  # on the model's stream, in the order of its writes
        self._stream.wait_stream(torch.cuda.current_stream(self._device.device))
        with torch.cuda.stream(self._stream):
            began = self._event()
            for page, data in zip(to, together, strict=True):
                self._data[page].copy_(data, non_blocking=True)
            self._under_way.append((len(pages), began, self._event()))
        together.record_stream(self._stream)

    def give(self, pages: Sequence[int], to: Sequence[int]) -> None:
        """Copy pages of the host to pages of the device, after all earlier copies to the host."""
        model = torch.cuda.current_stream(self._device.device)
        with torch.cuda.stream(self._stream):
            together = self._device.data.new_empty((len(pages), *self._data.shape[1:]))
            began = self._event()
            for page, data in zip(pages, together, strict=True):
                data.copy_(self._data[page], non_blocking=True)
            self._under_way.append((len(pages), began, self._event()))
        model.wait_stream(self._stream)
        together.record_stream(model)
        self._device.copy_in(to, together)

    def take_swap_time(self) -> SwapTime:
        pages, seconds = 0, 0.0
        while self._under_way and self._under_way[0][2].query():
            count, began, ended = self._under_way.popleft()
            pages += count
            seconds += began.elapsed_time(ended) / 1000
        return SwapTime(pages, seconds)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event
