"""Makes the masks of new requests beside the engine's thread: only the request waits while its grammar is compiled. The
gateway has tried it, so that none takes long. Tenants take turns: the first grammar of one waits for at most one of
each other tenant, and the one that is being compiled is one of these. What is not wanted any more takes no turn."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

from motet.domain import RequestId
from motet.errors import MotetError
from motet.rpc.message_failures import known_error
from motet_runner.engine_messages import Add
from motet_runner.interface import NewSequence
from motet_runner.row_mask import RowMask

MaskOf = Callable[[NewSequence], RowMask]


class CompileThread:
    def __init__(self, mask_of: MaskOf) -> None:
        self._mask_of = mask_of
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._waiting: dict[RequestId, Add] = {}
        """Those that are wanted. Only the engine's thread uses it."""
        self._lock = Lock()
        self._turns: OrderedDict[str, dict[RequestId, Add]] = OrderedDict()
        """What is wanted and has not begun, by tenant. The first tenant is the next one, and stays so while its own is
        compiled."""
        self._done: deque[tuple[Add, RowMask | MotetError]] = deque()
        """What `done` has not returned: each turn of the engine looks at these alone, not at all that wait."""

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def __bool__(self) -> bool:
        """Whether to look at `done`: also where nobody waits any more, or it would keep what was compiled for them."""
        return bool(self._waiting or self._done)

    def begin(self, command: Add) -> None:
        self._waiting[command.sequence.request] = command
        with self._lock:
            self._turns.setdefault(command.sequence.tenant, {})[command.sequence.request] = command
        self._thread.submit(self._compile_next)

    def forget(self, request: RequestId) -> None:
        """It is not wanted any more."""
        if (command := self._waiting.pop(request, None)) is not None:
            with self._lock:
                self._turns.get(command.sequence.tenant, {}).pop(request, None)

    def done(self) -> Iterator[tuple[Add, RowMask | MotetError]]:
        """In the order in which they were done."""
        while self._done:
            command, found = self._done.popleft()
            if self._is_wanted(command):
                del self._waiting[command.sequence.request]
                yield command, found

    def _is_wanted(self, command: Add) -> bool:
        return self._waiting.get(command.sequence.request) is command

    def _compile_next(self) -> None:
        """Once for each that has begun."""
        with self._lock:
            command = self._next()
        if command is None:
            return
        self._done.append((command, self._compiled(command.sequence)))
        tenant = command.sequence.tenant
        with self._lock:  # not before: those who came meanwhile go before its next one
            if self._turns[tenant]:
                self._turns.move_to_end(tenant)
            else:
                del self._turns[tenant]

    def _next(self) -> Add | None:
        """Of the first tenant that has one. None: all that have begun are done or forgotten."""
        while self._turns:
            tenant, own = next(iter(self._turns.items()))
            if own:
                return own.pop(next(iter(own)))
            del self._turns[tenant]
        return None

    def _compiled(self, sequence: NewSequence) -> RowMask | MotetError:
        try:
            return self._mask_of(sequence)
        except MotetError as error:
            return error
        except BaseException as error:  # also a panic of Rust, which is no Exception: it ends its own request
            return known_error(RuntimeError(repr(error)), command="mask_of")
