"""The engine's process, in an environment with vLLM. The service starts it as it starts our own engine's process, and
the two speak the same messages."""

import logging
import os
import sys

from motet_runner.engine_process import main
from motet_runner.external.vllm.grammar_package import VARIABLE, use_package
from motet_runner.interface import Engine, EngineConfig, LoadProgress

VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its engine steps in this process, when it is told to
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a worker has none of this process's files
    "VLLM_PLUGINS": "",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CONFIGURE_LOGGING": "0",  # it would write requests to stdout
    "HF_HUB_OFFLINE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""What vLLM and torch read from the environment when they are imported"""


def load(config: EngineConfig, on_progress: LoadProgress) -> Engine:  # noqa: ARG001 - vLLM does not say how far it is
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print
    os.environ |= VARIABLES
    grammars = use_package(os.environ.get(VARIABLE, ""))
    logging.getLogger("vllm").setLevel(logging.ERROR)
    from motet_runner.external.vllm.load_vllm import load_vllm

    return load_vllm(config, grammars=grammars)


if __name__ == "__main__":
    main(load)
