"""The engine's process. The service starts it, and it ends with the service.

The process takes commands between iterations. Without work, it waits on the pipe.
"""

import ctypes
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import NoReturn

from motet.imports import without_collections

with without_collections():
    import structlog

    from motet.clock import monotonic
    from motet.errors import ModelFolderError, MotetError
    from motet.telemetry import configure_logging
    from motet_runner.engine_imports import for_an_engine
    from motet_runner.engine_loop import EngineLoop
    from motet_runner.engine_messages import Loading, Start
    from motet_runner.grammar_thread import CompileThread
    from motet_runner.interface import Engine, EngineConfig, LoadProgress
    from motet_runner.pipe import Pipe

log = structlog.get_logger(__name__)

_PR_SET_PDEATHSIG = 1


def drive(load: Callable[[], Engine], pipe: Pipe) -> None:
    """Load an engine, report that, and run it until the service closes its end of the pipe."""
    try:
        engine = load()
    except Exception as error:
        if not isinstance(error, MotetError):
            log.exception("model_load_failed")
            error = ModelFolderError(f"The engine cannot load the model: {type(error).__name__}: {error}")
        pipe.send(error)
        pipe.flush()
        return
    pipe.send(engine.info)
    loop = EngineLoop(engine, clock=monotonic, grammars=CompileThread(engine.mask_of))
    while True:
        loop.apply(pipe.exchange(loop.command_wait_seconds()))
        batch = loop.turn()
        if batch is not None:
            pipe.send(batch)
            if batch.report_now or pipe.full:
                pipe.flush()


def load_engine(config: EngineConfig, on_progress: LoadProgress) -> Engine:
    with without_collections(), for_an_engine(config.kernel_cache):
        from motet_runner.engine import Engine as RealEngine  # imports torch, which takes seconds

    return RealEngine(config, on_load_progress=on_progress)


def _lower_priority() -> None:
    """Let other processes run first: an engine on the CPU uses all the time that it gets, and other processes need
    little.

    Without this, a scheduler or gateway that starts beside two busy engines takes three times as long.
    """
    os.nice(5)  # the engine's own service runs first
    if os.getsid(0) == os.getppid():
        # If Linux first divides time between sessions (autogroup), niceness counts only within a session. So lower the
        # session's priority, but only if the service leads the session: then the session has only the service and
        # processes that it has started.
        with suppress(OSError):
            Path("/proc/self/autogroup").write_text("5")


def _freeze_gc(engine: Engine) -> Engine:
    if engine.info.device == "cpu":
        _lower_priority()
    # Loaded objects stay. Without this, full collections would visit all of torch's objects during iterations.
    gc.collect()
    gc.freeze()
    return engine


def die_with_parent(parent: int) -> None:
    """If the parent dies in any way, Linux kills this process, even in the middle of an iteration."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)  # it died before that call


_CONNECTIONS: list[socket.socket] = []
"""To the service, once this is an engine's process"""
_FAILED = Event()


def disconnect() -> None:
    """Tell the service that this engine has failed, from any thread, before it has ended: Linux closes a process's
    files only when each of its threads has come to run and all its memory is free. That takes a second on a busy
    machine, and longer with a GPU. Log why before: a thread that waits for commands ends the process now."""
    _FAILED.set()
    for connection in _CONNECTIONS:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def main(load: Callable[[EngineConfig, LoadProgress], Engine] = load_engine) -> NoReturn:
    status = 0
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the service handles ctrl-C
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        _CONNECTIONS.append(connection)
        pipe = Pipe(connection)
        try:
            start: Start = pipe.receive()
            die_with_parent(start.parent)
            configure_logging("runner-engine", start.process)

            def report(read_bytes: int, total_bytes: int) -> None:
                # In a thread that reads weights: nothing else uses the pipe before the engine is loaded.
                pipe.send(Loading(read_bytes, total_bytes))

            drive(lambda: _freeze_gc(load(start.config, report)), pipe)
        except EOFError:
            status = int(_FAILED.is_set())  # else the service has ended, so the engine ends, too
        except Exception:
            log.exception("engine_failed")
            status = 1
    # Skip the interpreter's shutdown: the service does not wait that long, the driver of a lost device may block it,
    # and native libraries (Triton's bindings) then write text that is no log line.
    os._exit(status)


if __name__ == "__main__":
    main()
