"""The pages of all tiers, and copies between them. Which page holds what is decided in `motet_runner.plan`."""

import torch

from motet_runner.memory.paged import PagedStore
from motet_runner.plan import Copy, Tier


class PageTiers:
    """Pages on the device, and a bounded number of pages in host memory, allocated once."""

    def __init__(self, device: PagedStore, host_pages: int) -> None:
        self._device = device
        # Virtual memory: the machine gives a page of it when it is first written.
        self._host = torch.empty(
            (host_pages, *device.data.shape[1:]), dtype=device.data.dtype, pin_memory=device.device.type == "cuda"
        )

    def carry_out(self, copy: Copy) -> None:
        match copy.source, copy.target:
            case Tier.DEVICE, Tier.HOST:
                self._host[list(copy.to)] = self._device.copy_out(copy.pages)
            case Tier.HOST, Tier.DEVICE:
                self._device.copy_in(copy.to, self._host[list(copy.pages)])
            case _:
                raise AssertionError(f"no pages are copied within a tier: {copy}")
