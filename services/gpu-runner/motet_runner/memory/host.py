"""Copies of parked sequences' pages in host memory (S3-11). How much may lie here is decided in the plan."""

import torch

from motet.domain import RequestId
from motet_runner.memory.paged import PagedStore


class HostTier:
    def __init__(self, store: PagedStore) -> None:
        self._store = store
        self._copies: dict[RequestId, torch.Tensor] = {}

    def swap_out(self, request: RequestId, pages: tuple[int, ...]) -> None:
        self._copies[request] = self._store.copy_out(pages)

    def swap_in(self, request: RequestId, pages: tuple[int, ...]) -> None:
        self._store.copy_in(pages, self._copies[request])

    def drop(self, request: RequestId) -> None:
        self._copies.pop(request, None)

    def __len__(self) -> int:
        return len(self._copies)
