"""The pages of all tiers, and copies between them. Which page holds what is decided in `motet_runner.plan`."""

import torch

from motet_runner.memory.paged import PagedStore
from motet_runner.plan import Copy, Effect, Tier, Wipe


class PageTiers:
    """Pages on the device, and a bounded number of pages in host memory, allocated once."""

    def __init__(self, device: PagedStore, host_pages: int) -> None:
        self._device = device
        # Virtual memory: the machine gives a page of it when it is first written.
        self._host = torch.empty(
            (host_pages, *device.data.shape[1:]), dtype=device.data.dtype, pin_memory=device.device.type == "cuda"
        )

    def carry_out(self, effect: Effect) -> None:
        match effect:
            case Copy(Tier.DEVICE, pages, Tier.HOST, to):
                self._host[list(to)] = self._device.copy_out(pages)
            case Copy(Tier.HOST, pages, Tier.DEVICE, to):
                self._device.copy_in(to, self._host[list(pages)])
            case Copy(Tier.DEVICE, pages, Tier.DEVICE, to):
                self._device.copy_within(pages, to)
            case Wipe(Tier.DEVICE, pages):
                self._device.clear(pages)
            case _:
                raise AssertionError(f"nothing is copied or wiped within host memory: {effect}")
