"""Finds the model that a call names: waits until it is there, and finds it again if it was replaced meanwhile."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from motet.errors import BaseModelReplaced, ModelNotFound, MotetError
from motet_gateway.catalog import Catalog, NotReadyReason, Target, Weights
from motet_gateway.histories import History
from motet_gateway.identity.caller import Caller
from motet_gateway.noted import Noted
from motet_gateway.tokens.text_model import ModelTokenizer

if TYPE_CHECKING:
    from motet_gateway.gateway import Gateway

MAX_RETRIES = 3
"""An adapter's revision or the base model may be replaced after the name was resolved and before the first token. If
that happens more often for one request, something else is wrong."""
_REPLACED = ModelNotFound, BaseModelReplaced
"""With these the scheduler refuses a request whose name means other weights now."""


class ModelOfCall:
    def __init__(
        self,
        gateway: "Gateway",
        caller: Caller,
        history: History,
        *,
        changed: Callable[[], None],
    ) -> None:
        """`history`: of the call. `changed` is called when `find` should look again."""
        self._gateway = gateway
        self._caller = caller
        self._history = history
        self._model = history.model
        self._call = history.id
        self._timings = history.timings
        self._changed = changed
        self.target: Target | None = None
        """What was found last."""
        self.not_ready: NotReadyReason | None = None
        self.retries = 0
        self._refused: Weights | None = None
        """What the scheduler refused, until the name means something else, or another catalog has these weights again.
        After that the scheduler may serve them again."""
        self._refused_under: Catalog | None = None
        """The catalog of then, if the base model was replaced."""
        self._refusal_noted = False
        """Whether one of the choices was refused. What the others were refused later says nothing more."""
        self.close: Callable[[], None] = lambda: None

    async def find(self, wait: Callable[[], Awaitable[None]]) -> tuple[Target, ModelTokenizer]:
        """The model and its tokenizer. Waits if no runner has sent the tokenizer yet."""
        if (ready := self._ready()) is not None:
            return ready
        stop_listening = self._gateway.listen(
            self._changed, lambda: self.not_ready.template if self.not_ready is not None else None
        )
        try:
            while (ready := self._ready()) is None:
                await wait()
            return ready
        finally:
            stop_listening()
            self._gateway.held.leave(self._call)

    @property
    def waits_for(self) -> str:
        """Empty: for nothing."""
        if (not_ready := self.not_ready) is None:
            return ""
        if not_ready.runners:
            return not_ready.why
        return f"queued position={self._gateway.held.position(self._call)} ({not_ready.why})"

    def refused(self, error: MotetError | None) -> None:
        """Call it when a choice's error arrives: catalogs before and after it may be in the same message, and the
        answer's task runs only after all of them."""
        if not isinstance(error, _REPLACED) or self._refusal_noted or self.target is None:
            return
        self._refusal_noted = True
        self._refused = self.target.weights
        # The scheduler has published the new base model before it refuses. If a later catalog has the former one, that
        # one is back, although the catalog between may never have come.
        self._refused_under = self._gateway.catalog.current if isinstance(error, BaseModelReplaced) else None
        self.close = self._gateway.listen(self._check_refusal)
        self._check_refusal()

    def may_retry(self, error: MotetError | None) -> bool:
        return isinstance(error, _REPLACED) and self.target is not None and self.retries < MAX_RETRIES

    def retry(self) -> None:
        self.retries += 1
        self._refusal_noted = False

    def _ready(self) -> tuple[Target, ModelTokenizer] | None:
        found = self._gateway.find(self._model, self._caller)
        if not isinstance(found, NotReadyReason) and found[0].weights == self._refused:
            found = NotReadyReason(f"{found[0].adapter_name or self._model} is changing to another revision")
        if not isinstance(found, NotReadyReason):
            self.not_ready = None
            self.target = found[0]
            self._timings.mark_ready()
            return found
        if self.not_ready is None or self.not_ready.why != found.why:
            self._history.timeline.note(self._gateway.around.clock(), Noted.HELD, found.why)
        self.not_ready = found
        self._timings.mark_held()
        if found.group:
            self._gateway.hold(self._call, found.group)
        else:
            self._gateway.held.leave(self._call)
        return None

    def _check_refusal(self) -> None:
        later = self._refused_under is not None and self._gateway.catalog.current is not self._refused_under
        if later or self._refused != self._gateway.weights_of(self._model, self._caller):
            self._refused = None
