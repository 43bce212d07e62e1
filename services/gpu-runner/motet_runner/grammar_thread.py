"""Makes the masks of new requests beside the engine's thread: only the request waits while its grammar is compiled. The
gateway has tried it, so that none takes long."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

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
        self._waiting: deque[tuple[Add, Future[RowMask]]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, command: Add) -> None:
        self._waiting.append((command, self._thread.submit(self._mask_of, command.sequence)))

    def forget(self, request: RequestId) -> None:
        """It is not wanted any more."""
        for entry in [one for one in self._waiting if one[0].sequence.request == request]:
            entry[1].cancel()
            self._waiting.remove(entry)

    def done(self) -> Iterator[tuple[Add, RowMask | MotetError]]:
        """In the order of their beginning."""
        while self._waiting and self._waiting[0][1].done():
            command, future = self._waiting.popleft()
            try:
                yield command, future.result()
            except MotetError as error:
                yield command, error
            except BaseException as error:  # also a panic of Rust, which is no Exception: it ends its own request
                yield command, known_error(RuntimeError(repr(error)), command="mask_of")
