"""Runners on which the proofs of several adapters fail: probably the runner is at fault, and not the adapters."""

from collections.abc import Iterable
from dataclasses import replace

from motet.domain import BASE, Digest, InstanceName
from motet.runner_info import Failure
from motet_scheduler.policy.adapters.revision_state import Start

OTHERS_FAIL_TOO = (
    "On this runner, the proofs of other adapters fail, too: its kernels or its device are probably at fault, and not "
    "the adapter. Ask the platform team to replace the runner."
)


class Suspects:
    def __init__(self) -> None:
        self._first: dict[Start, tuple[str, Digest]] = {}
        """The adapter whose proof has failed on a runner since it last certified one, and its bytes"""
        self._several: set[Start] = set()
        """Those on which the proofs of others have failed, too"""

    def proof_failed(self, start: Start, adapter: str, digest: Digest) -> bool:
        """`digest`: of its bytes, if they are known. → True if the runner is a suspect from now on"""
        name, bytes_ = self._first.setdefault(start, (adapter, digest))
        if start in self._several or name == adapter or (digest != BASE and bytes_ == digest):
            return False
        self._several.add(start)
        return True

    def certified(self, instance: InstanceName) -> list[Start]:
        """→ those that are suspects no longer"""
        return [start for start in [*self._first] if start[0] == instance and self.forget(start)]

    def forget(self, start: Start) -> bool:
        """→ True if it was a suspect"""
        was = start in self._several
        self._several.discard(start)
        self._first.pop(start, None)
        return was

    def said_of(self, failure: Failure, starts: Iterable[Start]) -> Failure:
        """The failure, with what those of other adapters say about these runners"""
        if self._several.isdisjoint(starts):
            return failure
        return replace(failure, message=f"{failure.message} {OTHERS_FAIL_TOO}")
