"""Decides whether the gateway takes one more request."""

from collections.abc import Callable, Sized

from motet.errors import Overloaded


class Admission:
    """Counts what is in progress. At most `max_requests` choices and as many answers may be, so that memory is bounded.

    An answer stays in progress after its last token, until its client has read it. A choice is one generation of it.
    """

    def __init__(self, max_requests: int, *, choices: Callable[[], int], held: Sized, answers: Sized) -> None:
        """`choices`: how many choices are with the scheduler or a runner. `held`: requests that wait for a runner."""
        self._max_requests = max_requests
        self._choices = choices
        self._held = held
        self._answers = answers

    def check_request(self) -> None:
        """Raises Overloaded if no other request is taken. Called before the body is read."""
        self.check_choices(1)
        self._check(len(self._answers), 1)

    def check_choices(self, new: int) -> None:
        """Raises Overloaded if a request of `new` choices is not taken."""
        self._check(self._choices() + len(self._held), new)

    def _check(self, in_progress: int, new: int) -> None:
        if in_progress + new > self._max_requests:
            raise Overloaded(f"The gateway has {in_progress} requests in progress and takes no more. Try again soon.")
