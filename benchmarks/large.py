"""Measures the memory of an engine with a large model: a random Llama of 1 B parameters, with 128,256 tokens.

Both figures are resident memory of a process of their own, less its resident memory after the imports. The first
process loads the model (and probes it); `peak_share_1b` is its peak as a share of the weights. The second one runs an
engine until 32 sequences have written every KV page and decode together, half of them with top-p sampling;
`rss_share_1b` is its memory then, as a share of weights and KV. `rss_peak_share_1b` is its peak until then.

The shards are bfloat16, and made once, in the scratch folder (2 GB). The engine computes in float32; with
`--dtype bfloat16` it takes minutes more on a CPU that multiplies no bfloat16. The kernels are torch's, or with
`--kernels cpp` the compiled ones, which pack the weights: names then end in _cpp. It does not use a GPU.

    python -m benchmarks.large [--scratch FOLDER] [--kernels torch] [--dtype float32] [--threads 2] [--json]
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness import Result, arguments, report, skip

ROWS = 32
CHUNK = 512
"""Prompt tokens of an iteration."""
TOGETHER = 8
"""Tokens that the last sequence decodes. The first ones begin earlier, and decode that many more."""

RSS_LIMIT, PEAK_LIMIT = 1.25, 1.15


class Memory:
    """Resident memory of this process, from now on."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again at what is resident now
        self._before = self._read("VmRSS")

    @property
    def grown(self) -> int:
        return self._read("VmRSS") - self._before

    @property
    def peak(self) -> int:
        return self._read("VmHWM") - self._before

    @staticmethod
    def _read(field: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
        raise LookupError(field)


def load_model(given: argparse.Namespace) -> dict[str, int]:
    import torch
    from transformers.models.llama import modeling_llama  # noqa: F401 - `load` would import it

    from motet_runner.execute.load.load_model import load

    torch.set_num_threads(given.threads)
    memory = Memory()
    model = load(given.model, given.dtype, "cpu").model
    return {"weights": sum(weight.nbytes for weight in model.parameters()), "peak": memory.peak}


def run_engine(given: argparse.Namespace) -> dict[str, int]:
    from transformers.models.llama import modeling_llama  # noqa: F401

    from motet.domain import PAGE_TOKENS, RequestId
    from motet_runner.engine import Engine
    from motet_runner.interface import EngineConfig, NewSequence, Sampling
    from motet_runner.settings import KERNEL_CACHE

    memory = Memory()
    engine = Engine(
        EngineConfig(
            model=given.model,
            dtype=given.dtype,
            device="cpu",
            kv_cache_mib=given.kv_mib,
            max_concurrent_sequences=ROWS,
            prefill_chunk_tokens=CHUNK,
            threads=given.threads,
            kernels=given.kernels,
            kernel_cache=KERNEL_CACHE.expanduser(),
        )
    )
    info = engine.info
    loaded = memory.grown
    prefills = info.pages * PAGE_TOKENS // (CHUNK - ROWS) + 1
    pages = [info.pages // ROWS + (row < info.pages % ROWS) for row in range(ROWS)]
    for row, count in enumerate(pages):
        tokens = count * PAGE_TOKENS
        outputs = TOGETHER + prefills * (ROWS - 1 - row) // (ROWS - 1)
        prompt = tuple(2 + (7 * i + 13 * row) % (info.vocabulary - 2) for i in range(tokens - outputs))
        sampling = Sampling(max_tokens=outputs, ignore_eos=True)
        if row % 2:
            sampling = replace(sampling, temperature=0.8, top_p=0.9)
        engine.add(NewSequence(request=RequestId(f"r{row}"), epoch=1, prompt=prompt, promise=count, sampling=sampling))
    together = grown = 0
    while engine.has_work():
        output = engine.step()
        if len(output.sequences) == ROWS and engine.report().pages_free == 0:
            together += 1
            grown = memory.grown
    assert together, "not all pages were written while all rows decoded"
    return {
        "loaded": loaded,
        "grown": grown,
        "peak": memory.peak,
        "kv": info.pages * info.page_bytes,
        "together": together,
    }


MEASUREMENTS = {"load": load_model, "engine": run_engine}


def in_a_process_of_its_own(measurement: str, model: Path, given: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.large", "--measure", measurement, "--model", str(model)]
    command += [f"--kv-mib={given.kv_mib}", f"--threads={given.threads}", f"--dtype={given.dtype}"]
    command.append(f"--kernels={given.kernels}")
    # As the runner starts its engine: threads that spin while they wait slow down everything.
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ, "OMP_NUM_THREADS": str(given.threads)}
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(given: argparse.Namespace) -> list[Result]:
    from benchmarks.random_llama import LlamaShape, random_llama

    shape = LlamaShape(
        vocabulary=given.vocabulary,
        width=given.width,
        feed_forward=given.width,
        layers=given.layers,
        heads=16,
        kv_heads=16,
    )
    model = random_llama(shape, given.scratch)
    load = in_a_process_of_its_own("load", model, given)
    engine = in_a_process_of_its_own("engine", model, given)
    weights, needed = load["weights"], load["weights"] + engine["kv"]
    mib = 2**20
    print(
        f"weights {weights / mib:.0f} MiB, KV {engine['kv'] / mib:.0f} MiB, "
        f"the engine before the first request {engine['loaded'] / mib:.0f} MiB, with all pages written "
        f"{engine['grown'] / mib:.0f} MiB, at most {engine['peak'] / mib:.0f} MiB; "
        f"all rows decoded together {engine['together']} times"
    )
    peak, rss = load["peak"] / weights, engine["grown"] / needed
    suffix = "_cpp" if given.kernels == "cpp" else ""
    return [
        Result("peak_share_1b", peak, "x", f"<= {PEAK_LIMIT} of the weights", peak <= PEAK_LIMIT),
        Result(f"rss_share_1b{suffix}", rss, "x", f"<= {RSS_LIMIT} of weights and KV", rss <= RSS_LIMIT),
        Result(f"rss_peak_share_1b{suffix}", engine["peak"] / needed, "x"),
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--scratch", type=Path, help="where the model is kept; default: in the temporary folder")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads of the engine")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--kernels", choices=["torch", "cpp"], default="torch")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--kv-mib", type=int, default=1024)
    parser.add_argument("--measure", choices=MEASUREMENTS, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(MEASUREMENTS[given.measure](given)))
        return
    if sys.platform != "linux":
        skip("resident memory is read from Linux' /proc")
    if given.scratch is None:
        from benchmarks.random_llama import SCRATCH

        given.scratch = SCRATCH
    report("large", measure(given), as_json=given.json)


if __name__ == "__main__":
    main()
