"""The engine's process: master and worker 0 in one. Started by the service, it ends with the service.

Between iterations it takes what commands have come; with nothing to do it sleeps on the pipe.
"""

import ctypes
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog

from motet.errors import ModelFolderError, MotetError
from motet.telemetry import configure_logging
from motet_runner.engine_loop import EngineLoop
from motet_runner.engine_messages import Loaded, LoadFailed, Start
from motet_runner.interface import Engine, EngineConfig
from motet_runner.pipe import Pipe

log = structlog.get_logger(__name__)

_PR_SET_PDEATHSIG = 1


def drive(load: Callable[[], Engine], pipe: Pipe) -> None:
    """Load an engine, say so, and run it until the service's end of the pipe closes."""
    try:
        engine = load()
    except MotetError as error:
        pipe.send(LoadFailed(error))
        pipe.flush()
        return
    except Exception as error:
        log.exception("model_load_failed")
        pipe.send(LoadFailed(ModelFolderError(f"the model does not load: {type(error).__name__}: {error}")))
        pipe.flush()
        return
    pipe.send(Loaded(engine.info))
    loop = EngineLoop(engine)
    while True:
        for commands in pipe.exchange(loop.command_wait_seconds()):
            loop.apply(commands)
        batch = loop.turn()
        if batch is not None:
            pipe.send(batch)
            if batch.report_now:
                pipe.flush()


@contextmanager
def without_collections() -> Iterator[None]:
    """For imports. What they make stays, so collections need not look at it: not during the imports, and not
    afterwards, since it is frozen."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def load_engine(config: EngineConfig) -> Engine:
    with without_collections():
        from motet_runner.engine import Engine as RealEngine  # brings torch, which takes seconds

    return RealEngine(config)


def _lower_priority() -> None:
    """An engine on the CPU takes all the time there is; what the other processes need is little, and needed at once.

    Without this a scheduler or gateway that starts beside two busy engines takes three times as long.
    """
    os.nice(5)  # behind its own service
    if os.getsid(0) == os.getppid():
        # Where the kernel shares time out between sessions first, niceness counts only within one. A session that is
        # not its runner's alone is left as it is.
        with suppress(OSError):
            Path("/proc/self/autogroup").write_text("5")


def _freeze_gc(engine: Engine) -> Engine:
    if engine.info.device == "cpu":
        _lower_priority()
    # What is loaded stays: without this, each full collection would walk all of torch in the middle of an iteration.
    gc.collect()
    gc.freeze()
    return engine


def _die_with_parent(parent: int) -> None:
    # However the service dies, the kernel sees to it that no engine stays behind, even in the middle of an iteration.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)  # it died before we could ask


def main(load: Callable[[EngineConfig], Engine] = load_engine) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is the service's to hear
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        pipe = Pipe(connection)
        try:
            start: Start = pipe.receive()
            _die_with_parent(start.parent)
            configure_logging("runner-engine", start.process)
            drive(lambda: _freeze_gc(load(start.config)), pipe)
        except EOFError:
            pass  # the service has gone; so do we


if __name__ == "__main__":
    main()
