"""Profiles without a machine: from Splitwise's measurements, and from a law that somebody gives."""

import re
from pathlib import Path

from motet.domain import PAGE_TOKENS, pages_for
from motet.errors import SetupError
from motet_simulator.lines import csv_with
from motet_simulator.profiles.fit import fit
from motet_simulator.profiles.profile import EngineSize, Overheads, Profile, StepLaw, Work
from motet_simulator.profiles.step_traces import Iteration, Timed

LEAST_ROWS = 20

_COLUMNS = {
    "model", "hardware", "prompt_size", "batch_size", "token_size", "prompt_time", "token_time", "tensor_parallel",
}  # fmt: skip

_COST = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>us|ms|s)")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_COSTS = ("fixed", "decode", "context", "prefill", "attended", "adapters")


_USUAL_RANK = 16
_BYTES_OF_A_TOKEN = 1024
"""Only how many times as large an adapter is counts."""


def engine_size(
    *, kv_tokens: int, max_sequences: int, max_model_length: int, adapter_slots: int, adapter_tokens: int
) -> EngineSize:
    """`adapter_tokens`: an adapter of rank 16 takes as much memory as the KV of this number of tokens."""
    return EngineSize(
        pages=pages_for(kv_tokens, PAGE_TOKENS),
        page_bytes=PAGE_TOKENS * _BYTES_OF_A_TOKEN,
        max_sequences=max_sequences,
        max_model_length=max_model_length,
        adapter_slots=adapter_slots,
        adapter_rank_bytes=max(1, adapter_tokens * _BYTES_OF_A_TOKEN // _USUAL_RANK),
    )


def from_splitwise(file: Path, engine: EngineSize, *, model: str, hardware: str, parallel: int) -> Profile:
    """Of the table that Splitwise's simulator comes with: times of whole prompts and of tokens, by batch and prompt.
    Its own simulator leaves the context out of a token's time; here the law has it."""
    known: set[str] = set()
    iterations: list[Iteration] = []
    for row in csv_with(file, _COLUMNS):
        of_row = (row.text("model"), row.text("hardware"), row.tokens("tensor_parallel"))
        if len(known) < 100:
            known.add(f"{of_row[0]} on {of_row[2]} {of_row[1]}")
        if of_row != (model, hardware, parallel):
            continue
        prompt, batch, output = row.tokens("prompt_size"), row.tokens("batch_size"), row.tokens("token_size")
        prefill = Work(prefill=prompt * batch, attended=batch * prompt * (prompt + 1) // 2)
        decode = Work(decodes=batch, context=batch * (prompt + output // 2))
        iterations.append(Iteration(prefill, max(row.number("prompt_time") / 1000, 1e-6)))
        iterations.append(Iteration(decode, max(row.number("token_time") / 1000, 1e-6)))
    if len(iterations) < LEAST_ROWS:
        raise SetupError(
            f"{file} has too few rows of {model} on {parallel} {hardware}. It has {', '.join(sorted(known))}."
        )
    timed = Timed(machine=f"{parallel} {hardware}", model=model, kernels="Splitwise's", engine=engine)
    return fit(timed, iterations, least=LEAST_ROWS)


def from_law(text: str, engine: EngineSize, *, machine: str, model: str) -> Profile:
    """Such as `fixed=8ms,decode=0.2ms,context=0.1us,prefill=0.1ms`: the cost of an iteration, and of each decode, token
    of context, prompt token, attended token of a prompt token, and adapter. Raises SetupError."""
    costs: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (one.strip() for one in part.partition("="))
        found = _COST.fullmatch(value)
        if name not in _COSTS or name in costs or found is None:
            raise SetupError(
                f"{text!r}: write it as fixed=8ms,decode=0.2ms, each of {', '.join(_COSTS)} at most once, with us, ms "
                "or s."
            )
        costs[name] = float(found["number"]) * _UNITS[found["unit"]]
    if not costs.get("fixed"):
        raise SetupError(f"{text!r}: an iteration costs something, whatever it computes: give fixed=…, above 0.")
    decode = costs.pop("decode", 0.0)
    law = StepLaw(decodes=((1, decode),) if decode else (), **costs)
    return Profile(machine=machine, model=model, kernels="a law", engine=engine, law=law, overheads=Overheads())
