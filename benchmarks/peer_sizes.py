"""The sizes of the model and of the load, with which benchmarks beside other engines measure."""

import argparse
from pathlib import Path
from typing import Any

from motet_runner.settings import KERNEL_CACHE

SMALL = "30m"
MODELS: dict[str, dict[str, int]] = {
    SMALL: {"layers": 8, "width": 512, "vocabulary": 4096, "kv_mib": 256},
    "1b": {
        "layers": 22,
        "width": 2048,
        "vocabulary": 32_000,
        "heads": 32,
        "kv_heads": 4,
        "feed_forward": 5632,
        "kv_mib": 1024,
    },
}
"""By the number of parameters. The large one has TinyLlama's sizes."""
SIZES = ("layers", "width", "vocabulary", "heads", "kv_heads", "feed_forward")

OF_THE_OTHER_ENGINE = ("vllm_threads", "vllm_eager", "vllm_processes", "unified")
"""Options that change how another engine runs. Without them it runs as benchmarks.page measures it."""


def add_sizes(parser: argparse.ArgumentParser, *, model: str = SMALL) -> None:
    """The sizes of the model and of the load. `--model` gives those of the model that are not named."""
    parser.add_argument("--model", choices=MODELS, default=model, help="the sizes of the model")
    parser.add_argument("--requests", type=int, nargs="+", default=[8, 32], help="requests that begin together")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    for size in SIZES:
        parser.add_argument(f"--{size.replace('_', '-')}", type=int)
    parser.add_argument("--context", type=int, default=2304, help="the most tokens of a sequence")
    parser.add_argument("--adapters", type=int, default=16, help="adapters of the requests that have one")
    parser.add_argument("--rank", type=int, default=16, help="rank of every adapter")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--kv-mib", type=int, help="our memory for keys and values, and for adapters")
    parser.add_argument(
        "--cache", type=Path, default=KERNEL_CACHE.expanduser(), help="the folder of our compiled kernels"
    )
    parser.add_argument(
        "--threads",
        type=int,
        nargs="+",
        default=[None],
        help="our threads; the fastest of several is compared (default: what the engine chooses)",
    )
    parser.add_argument("--pairs", type=int, default=5, help="quiet pairs to measure")


def with_sizes(given: argparse.Namespace) -> argparse.Namespace:
    for size, value in MODELS[given.model].items():
        if getattr(given, size) is None:
            setattr(given, size, value)
    return given


def settings_of(given: argparse.Namespace) -> dict[str, Any]:
    """What the name of a figure does not say. With others it is another figure."""
    named = ("model", "prompt", "output", "context", "dtype", "adapters", "rank", *SIZES)
    return {name: getattr(given, name) for name in named} | {
        name: value for name in OF_THE_OTHER_ENGINE if (value := getattr(given, name, None))
    }
