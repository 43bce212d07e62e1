"""Every family against transformers' own `generate()` in fp32, with and without adapters of mixed ranks.

Fed the reference's tokens, every logit is within 1e-4 of the reference's, and the greedy choice is the same, except
where the reference's two best are within 1e-4 of each other. Many sequences of ragged lengths run at once, with chunked
prompts and whole ones, with a prefix cache and without, on the kernels of torch and on the compiled ones.

`make compat` runs this file with the oldest and the newest transformers that the product accepts.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from motet.domain import BASE, PAGE_TOKENS, Digest, pages_for
from motet_runner.engine import Engine
from motet_runner.interface import EngineConfig, NewSequence
from testbed.compiled_kernels import CACHE, needs_a_compiler
from tests.runner.engines import ask, device_of, load
from tests.runner.families import BY_NAME, FAMILIES, MORE, Family, save_adapters, save_model
from tests.runner.random_models import VOCABULARY

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

LENGTHS = (75, 40, 1, 100, 17)
"""Of the prompts that each voice answers"""
SHARED = 32
"""Tokens with which all longer prompts begin"""
DECODED = 10
NEAR_TIE = 1e-4
NEAR_TIES_AT_MOST = 0.005
WHOLE, CHUNKED = 512, 16
"""Prompt tokens an iteration"""


@dataclass(frozen=True)
class Answer:
    """What transformers and PEFT say, alone."""

    name: str
    adapter: Digest
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logits: torch.Tensor
    """[tokens, vocabulary]"""


@dataclass(frozen=True)
class Proof:
    base: Path
    adapters: dict[Digest, Path]
    answers: list[Answer]


ALL = {family.name: family for family in (*FAMILIES, *MORE)}


@pytest.fixture(scope="module")
def proofs() -> dict[str, Proof]:
    """By family: each is made once, in whatever order tests run."""
    return {}


@pytest.fixture
def proof(request: pytest.FixtureRequest, proofs: dict[str, Proof], tmp_path_factory: pytest.TempPathFactory) -> Proof:
    if request.param not in proofs:
        proofs[request.param] = make_proof(ALL[request.param], tmp_path_factory.mktemp("family"))
    return proofs[request.param]


def make_proof(family: Family, folder: Path) -> Proof:
    base = save_model(family.config, folder / "base")
    saved = save_adapters(base, family, folder / "adapters")
    adapters = {Digest(f"sha256:{number}"): adapter for number, adapter in enumerate(saved)}
    answers = [answer for voice in (BASE, *adapters) for answer in reference(base, voice, adapters.get(voice))]
    assert len({answer.tokens for answer in answers}) > len(LENGTHS), "adapters change answers"
    return Proof(base, adapters, answers)


def reference(base: Path, voice: Digest, adapter: Path | None) -> Iterator[Answer]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from peft import PeftModel

        # "eager" knows soft caps in all versions; the default one leaves them out in some.
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
        if adapter is not None:
            model = PeftModel.from_pretrained(model, str(adapter))
        model.eval()
        model.generation_config.eos_token_id = None
        # Where the cache has keys of the shorter context, transformers before 5.23 goes on with them.
        outgrows = "longrope" in str(getattr(model.config, "rope_parameters", None))
        for length in LENGTHS:
            prompt = prompt_of(length)
            asked = torch.tensor([prompt])
            model(input_ids=asked[:, :1])  # a dynamic rope keeps the longest call's frequencies until a short one comes
            given = model.generate(
                input_ids=asked,
                attention_mask=torch.ones_like(asked),
                max_new_tokens=DECODED,
                do_sample=False,
                use_cache=not outgrows,
                output_logits=True,
                return_dict_in_generate=True,
            )
            tokens = tuple(given.sequences[0, length:].tolist())
            yield Answer(f"{voice}-{length}", voice, prompt, tokens, torch.cat(given.logits))


def prompt_of(length: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(3)
    shared = torch.randint(2, VOCABULARY, (SHARED,), generator=generator).tolist()
    generator = torch.Generator().manual_seed(length)
    own = torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()
    return tuple([*shared, *own][:length] if length > SHARED else own)


WAYS = (("torch", CHUNKED, True), ("cpp", WHOLE, True), ("torch", WHOLE, False), ("cpp", CHUNKED, False))
IN_CHUNKS = (
    "Gemma 2, soft caps and every other layer sliding", "Phi 3, longrope", "Llama, dynamic rope", "GPT-2", "OPT",
    "Mixtral, a mixture of experts",
)  # fmt: skip
"""With torch, too, one of each kind of attention, rope and linear. `test_models.py` has all, without adapters."""


IN_SHORT = {(family, *WAYS[0]) for family in IN_CHUNKS} | {(family, *WAYS[1]) for family in BY_NAME}


@pytest.mark.parametrize(
    ("proof", "kernels", "chunk", "prefix_cache"),
    [
        pytest.param(family, *way, marks=() if (family, *way) in IN_SHORT else pytest.mark.soak)
        for family in ALL
        for way in WAYS
    ],
    indirect=["proof"],
)
def test_tokens_and_logits_equal_generate(proof: Proof, kernels: str, chunk: int, prefix_cache: bool) -> None:
    if kernels == "cpp":
        needs_a_compiler()
    seen: dict[str, list[torch.Tensor]] = {}

    def keep(requests: list[str], logits: torch.Tensor) -> None:
        for request, row in zip(requests, logits, strict=True):
            seen.setdefault(request, []).append(row.clone().cpu())

    config = EngineConfig(
        model=proof.base,
        kernels=kernels,
        device=device_of(kernels).type,
        kernel_cache=CACHE,
        kv_cache_mib=4,
        prefill_chunk_tokens=chunk,
        prefix_cache=prefix_cache,
    )
    engine = Engine(config, on_logits=keep)
    for digest, folder in proof.adapters.items():
        load(engine, digest, folder)
    worst, near_ties, positions = 0.0, 0, 0
    left = [(answer, 0) for answer in proof.answers]
    while left:
        seen.clear()
        tokens = run_in_two_waves(engine, [asked(answer, start) for answer, start in left])
        again = []
        for answer, start in left:
            given, ours = tokens[answer.name], torch.stack(seen[answer.name])
            # After another of two that are as good, the rest is asked for again, after the reference's own tokens.
            parted = next((i for i, token in enumerate(given) if token != answer.tokens[start + i]), len(given) - 1)
            theirs = answer.logits[start : start + parted + 1]
            worst = max(worst, float((ours[: parted + 1] - theirs).abs().max()))
            best = theirs.topk(2, dim=-1).values
            gaps = best[:, 0] - best[:, 1]
            positions += len(gaps)
            near_ties += int((gaps < NEAR_TIE).sum())
            if given[parted] != answer.tokens[start + parted]:
                assert gaps[parted] < NEAR_TIE, f"{answer.name}: token {start + parted} is {given[parted]}"
            if start + parted + 1 < DECODED:
                again.append((answer, start + parted + 1))
        left = again
    print(f"largest |Δ logit| {worst:.1e}, near ties {near_ties} of {positions} positions")
    assert positions == len(proof.answers) * DECODED
    assert worst <= 1e-4
    assert near_ties / positions <= NEAR_TIES_AT_MOST
    # What a window leaves has other owners soon, and keys with frequencies of their prompt fit no other prompt.
    loaded = engine.diagnostics.loaded
    shares = loaded.window is None and (loaded.rope is None or not loaded.rope.grows)
    assert (engine.report().prefix_hit_tokens > 0) == (prefix_cache and shares)


def asked(answer: Answer, start: int) -> NewSequence:
    """Its tokens from `start` on"""
    return ask(
        answer.name,
        prompt=answer.prompt,
        delivered=answer.tokens[:start],
        adapter=answer.adapter,
        max_tokens=DECODED,
        promise=pages_for(len(answer.prompt) + DECODED, PAGE_TOKENS),
        tenant="one",
    )


def run_in_two_waves(engine: Engine, sequences: list[NewSequence]) -> dict[str, list[int]]:
    """Every other sequence arrives when the first one has begun to answer."""
    tokens: dict[str, list[int]] = {sequence.request: [] for sequence in sequences}
    first, second = sequences[::2], sequences[1::2]
    for sequence in first:
        engine.add(sequence)
    while engine.has_work() or second:
        for output in engine.step().sequences:
            assert output.error is None
            tokens[output.request] += output.tokens
        engine.check()
        if second and (tokens[first[0].request] or not engine.has_work()):
            for sequence in second:
                engine.add(sequence)
            second = []
    return tokens
