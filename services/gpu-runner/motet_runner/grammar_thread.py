"""Makes the masks of new requests beside the engine's thread: only the request waits while its grammar is compiled. The
gateway has tried it, so that none takes long. Tenants take turns: the first grammar of one waits for at most one of
each other tenant, and the one that is being compiled is one of these."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

from motet.domain import RequestId
from motet.errors import MotetError
from motet.rpc.message_failures import known_error
from motet_runner.engine_messages import Add
from motet_runner.interface import NewSequence
from motet_runner.row_mask import RowMask

MaskOf = Callable[[NewSequence], RowMask]
Entry = tuple[Add, Future[RowMask]]


class CompileThread:
    def __init__(self, mask_of: MaskOf) -> None:
        self._mask_of = mask_of
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._waiting: list[Entry] = []
        self._lock = Lock()
        self._turns: OrderedDict[str, deque[Entry]] = OrderedDict()
        """What has not begun, by tenant. The first tenant is the next one, and stays so while its own is compiled."""

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, command: Add) -> None:
        entry: Entry = (command, Future())
        self._waiting.append(entry)
        with self._lock:
            self._turns.setdefault(command.sequence.tenant, deque()).append(entry)
        self._thread.submit(self._compile_next)

    def forget(self, request: RequestId) -> None:
        """It is not wanted any more."""
        for entry in [one for one in self._waiting if one[0].sequence.request == request]:
            entry[1].cancel()
            self._waiting.remove(entry)

    def done(self) -> Iterator[tuple[Add, RowMask | MotetError]]:
        """In the order of their arrival, as far as they are done."""
        waiting, self._waiting = self._waiting, []
        for entry in waiting:
            command, future = entry
            if not future.done():
                self._waiting.append(entry)
                continue
            try:
                yield command, future.result()
            except MotetError as error:
                yield command, error
            except BaseException as error:  # also a panic of Rust, which is no Exception: it ends its own request
                yield command, known_error(RuntimeError(repr(error)), command="mask_of")

    def _compile_next(self) -> None:
        """Once for each that has begun."""
        with self._lock:
            tenant, own = next(iter(self._turns.items()))
            entry = own.popleft()
        self._compile(*entry)
        with self._lock:  # not before: those who came meanwhile go before its next one
            if own:
                self._turns.move_to_end(tenant)
            else:
                del self._turns[tenant]

    def _compile(self, command: Add, future: Future[RowMask]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(self._mask_of(command.sequence))
        except BaseException as error:  # `done` raises it
            future.set_exception(error)
