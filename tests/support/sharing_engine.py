"""A fake engine that reports what an engine with a prefix cache reports. It shares no pages itself."""

from dataclasses import replace
from typing import Any

from motet.domain import PAGE_TOKENS, RequestId
from motet.prefix_hints import hint_of, page_digests
from motet_runner.interface import EngineReport, NewSequence
from tests.support.fake_engine import FakeEngine


class SharingEngine(FakeEngine):
    """A sequence whose parent it has had is charged only for the pages after its prompt. Each prompt that it has had
    stays in its cache."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.prompt_pages: dict[RequestId, int] = {}
        self._shared: dict[RequestId, int] = {}
        self._hints: dict[int, None] = {}

    def add(self, sequence: NewSequence) -> None:
        super().add(sequence)
        self.prompt_pages[sequence.request] = len(sequence.prompt) // PAGE_TOKENS
        if sequence.parent in self.prompt_pages:
            self._shared[sequence.request] = self.prompt_pages[sequence.request]
        self._hints |= dict.fromkeys(hint_of(digest) for digest in page_digests(sequence.prefix_salt, sequence.prompt))

    def report(self) -> EngineReport:
        report = super().report()
        return replace(
            report,
            sequences=[
                replace(one, charged_pages=one.promise - self._shared.get(one.request, 0)) for one in report.sequences
            ],
            cached_prefixes=tuple(self._hints),
        )
