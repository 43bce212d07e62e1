"""How vLLM's processes are started: the same for its engine alone and for its server."""

import argparse
import os
from pathlib import Path

from tools.peers.vllm import preloads


def environment_of_vllm(given: argparse.Namespace) -> dict[str, str]:
    folder: Path = given.python.parent.parent
    cores = sorted(os.sched_getaffinity(0))
    return {
        "LD_PRELOAD": ":".join(preloads(folder)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores[: given.vllm_threads or len(cores)])),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(given.vllm_processes)),
        "VLLM_CACHE_ROOT": str(folder / "compiled"),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
