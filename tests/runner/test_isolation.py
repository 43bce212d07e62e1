"""What one sequence or adapter makes of its own numbers never reaches another's."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from motet.domain import Digest, ParkMethod, RequestId
from motet_runner.adapters.compatibility_check import check
from motet_runner.engine import Engine
from motet_runner.interface import Finish, State
from tests.runner.engines import EngineRun, ask, load, make_engine, run
from tests.runner.families import BY_NAME
from tests.runner.random_models import RandomAdapter, save_adapter, save_base

BAD = RequestId("bad")
NAN_TOKEN = 499
"""A token whose embedding is NaN, once `make_token_nan` has been called."""

GOOD, OVERFLOWING = Digest("good"), Digest("overflowing")


def make_token_nan(engine: Engine) -> None:
    def embed(_module: object, given: tuple[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        return out.masked_fill((given[0] == NAN_TOKEN).unsqueeze(-1), float("nan"))

    loaded = engine.diagnostics.loaded
    embedding = loaded.model.get_input_embeddings()
    if loaded.fused is not None and embedding.weight.numel():  # it reads the weights, not through the module
        embedding.weight[NAN_TOKEN] = float("nan")
    else:  # what is packed cannot be changed, but the module that reads it can
        loaded.fused = None
        embedding.register_forward_hook(embed)


def promise_of(engine: Engine) -> int:
    return engine.report().sequences[0].promise


def cancel(engine: Engine) -> None:
    engine.cancel(BAD)


def park_and_forget(engine: Engine) -> None:
    engine.park(BAD, 1, promise_of(engine), 4, ParkMethod.RECOMPUTE)


def swap_out_and_forget(engine: Engine) -> None:
    engine.park(BAD, 1, promise_of(engine), 4, ParkMethod.SWAP)


def swap_out_in_and_cancel(engine: Engine) -> None:
    wanted = promise_of(engine)
    engine.park(BAD, 1, wanted, wanted, ParkMethod.SWAP)
    run(engine)
    engine.resume(BAD, 1, wanted)
    engine.cancel(BAD)


def place_again(engine: Engine) -> None:
    engine.add(ask(BAD, epoch=2, prompt=(3, 4, 5)))


@pytest.mark.parametrize("end", [cancel, park_and_forget, swap_out_and_forget, swap_out_in_and_cancel, place_again])
def test_pages_left_during_a_prompt_do_not_affect_their_next_sequence(
    llama: Path, end: Callable[[Engine], None]
) -> None:
    """Nothing was sampled of it, so nobody has seen that its keys and values are not numbers."""
    prompts = {f"r{i}": ask("good", prompt=18 + i).prompt for i in range(4)}
    engine = make_engine(llama, prefill_chunk_tokens=24)
    expected = run(engine, *(ask(name, prompt=prompt) for name, prompt in prompts.items())).tokens
    assert all(NAN_TOKEN not in tokens for tokens in expected.values())
    make_token_nan(engine)
    engine.set_supervised(True)
    run(engine, ask(BAD, prompt=(NAN_TOKEN,) * 200), steps=4)
    assert [entry.state for entry in engine.report().sequences] == [State.PREFILL]
    end(engine)
    again = run(engine, *(ask(name, prompt=prompt) for name, prompt in prompts.items()))
    assert {name: again.tokens[name] for name in prompts} == expected


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Mixtral, a mixture of experts", {}),
        ("Mistral, sliding window", {}),
        ("Gemma 2, soft caps and every other layer sliding", {}),
        *(("Gemma", {"kernels": kernels}) for kernels in ("torch", "cpp", "exact")),
    ],
)
def test_free_pages_and_other_rows_do_not_change_an_answer(
    family: str, settings: dict[str, str], tmp_path: Path
) -> None:
    """Every free page holds NaN before every iteration, and a request computes NaN in the same iterations."""
    base = save_base(family, tmp_path / "base", config=BY_NAME[family].config)
    engine = make_engine(base, prefill_chunk_tokens=24, **settings)
    make_token_nan(engine)
    asked = [ask(f"r{i}", prompt=10 + 9 * i) for i in range(4)]
    expected = run(engine, *asked).tokens
    assert all(NAN_TOKEN not in tokens for tokens in expected.values())
    ran = run(engine, *asked, ask(BAD, prompt=(3, NAN_TOKEN, 4)), steps=0)
    while engine.has_work():
        with torch.inference_mode():
            engine.diagnostics.store.data[list(engine.diagnostics.planner.memory.pages.empty_pages)] = float("nan")
        ran.take(engine)
    assert ran.last[BAD].finish is Finish.FAILED
    assert {name: ran.tokens[name] for name in expected} == expected


@pytest.fixture(scope="module")
def overflowing(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every weight is a finite number, and their products are not."""
    folder = save_adapter(llama, "llama", RandomAdapter(8, 16), tmp_path_factory.mktemp("overflowing"), seed=1)
    weights = folder / "adapter_model.safetensors"
    save_file({name: tensor.sign() * 1e30 for name, tensor in load_file(weights).items()}, weights)
    return folder


def run_beside(engine: Engine, how: str) -> EngineRun:
    """Run good requests of the same rank and of the base: first with the bad adapter in the same iterations, then
    in pages that it has used."""
    prompts = [ask("q", prompt=17 + 6 * i).prompt for i in range(3)]
    good_requests = [
        ask(f"{who}{i}", prompt=p, adapter=Digest(who)) for who in ("", GOOD) for i, p in enumerate(prompts)
    ]
    ran = run(engine, *good_requests[:4], steps=2)
    if how != "alone":  # one fails at its first sample, one is cancelled before it, one is parked
        for index, tokens in enumerate((40, 100, 200)):
            engine.add(ask(f"overflowing{index}", prompt=(9,) * tokens, adapter=OVERFLOWING))
        ran.take(engine)
        ran.take(engine)
        assert ran.last["overflowing0"].finish is Finish.FAILED
        assert engine.cancel(RequestId("overflowing1"))
        ran.take(engine)
        (parking,) = (entry for entry in engine.report().sequences if entry.request == "overflowing2")
        assert parking.state is State.PREFILL
        assert engine.park(parking.request, 1, parking.promise, parking.promise, ParkMethod(how))
    run(engine, *good_requests[4:], ran=ran)
    for name in list(ran.tokens):
        if name.startswith("overflowing"):
            assert ran.tokens.pop(name) == []
    return ran


@pytest.mark.parametrize("how", ["swap", "recompute"])
def test_an_adapter_whose_products_overflow_affects_only_its_own_answers(
    llama: Path, adapters: list[Path], overflowing: Path, how: str
) -> None:
    """Should one ever pass the checks: neither shared products, nor padding, nor pages carry it to a neighbour."""
    engine = make_engine(llama, prefill_chunk_tokens=64)
    load(engine, GOOD, adapters[1])  # of the same rank
    engine.load_adapter(OVERFLOWING, check(overflowing, engine.info.target_modules, max_rank=64).layout)
    run(engine)
    engine.set_supervised(True)
    expected = run_beside(engine, "alone").tokens
    assert len(expected) == 6
    assert all(len(tokens) == 40 for tokens in expected.values())
    assert run_beside(engine, how).tokens == expected
