"""vLLM imports this in each of its workers, before the worker does anything."""

import multiprocessing

from motet_runner.engine_process import die_with_parent
from motet_runner.external.vllm.worker_adapters import AnswersErrors


class EndsWithTheEngine(AnswersErrors):
    """vLLM makes it a base of the worker's class."""


if (engine := multiprocessing.parent_process()) is not None:
    assert engine.pid is not None
    die_with_parent(engine.pid)
