"""An engine's process that ends at once and sends nothing when it computes a prompt with the token `DEADLY`.

`ProcessEngineClient(config, process, DEADLY_ENGINE)` starts it as it starts the real one.
"""

import os
import sys
from functools import partial

from motet_runner.engine_process import main
from tests.support.fake_engine import FakeEngine

DEADLY = 666
DEADLY_ENGINE = (sys.executable, "-m", "tests.support.deadly_engine")
STEP_SECONDS = 0.005

if __name__ == "__main__":
    main(lambda _config, _on_progress: FakeEngine(step_seconds=STEP_SECONDS, deadly=DEADLY, dies=partial(os._exit, 1)))
