"""Adapters of several workers.

vLLM reads their answers one after the other and stops at the first error. The answers behind it stay unread, and vLLM
takes them for those of later calls. So no worker raises: each answers what went wrong there.
"""

from collections.abc import Callable
from typing import Any

from safetensors import SafetensorError

from motet_runner.external.vllm.driven import AnswersLost
from motet_runner.external.vllm.reason import reason_of

ADD, REMOVE = "motet_add_lora", "motet_remove_lora"
"""Methods of each worker"""
KINDS: dict[str, type[Exception]] = {"file": OSError, "memory": MemoryError, "adapter": ValueError}
Failure = tuple[str, str] | None
"""Of KINDS, and its text"""


class AnswersErrors:
    """What each worker has beside vLLM's own methods"""

    add_lora: Callable[[Any], bool]
    remove_lora: Callable[[int], bool]

    def motet_add_lora(self, request: Any) -> Failure:
        try:
            return None if self.add_lora(request) else ("adapter", "add_lora gives no reason")
        except Exception as error:
            return _failure_of(error)

    def motet_remove_lora(self, number: int) -> Failure:
        """It need not be there: another worker may have failed to load it."""
        try:
            self.remove_lora(number)
        except Exception as error:
            return _failure_of(error)
        return None


def _failure_of(error: Exception) -> Failure:
    text = str(error) or type(error).__name__
    if isinstance(error, OSError | SafetensorError):
        return "file", text
    return ("memory" if isinstance(error, MemoryError) else "adapter"), text


class WorkerAdapters:
    def __init__(self, ask: Callable[[str, Any], list[Failure]]) -> None:
        """`ask`: calls a method of each worker with this argument"""
        self._ask = ask

    def load(self, request: Any) -> None:
        failure = self._first(ADD, request)
        if failure is not None:
            self.remove(request.lora_int_id)  # vLLM gives it a slot before it reads the weights
            kind, text = failure
            raise KINDS[kind](text)

    def remove(self, number: int) -> None:
        failure = self._first(REMOVE, number)
        if failure is not None:
            raise AnswersLost(f"A worker of vLLM cannot remove an adapter: {failure[1]}")

    def _first(self, method: str, argument: Any) -> Failure:
        try:
            answers = self._ask(method, argument)
        except Exception as error:
            raise AnswersLost(f"vLLM's workers have not all answered: {reason_of(error)}") from error
        return next((one for one in answers if one is not None), None)
