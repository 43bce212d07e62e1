"""Faults of the engine that drives vLLM, and whether its tests find them: `python -m tools.mutate.vllm [--json]`.

Others than the mutants of `make mutate`: each is a mistake that somebody could make there. The tests run with a double
of vLLM, and for `surface`, which the double replaces, with vLLM itself where it is built. vLLM has a process of its
own, which gets the folders of this one's packages: there it finds a copy of ours with the fault.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Result, arguments, report
from tools.mutate.__main__ import FOUND, PATIENCE, ROOT, START_SECONDS, Drawn, is_found, pytest
from tools.mutate.mutants import Mutant
from tools.peers.environment import complete, folder
from tools.peers.vllm import VLLM

LEAST = 0.9
PACKAGE = "motet_runner.external.vllm"
RUNNER = ROOT / "services/gpu-runner/motet_runner"
FOLDER = RUNNER / "external/vllm"
WITH_DOUBLE = ("tests/runner/external", "tests/contract/test_engines.py", "-k", "external or vllm")
WITH_VLLM = ("tests/runner/external/test_vllm.py", "-m", "soak")
SECONDS_WITH_DOUBLE, SECONDS_WITH_VLLM = 60.0, 300.0
NEEDS_VLLM = frozenset({"surface"})


@dataclass(frozen=True, slots=True)
class Fault:
    module: str
    before: str
    after: str
    what: str

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.module}.py"

    def applied(self) -> str:
        """The module's source with it. The text that it changes is there once."""
        source = self.path.read_text(encoding="utf-8")
        if source.count(self.before) != 1:
            raise ValueError(f"{self.module}.py has {self.before!r} {source.count(self.before)} times, and not once")
        return source.replace(self.before, self.after)

    def drawn(self) -> Drawn:
        line = self.path.read_text(encoding="utf-8").partition(self.before)[0].count("\n") + 1
        mutant = Mutant(line, self.what, self.before, self.after, self.applied(), at_import=True)
        with_vllm = self.module in NEEDS_VLLM
        tests = WITH_VLLM if with_vllm else WITH_DOUBLE
        seconds = SECONDS_WITH_VLLM if with_vllm else SECONDS_WITH_DOUBLE
        return Drawn(self.path, f"{PACKAGE}.{self.module}", mutant, tests, seconds)


def copied(fault: Fault, folder: Path) -> dict[str, str]:
    """The variables with which Python finds the fault in that folder, in this process's children and in theirs"""
    copy = folder / RUNNER.name
    shutil.copytree(RUNNER, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / fault.path.relative_to(RUNNER)).write_text(fault.applied(), encoding="utf-8")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH", "")])])}


def is_noticed(fault: Fault) -> bool:
    drawn = fault.drawn()
    if fault.module not in NEEDS_VLLM:
        return is_found(drawn)
    with tempfile.TemporaryDirectory() as folder:
        status = pytest(drawn.tests, copied(fault, Path(folder)), START_SECONDS + PATIENCE * drawn.seconds)
    if status not in FOUND | {0}:
        sys.exit(f"the tests of {drawn} end with status {status}")
    return status in FOUND


def _in(module: str, *faults: tuple[str, str, str]) -> list[Fault]:
    return [Fault(module, before, after, what) for before, after, what in faults]


