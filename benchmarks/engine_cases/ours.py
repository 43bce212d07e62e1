"""The engine against itself: compiled kernels against torch's, with adapters against without, and what the host takes.

`keep_*` is what the engine keeps of its speed when rows have adapters on all linears: the same one (identical), few of
many (skewed), each another one (distinct). The share of the host is the time of a step that is not the model's:
planning, sampling, and the description of the batch.

`dora_vs_lora_*` has distinct adapters on all linears: LoRA against the same with DoRA.
"""

from benchmarks.engine_cases.bench import SUFFIXES, Bench, least_of
from benchmarks.engine_cases.setup import dora_adapters
from benchmarks.engine_run import KINDS, owners, seconds_of
from benchmarks.harness import Result, alternate, percentile
from benchmarks.host_parts import parts_of
from motet.domain import Digest

GAINED = {"modules": (2.5, 2.0), "torch": None}
"""The least that the compiled kernels must gain over the modules of transformers, and over torch's kernels"""

KEPT = {
    "fused": {"identical": (0.88, 0.90), "skewed": (0.80, 0.80), "distinct": (0.75, 0.80)},
    "torch": {"identical": (0.65, 0.65), "skewed": (0.55, 0.55), "distinct": (0.55, 0.55)},
}
"""The least that is kept of the base's speed. With few requests, the bytes of distinct adapters alone cost a fifth."""

DORA_VS_LORA = 0.93
"""The least with DoRA of the speed with LoRA: its adapters have 6 % more bytes to read"""

HOST_SHARE, OF_REQUESTS = 0.05, 32
"""The largest part of a step that the host may take, and the number of requests in that step"""


async def gained(bench: Bench) -> None:
    if "fused" not in bench.kernels:
        return
    given, fused = bench.given, bench.run("fused")
    for requests in given.requests:
        for name, leasts in GAINED.items():
            theirs, ours = seconds_of(bench.run(name), requests), seconds_of(fused, requests)
            await theirs()
            await ours()
            pairs = await alternate(theirs, ours, pairs=given.pairs)
            least = None if leasts is None else least_of(leasts, requests)
            bench.add_pairs(f"{name}_to_fused_{requests}", pairs, name, least)
            tokens = requests * given.output
            bench.add(f"{name}_tokens_{requests}", tokens / percentile(pairs.a, 0.5), "tok/s")
        bench.add(f"fused_tokens_{requests}", tokens / percentile(pairs.b, 0.5), "tok/s")


async def kept(bench: Bench) -> None:
    given = bench.given
    for kernels in bench.kernels:
        run = bench.run(kernels)
        for requests in given.requests:
            base = seconds_of(run, requests)
            await base()
            for name in KINDS:
                adapted = seconds_of(run, requests, owners(name, requests, bench.adapters))
                await adapted()
                pairs = await alternate(base, adapted, pairs=given.pairs)
                least = least_of(KEPT[kernels][name], requests)
                bench.add_pairs(f"keep_{name}_{requests}{SUFFIXES[kernels]}", pairs, "our base", least)


async def dora(bench: Bench) -> None:
    given = bench.given
    folders = dora_adapters(bench, bench.folders[0].parent)
    scaling = {Digest(f"sha256:dora-{number}"): folder for number, folder in enumerate(folders)}
    for kernels in bench.kernels:
        run = bench.new_run(kernels, max_resident_adapters=2 * given.adapters)
        for digest, folder in scaling.items():
            run.know(digest, folder)
        for requests in given.requests:
            lora, with_dora = (
                seconds_of(run, requests, owners("distinct", requests, known)) for known in (bench.adapters, [*scaling])
            )
            await lora()
            await with_dora()
            pairs = await alternate(lora, with_dora, pairs=given.pairs)
            least = DORA_VS_LORA if kernels == "fused" else None
            bench.add_pairs(f"dora_vs_lora_{requests}{SUFFIXES[kernels]}", pairs, "LoRA", least)


async def host(bench: Bench) -> None:
    """With the percentiles of steps in which all requests decode, and greedy sampling. Also prints what the parts of
    such a step take on the host."""
    for kernels in bench.kernels:
        run = bench.run(kernels)
        for requests in bench.given.requests:
            run.seconds(requests)
            if kernels == "fused":
                with run.watched():
                    run.seconds(requests)
                of_model = run.of_model[-len(run.of_decodes) :]
                shares = [1 - model / step for model, step in zip(of_model, run.of_decodes, strict=True)]
                share = percentile(shares, 0.5)
                name = f"host_share_{requests}_cpp"
                if requests == OF_REQUESTS:
                    bench.results.append(Result(name, share, "", f"<= {HOST_SHARE:g}", share <= HOST_SHARE))
                else:
                    bench.add(name, share, "")
                with parts_of(run.engine) as iterations:
                    run.seconds(requests)
                decoding = iterations[-len(run.of_decodes) :]
                medians = {part: percentile([one.get(part, 0.0) for one in decoding], 0.5) for part in decoding[-1]}
                shown = ", ".join(f"{part} {seconds * 1e6:.0f} us" for part, seconds in medians.items())
                print(f"{requests} requests, parts of a step: {shown}", flush=True)
                run.seconds(requests)
            for share in (0.5, 0.9, 0.99):
                of_steps = percentile(run.of_decodes, share) * 1e3
                bench.add(f"step_p{share * 100:g}_ms_{requests}{SUFFIXES[kernels]}", of_steps, "ms")
