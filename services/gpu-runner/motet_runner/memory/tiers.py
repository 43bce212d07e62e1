"""The pages of all tiers, and copies between them. `motet_runner.plan` decides which page holds what."""

import time

from motet.clock import Clock
from motet_runner.memory.copy_stream import copy_stream_for
from motet_runner.memory.host_pages import HostPages, HostPagesAside, SwapTime
from motet_runner.memory.paged import PagedStore
from motet_runner.plan import Copy, Tier


class PageTiers:
    """Pages on the device, and a bounded number of pages in host memory, allocated once."""

    def __init__(self, device: PagedStore, host_pages: int, *, clock: Clock = time.perf_counter) -> None:
        self._device = device
        self._host: HostPages | HostPagesAside
        if device.device.type == "cuda":
            self._host = HostPagesAside(device, host_pages, copy_stream_for(device.device))
        else:
            self._host = HostPages(device, host_pages, clock=clock)

    def carry_out(self, copy: Copy) -> None:
        match copy:
            case Copy(Tier.DEVICE, pages, Tier.HOST, to):
                self._host.take(pages, to)
            case Copy(Tier.HOST, pages, Tier.DEVICE, to):
                self._host.give(pages, to)
            case Copy(Tier.DEVICE, pages, Tier.DEVICE, to):
                self._device.copy_within(pages, to)
            case _:
                raise AssertionError(f"nothing is copied within host memory: {copy}")

    def take_swap_time(self) -> SwapTime:
        """The time of the copies to and from the host that have ended since the last call."""
        return self._host.take_swap_time()
