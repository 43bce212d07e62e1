"""Prompts that go over a stream once, although several requests have them: the choices of one call.

A gateway numbers such a prompt, and a runner keeps the last ones of each stream. Both ends note all numbers of a stream
in the same order, so the gateway knows which prompts the runner has. Pure.
"""

from array import array
from collections import OrderedDict

from motet.errors import Declined

MAX_KEPT = 4
"""Prompts of one stream. The choices of a call are mostly placed together."""


class KeptPrompts:
    def __init__(self) -> None:
        self._kept: OrderedDict[int, array[int]] = OrderedDict()
        """They stay when their requests have ended. In an array, a token has a tenth of the bytes."""

    def __contains__(self, number: int) -> bool:
        return number in self._kept

    def note(self, number: int, prompt: tuple[int, ...] = ()) -> tuple[int, ...]:
        """The prompt of a request, which is `prompt`, or the kept one if that is empty. 0: it has no number. Raises
        Declined if it is not kept."""
        if not number:
            return prompt
        if prompt:
            self._kept[number] = array("I", prompt)
        elif number not in self._kept:
            raise Declined(f"The prompt {number} is not known on this stream.")
        self._kept.move_to_end(number)
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return prompt or tuple(self._kept[number])