FAULTS = [
    *_in(
        "worker",
        ("len(self.tokens) - self.join.prompt_tokens", "len(self.tokens) - len(self.join.tokens)", "it is prompt"),
        ("_Row(join, list(join.tokens))", "_Row(join, list(join.tokens)[: join.prompt_tokens])", "delivered is lost"),
        ("self._names += 1", "self._names = len(self._rows)", "a name is used again"),
        ("self._stop([self._rows.pop(number)])", "self._rows.pop(number)", "a row that has left runs on"),
        (
            "self._rows[join.row] = _Row(join, list(join.tokens))",
            "self._rows[join.row] = _Row(join, list(join.tokens), str(self._names))",
            "the state of a slot is kept",
        ),
        ("self.loads.forget(plan.gone)", "pass", "adapters stay"),
        ("row.tokens.append(one.token)", "pass", "a row comes again without its tokens"),
        ("if one.ended:", "if not one.ended:", "an end is not seen"),
        ('row.running, self._usual = "", None', 'row.running = ""', "an iteration is usual after an end"),
        ("None if plan.prefills or left_out else", "None if left_out else", "one with prompts is usual"),
        ("plan.only_decodes and plan.decodes.rows is self._usual", "plan.only_decodes", "each decode is usual"),
        (
            "self._stop(set(self._rows.values()) - set(running))",
            "pass",
            "what a plan leaves out runs on",
        ),
        ("for step in plan.rows if step.samples]", "for step in plan.rows]", "a part of a prompt is sampled"),
        ("if self._share_prefixes else", "if True else", "requests share KV that must not"),
        ("row.tokens[: step.start + step.count]", "row.tokens[step.start : step.start + step.count]", "a part alone"),
        ("row.tokens[: step.start + step.count]", "row.tokens", "each part is the whole prompt"),
        (' or f"{join.request} {join.choice}"', "", "those without a tenant share KV"),
        ("shared = join.prefix_salt.hex()", 'shared = "" ', "requests of a tenant share nothing"),
        ("self.loads.number_of(join.adapter), salt", "0, salt", "an adapter is forgotten"),
        ("self._driven.abort([row.running for row in running])", "pass", "a stopped row runs on"),
        ("if one.name not in wanted:", "if False:", "a request of nobody is not noticed"),
        ("self._driven.abort(early)", "pass", "a second token beside a cut prompt"),
        ("found[name] = found[name]._replace(ended=True)", "pass", "a row that was stopped early counts as running"),
        ("for place, one in enumerate(produced) if", "for place, one in enumerate(produced, 1) if", "others' logprobs"),
        ("self._seconds = self._clock() - began", "self._seconds = 0.0", "an iteration takes no time"),
        ("masked=join.mask is not None", "masked=False", "a mask is forgotten"),
        ("penalties=penalties, output", "output", "penalties are forgotten"),
        ("seed=None if join.seed_is_drawn else seed_of(", "seed=seed_of(", "a drawn seed slows vLLM's sampler"),
    ),
    *_in(
        "options",
        ('"max_tokens": sampling.max_tokens - output_tokens', '"max_tokens": sampling.max_tokens', "too long"),
        ("max(0, sampling.min_tokens - output_tokens)", "sampling.min_tokens", "no end where one may be"),
        ("sampling.stop_token_ids if sampling.ignore_eos else ", "", "ends that are ignored end"),
        ('"ignore_eos": True', '"ignore_eos": False', "vLLM knows an end of its own"),
        ('{choice} {output_tokens}"', '{choice}"', "the noise of the beginning comes again"),
        ('{seed} {choice} {output_tokens}"', '{seed} {output_tokens}"', "two choices are alike"),
        (" if token < vocabulary)", ")", "a stop that vLLM refuses"),
        ('"repetition_penalty": sampling.repetition_penalty', '"repetition_penalty": 1.0', "no penalty"),
        ('"temperature": sampling.temperature', '"temperature": 0.0', "no temperature"),
        ("if sampling.logprobs:", "if sampling.top_logprobs:", "no logprob of the token alone"),
    ),
    *_in(
        "adapter_loads",
        ("self._last_number += 1", "self._last_number = len(self._numbers) + 1", "an id is used again"),
        ("self.driven.remove_adapter(number)", "pass", "vLLM keeps an adapter that is gone"),
        ("if writing.error is not None:", "if False:", "a folder that was not written is read"),
        ("        with writing.folder:", "        if True:", "folders stay"),
        ("OSError | SafetensorError)", "Exception)", "a wrong adapter may come again"),
        ("self._loading.pop(number).give_up()", "self._loading[number].give_up()", "a given-up load arrives"),
    ),
    *_in(
        "plain_adapter",
        (".float() * linear.scale", ".float()", "alpha is not folded"),
        ('"lora_alpha": rank', '"lora_alpha": 1', "alpha is not the rank"),
        ("padded = torch.zeros(", "padded = torch.ones(", "padding computes"),
    ),
    *_in(
        "engine",
        ("            pages=facts.blocks,\n            page_tokens=facts.block_tokens,\n            preset",
         "            pages=facts.blocks + 1,\n            page_tokens=facts.block_tokens,\n            preset",
         "one page too many"),
        ("            page_tokens=facts.block_tokens,\n            preset",
         "            page_tokens=2 * facts.block_tokens,\n            preset", "pages are larger than blocks"),
        ("super().add(sequence)",
         "from dataclasses import replace; super().add(replace(sequence, promise=1))", "a promise is forgotten"),
        ("        check_served(sequence)\n", "", "what is not computed is served"),
        ("lambda _: adapter_pages", "lambda _: 0", "adapters take no pages of the plan"),
        ("max_adapters=config.max_resident_adapters", "max_adapters=config.max_resident_adapters + 1", "one slot more"),
    ),
    *_in(
        "row_changes",
        ("self._free.append(row.number)", "pass", "rows are never free again"),
        ("self._owner = self._owner % MAX_OWNER + 1", "self._owner = 1", "a row that ended counts as the next one's"),
        ("= 0, 0, NOBODY", "= 0, 0, self._owner", "an end is not seen"),
        ("        bits[len(given) :] = 0\n", "", "bits of the mask before stay"),
        ("known[1] += 1", "known[1] = 1", "a token that came twice counts once"),
        ("row.presence + times * row.frequency", "times * (row.presence + row.frequency)", "presence is frequency"),
        ("ask.tokens[len(ask.tokens) - ask.output_tokens :]", "ask.tokens", "the prompt is penalised"),
        ("elif row is not None and (row.presence or row.frequency):", "elif False:", "new tokens are not penalised"),
        ("memory.bits[number].copy() if masked else None", "memory.bits[number].copy()", "each row has a mask"),
        ("memory.bits[number].copy() if", "memory.bits[number] if", "a mask changes after it was read"),
    ),
    *_in(
        "changed_logits",
        ("found / repetition, found * repetition) - amounts", "found, found) - amounts", "before the division"),
        ('bitorder="little"', 'bitorder="big"', "the bits are turned"),
        ("reduced * repetition, reduced / repetition)", "reduced, reduced)", "the division is not undone"),
    ),
    *_in(
        "trial",
        ("if [*half, *rest] != whole and", "if False and", "answers may go on otherwise"),
        ("!= (allowed, delivered):", "== (0, 0):", "masks and penalties may be ignored"),
        ("if not all(drawn):", "if not any(drawn):", "masks of new requests alone are enough"),
        ("self._logprobs(number)) > LEAST_EFFECT:", "self._logprobs(number)) >= 0:", "kinds without an effect count"),
        ("_logprobs_of(found[base])) > self._near:", "_logprobs_of(found[base])) < 0:", "an adapter may leak"),
        ("min(MAX_RANK, max_rank)", "MAX_RANK", "its rank is higher than the engine's"),
        ("count(FIRST_NUMBER)", "count(1)", "its numbers come again"),
        ("isinstance(error, AnswersLost | ", "isinstance(error, ", "lost answers are a refusal"),
        (" or lacks_memory(error)\n", "\n", "without memory a kind is not adapted"),
        ("if found != counted:", "if found > 2 * counted:", "blocks may be others than the plan's pages"),
        ("for further in range(2):", "for further in range(1):", "blocks are counted once"),
    ),
    *_in(
        "worker_adapters",
        ("            self.remove(request.lora_int_id)", "            pass", "a refused adapter keeps its slot"),
        ("isinstance(error, OSError | SafetensorError)", "False", "an error of a file condemns the adapter"),
        ("next((one for one in answers if one is not None), None)", "answers[0]", "only the first worker is heard"),
    ),
    *_in(
        "surface",
        ("config.max_resident_adapters + on_cpu", "config.max_resident_adapters", "the base gets an adapter on a CPU"),
        ("lora_request=adapter)", "lora_request=None)", "vLLM is told of no adapter"),
        ("self._engine.abort_request(names)", "pass", "vLLM is told of no abort"),
        ("blocks=(cache.num_gpu_blocks or 1) - 1", "blocks=cache.num_gpu_blocks or 1", "vLLM's own block is a page"),
    ),
]  # fmt: skip


def runnable() -> list[Fault]:
    """Those whose tests can run here"""
    built = complete(VLLM, folder(VLLM, os.environ))
    return [one for one in FAULTS if built or one.module not in NEEDS_VLLM]


def measure(faults: Sequence[Fault], jobs: int) -> list[Result]:
    for tests in {tuple(one.drawn().tests) for one in faults}:
        if pytest(tests, {}) != 0:
            sys.exit(f"the tests {' '.join(tests)} fail without any fault")
    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(is_noticed, faults))
    for fault, was_found in zip(faults, found, strict=True):
        if not was_found:
            print(f"  survives: {fault.module}: {fault.what}", flush=True)
    share = sum(found) / len(found)
    print(f"{sum(found)} of {len(found)} found", flush=True)
    return [Result("external_mutants", share, "", f">= {LEAST:g}", share >= LEAST, counted=True)]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--modules", nargs="+", default=sorted({one.module for one in FAULTS}), help="only of these")
    parser.add_argument("--jobs", type=int, default=1, help="faults that are tried together")
    given = parser.parse_args()
    report(
        "external_mutants",
        measure([one for one in runnable() if one.module in given.modules], given.jobs),
        as_json=given.json,
    )


if __name__ == "__main__":
    main()
