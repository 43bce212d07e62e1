"""An engine's process that ends and sends nothing more when it computes a prompt with the token `DEADLY`.

`EngineClient(config, process, DEADLY_ENGINE)` starts it as it starts the real one. `dying_engine` names the
other ways to end: those of an engine whose device fails.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from motet_runner.engine_process import main
from motet_simulator.fake_engine import FakeEngine

DEADLY = 666
STEP_SECONDS = 0.005
LONG_SECONDS = 600


def exits() -> NoReturn:
    os._exit(1)


def exits_with_the_drivers_status() -> NoReturn:
    os._exit(70)


def fails() -> NoReturn:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def fails_and_stays() -> NoReturn:
    """A driver that waits for a lost device keeps a process whose connections are closed."""
    os.close(int(sys.argv[1]))
    time.sleep(LONG_SECONDS)
    fails()


def dying_engine(how: Callable[[], NoReturn]) -> tuple[str, ...]:
    """The command."""
    return sys.executable, "-c", f"from tests.support import deadly_engine as it; it.run(it.{how.__name__})"


def run(dies: Callable[[], NoReturn]) -> None:
    main(lambda _config, _on_progress: FakeEngine(step_seconds=STEP_SECONDS, deadly=DEADLY, dies=dies))


DEADLY_ENGINE = dying_engine(exits)
