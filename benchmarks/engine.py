"""Measures the engine on a CPU: against itself, against transformers and PEFT, and beside what disturbs it.

All engines have the same random Llama (30 million parameters by default), and adapters on all its linears. Both sides
of a comparison alternate. Names end in the number of requests that begin together, and in _torch for torch's kernels;
without a compiler only those are measured. The modules in `benchmarks/engine_cases` say what each case is. It does not
use a GPU.

    python -m benchmarks.engine [--cases gained kept host …] [--kernels fused torch] [--requests 8 32] [--threads N]
        [--pairs 5] [--json]
"""

import asyncio
from collections.abc import Awaitable, Callable

from benchmarks.engine_cases.against_transformers import hf_base, peft_distinct, ragged
from benchmarks.engine_cases.bench import SUFFIXES, Bench
from benchmarks.engine_cases.demo import demo
from benchmarks.engine_cases.disturbed import busy, prefill
from benchmarks.engine_cases.ours import dora, gained, host, kept
from benchmarks.engine_cases.program import gained_by_program
from benchmarks.engine_cases.setup import add_sizes, prepared, start_as_the_product_does
from benchmarks.engine_cases.without_forward import without_forward
from benchmarks.harness import arguments, report
from motet_runner.execute.forward.program import SWITCHED_ON
from motet_runner.settings import Settings

SLOWDOWN: float = Settings.model_fields["decode_slowdown"].default

CASES: dict[str, Callable[[Bench], Awaitable[None]]] = {
    "gained": gained,
    "kept": kept,
    "dora": dora,
    "host": host,
    "hf": hf_base,
    "peft": peft_distinct,
    "ragged": ragged,
    "prefill": prefill,
    "busy": busy,
    "demo": demo,
    "program": gained_by_program,
    "without_forward": without_forward,
}


async def measure(bench: Bench) -> None:
    for case in bench.given.cases:
        print(f"-- {case}", flush=True)
        await CASES[case](bench)


def main() -> None:
    start_as_the_product_does("benchmarks.engine")
    parser = arguments(__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--kernels", nargs="+", default=list(SUFFIXES), choices=list(SUFFIXES))
    add_sizes(parser)
    parser.add_argument("--ragged", type=int, default=32, help="requests of the case ragged")
    parser.add_argument("--lengths", type=int, nargs=2, default=(8, 512), help="of their prompts and answers")
    parser.add_argument("--arrivals", type=float, default=16, help="of them in a second")
    parser.add_argument("--static-batches", type=int, nargs="+", default=[8, 16, 32], help="sizes to try of theirs")
    parser.add_argument("--ragged-pairs", type=int, default=5, help="pairs to measure them in")
    parser.add_argument("--long-prompt", type=int, default=2000, help="tokens of the prompt of the case prefill")
    parser.add_argument("--slowdown", type=float, default=SLOWDOWN, help="the limit of the case prefill")
    parser.add_argument(
        "--without",
        nargs="+",
        default=[],
        choices=sorted(SWITCHED_ON),
        help="what the case program switches off; without it, all",
    )
    given = parser.parse_args()
    with prepared(given) as bench:
        asyncio.run(measure(bench))
    report("engine", bench.results, as_json=given.json)


if __name__ == "__main__":
    main()
