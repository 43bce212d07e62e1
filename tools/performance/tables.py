"""The tables of the page: which results stand in which row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tools.performance.results import Measured


@dataclass(frozen=True, slots=True)
class Table:
    first: str
    """The heading of the first column"""
    columns: Sequence[str]
    rows: Mapping[str, Sequence[str]]
    """What a row is about, and the results in it: one for each column; empty: none."""


def _both(*names: str) -> list[str]:
    return [f"{name}_{requests}" for name in names for requests in (8, 32)]


TABLES = {
    "vllm": Table(
        "library against the same of vLLM",
        ("n = 8", "n = 32"),
        {
            "base": _both("vllm_base"),
            "one adapter for all (identical)": _both("vllm_identical"),
            "few of 16 adapters (skewed)": _both("vllm_skewed"),
            "an adapter for each (distinct)": _both("vllm_distinct"),
            "distinct, against vLLM's base": _both("vllm_distinct_vs_base"),
            "Gemma, whose forward pass is recorded, distinct": _both("generic_distinct"),
            "1.1 billion parameters, prompts and answers of 16: base": _both("vllm_base_1b"),
            "1.1 billion parameters, prompts and answers of 16: distinct": _both("vllm_distinct_1b"),
        },
    ),
    "product": Table(
        "Motet, all of its processes, against",
        ("n = 8", "n = 32"),
        {
            "vLLM's server without LoRA, base": _both("vllm_http_base"),
            "vLLM's server with LoRA, an adapter for each (distinct)": _both("vllm_http_distinct"),
            "its engine alone, as a library, base": _both("served_share"),
            "its engine alone, as a library, distinct": _both("served_share_distinct"),
        },
    ),
    "long": Table(
        "library against the same of vLLM, n = 8",
        ("base", "distinct"),
        {
            "512 tokens in, 16 out": ["vllm_prefill_base", "vllm_prefill_distinct"],
            "2,048 tokens in, 64 out": ["vllm_long_base", "vllm_long_distinct"],
        },
    ),
    "torch": Table(
        "library with kernels `torch` against the same of vLLM",
        ("n = 8", "n = 32"),
        {
            "base": ["vllm_base_8_torch", "vllm_base_32_torch"],
            "identical": ["vllm_identical_8_torch", "vllm_identical_32_torch"],
            "skewed": ["vllm_skewed_8_torch", "vllm_skewed_32_torch"],
            "distinct": ["vllm_distinct_8_torch", "vllm_distinct_32_torch"],
        },
    ),
    "torch_forward": Table(
        "model's modules with packed linears, against torch's forward pass of few operators",
        ("n = 8", "n = 32"),
        {
            "base": _both("torch_without_forward_base"),
            "distinct": _both("torch_without_forward_distinct"),
        },
    ),
    "others": Table(
        "library against",
        ("n = 8", "n = 32"),
        {
            "HF generate, base": _both("hf_base"),
            "PEFT's mixed batch, distinct": _both("peft_distinct"),
        },
    ),
    "keep": Table(
        "of the base's speed the library keeps with",
        ("n = 8", "n = 32"),
        {
            "one adapter for all (identical)": _both("keep_identical"),
            "few of 16 adapters (skewed)": _both("keep_skewed"),
            "an adapter for each (distinct)": _both("keep_distinct"),
        },
    ),
    "llama_cpp": Table(
        "library against llama.cpp, 1.1 billion parameters, base, prompts and answers of 16",
        ("n = 1", "n = 8", "n = 32"),
        {
            "both bfloat16": [f"llama_cpp_bf16_{requests}" for requests in (1, 8, 32)],
            "bfloat16 against its 8 bits (Q8_0)": [f"llama_cpp_q8_0_{requests}" for requests in (1, 8, 32)],
        },
    ),
    "beside": Table(
        "16 sequences decode, and a prompt of 2,000 tokens arrives",
        ("ratio",),
        {
            "Motet's limit: p99 of the gaps between their tokens, against p50": ["gap_beside_prefill"],
            "the longest gap: library without a limit, against Motet's": ["longest_gap_gained"],
            "the first token of that prompt: library without a limit, against Motet's": ["first_token_kept"],
        },
    ),
    "uneven": Table(
        "what is uneven, library",
        ("ratio",),
        {
            "prompts and answers of 8 to 512 tokens that arrive at random, against `generate`'s best static batches": [
                "ragged_vs_hf"
            ],
            "the same, against our own batches that nobody joins": ["ragged_vs_request_level"],
            "tokens a second beside a process that wants a core for itself, against a quiet machine": [
                "busy_throughput"
            ],
            "p99 of an iteration beside it, against p50 on a quiet machine": ["busy_p99"],
            "iterations of the bundled model with 16 streams, against torch's kernels and the model's modules": [
                "demo_steps"
            ],
        },
    ),
    "counted": Table(
        "counted without a card",
        ("figure",),
        {
            "launches of LoRA in a layer, all seven linears": ["lora_launches_per_layer"],
            "bytes that `add_lora` moves against the least that any could, the worst of all cases": ["bytes_vs_floor"],
        },
    ),
    "op": Table(
        "`add_lora` against",
        ("8 rows", "32 rows"),
        {
            "a loop, distinct": _both("op_distinct_vs_loop"),
            "gather and bmm, distinct": _both("op_distinct_vs_gather"),
            "a loop, Zipf": _both("op_zipf_vs_loop"),
            "a loop, uniform": _both("op_uniform_vs_loop"),
            "a loop, identical": ["", "op_identical_vs_loop_32"],
            "a plain read of the same bytes": _both("op_bandwidth_share"),
        },
    ),
}


def table_of(table: Table, measured: Mapping[str, Measured]) -> str:
    heads = [table.first, *table.columns]
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for what, names in table.rows.items():
        cells = [_cell(measured.get(name)) if name else "" for name in names]
        lines.append(f"| {' | '.join([what, *cells])} |")
    shown = [measured[name] for names in table.rows.values() for name in names if name in measured]
    return "\n".join([*lines, "", _how_measured(shown)])


def missed_table(measured: Mapping[str, Measured]) -> str:
    """Of all figures of the page"""
    lines = ["| what misses its target | figure | target |", "| --- | --- | --- |"]
    for table in TABLES.values():
        for what, names in table.rows.items():
            for column, found in zip(table.columns, map(measured.get, names), strict=True):
                if found is not None and found.holds is False:
                    lines.append(f"| {table.first}: {what}, {column} | {_figure(found)} | {found.target} |")
    return "\n".join(lines)


def _cell(found: Measured | None) -> str:
    """With the spread of its pairs in brackets"""
    if found is None:
        return "not measured"
    missed = "" if found.holds is not False else f" (missed: {found.target})"
    spread = f" [{found.spread[0]:.3g} to {found.spread[1]:.3g}]" if found.spread else ""
    return f"{_figure(found)}{spread}{missed}"


def _figure(found: Measured) -> str:
    unit = " ×" if found.unit in ("x", "") else f" {found.unit}"
    best = f" to {found.values[-1]:.3g}" if len(found.processors) > 1 else ""
    value = f"{found.value:.3g}"
    if found.holds is False and float(value) == found.bound:
        value = f"{found.value:.4g}"  # what misses by little must not look as if it held
    return f"{value}{best}{unit}"


def _how_measured(shown: Sequence[Measured]) -> str:
    """Nothing stands under a table that waits for its first figure."""
    if not shown:
        return ""
    pairs = sorted({one.pairs for one in shown if one.pairs})
    ends = f"{' to '.join(map(str, sorted({pairs[0], pairs[-1]})))} pairs a figure" if pairs else "counted"
    processors = ", ".join(sorted({name for one in shown for name in one.processors}))
    commits = ", ".join(sorted({name for one in shown for name in one.commits})) or "commits unknown"
    return f"{ends}; {processors}; {commits}."
