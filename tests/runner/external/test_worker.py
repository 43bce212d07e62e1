"""What vLLM is asked for each plan. `tests/contract/test_engines.py` says what an engine must do as a whole."""

import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import SafetensorError

from motet.domain import Digest, ParkMethod, RequestId
from motet.errors import AdapterError, AdapterIncompatible, ModelFolderError, Overloaded
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.external.vllm.engine import Engine
from motet_runner.external.vllm.worker import LostStep
from motet_runner.interface import AdapterFailed, AdapterLoaded, EngineConfig, StateChanged
from tests.runner.engines import ask, run
from tests.runner.external.fake_driven import EOS, FakeDriven, facts

A, B = Digest("A"), Digest("B")


def engine_with(driven: FakeDriven, **config) -> Engine:
    modules = {"model.layers.0.mlp.up_proj": (16, 32)}
    usual = {"model": Path(), "max_concurrent_sequences": 8, "max_resident_adapters": 2}
    return Engine(
        EngineConfig(**(usual | config)), driven, target_modules=modules, eos_token_ids=(EOS,), clock=time.perf_counter
    )


def whole(name: str, **kw) -> list[int]:
    return run(engine_with(FakeDriven()), ask(name, **kw)).tokens[name]


def test_a_usual_iteration_asks_vllm_for_nothing_new() -> None:
    driven = FakeDriven()
    ran = run(engine_with(driven), *(ask(name, max_tokens=30) for name in "abc"))
    assert {name: len(tokens) for name, tokens in ran.tokens.items()} == dict.fromkeys("abc", 30)
    assert (len(driven.asked), driven.steps, driven.aborted) == (3, 30, [])


@pytest.mark.parametrize("block_tokens", [16, 32, 128])
@pytest.mark.parametrize("preset", ["paged-chunk", "punica", "s3"])
def test_vllm_never_lacks_a_block(block_tokens: int, preset: str) -> None:
    """The double fails where vLLM would preempt a request."""
    driven = FakeDriven(facts(blocks=96, block_tokens=block_tokens))
    engine = engine_with(driven, max_concurrent_sequences=4, preset=preset)
    engine.set_overcommit(1.5)
    sizes = {f"r{n}": 5 + 29 * n % 83 for n in range(12)}
    parts = [ask(name, prompt=prompt, max_tokens=60, promise=max(1, prompt // 32)) for name, prompt in sizes.items()]
    ran = run(engine, *parts)
    assert {name: len(tokens) for name, tokens in ran.tokens.items()} == dict.fromkeys(sizes, 60)
    assert driven.most_blocks > 0
    assert not driven.running


def test_each_block_is_a_page() -> None:
    info = engine_with(FakeDriven(facts(blocks=10, block_tokens=128))).info
    assert (info.pages, info.page_tokens, info.page_bytes) == (10, 128, 128 * 256)
    with pytest.raises(ModelFolderError, match=r"holds no block of 32 tokens\. Raise engine\.kvCacheMiB"):
        engine_with(FakeDriven(facts(blocks=0, block_tokens=32)))


def test_a_model_whose_blocks_are_not_counted_is_refused() -> None:
    with pytest.raises(ModelFolderError, match="FakeForCausalLM has layers of 2 kinds"):
        engine_with(FakeDriven(facts(groups=2)))


def test_a_prompt_comes_in_pieces_and_the_others_go_on_beside_them() -> None:
    driven = FakeDriven()
    engine = engine_with(driven, prefill_chunk_tokens=32)
    ran = run(engine, ask("a"), steps=2)
    run(engine, ask("long", prompt=100), ran=ran, steps=3)
    assert len(ran.tokens["a"]) == 5
    pieces = [one for one in driven.asked if one.options["max_tokens"] == 1]
    assert [len(one.tokens) for one in pieces] == [32, 64, 96]
    assert len({one.salt for one in pieces}) == 1, "each finds what the earlier ones have computed"
    run(engine, ran=ran)
    assert ran.tokens["long"] == whole("long", prompt=100)


def test_without_shared_prefixes_a_prompt_is_computed_at_once() -> None:
    driven = FakeDriven(facts(shares_prefixes=False))
    ran = run(engine_with(driven, prefill_chunk_tokens=32), ask("long", prompt=100))
    assert [len(one.tokens) for one in driven.asked] == [100]
    assert ran.tokens["long"] == whole("long", prompt=100)


def test_a_prompt_that_vllm_cuts_gives_no_other_row_a_second_token() -> None:
    driven = FakeDriven(budget=40)
    engine = engine_with(driven)
    ran = run(engine, ask("a"), steps=3)
    run(engine, ask("long", prompt=100), ran=ran)
    assert ran.tokens == {name: whole(name, prompt=prompt) for name, prompt in (("a", 20), ("long", 100))}


def test_a_parked_row_comes_again_with_all_its_tokens() -> None:
    driven = FakeDriven()
    engine = engine_with(driven)
    engine.set_supervised(True)
    ran = run(engine, ask("a", min_tokens=20, temperature=1.0), steps=10)
    promise = engine.report().sequences[0].promise
    assert engine.park(RequestId("a"), 1, promise, promise, ParkMethod.SWAP)
    run(engine, ran=ran)
    assert engine.resume(RequestId("a"), 1, promise)
    run(engine, ran=ran)
    first, second = driven.asked
    assert list(second.tokens) == [*first.tokens, *ran.tokens["a"][:10]]
    assert (second.options["max_tokens"], second.options["min_tokens"]) == (30, 10)
    assert first.options["seed"] != second.options["seed"]


def test_a_suspect_is_alone_in_vllm() -> None:
    driven = FakeDriven()
    engine = engine_with(driven)
    ran = run(engine, ask("plain"), steps=1)
    engine.add(replace(ask("suspect"), engines_lost=1))
    alone = False
    while engine.has_work():
        output = engine.step()
        if alone:
            assert {one.request for one in output.sequences} == {"suspect"}
        alone = any(isinstance(event, StateChanged) and event.alone for event in output.events)
        for one in output.sequences:
            ran.tokens[one.request] = ran.tokens.get(one.request, []) + one.tokens
    assert ran.tokens == {name: whole(name) for name in ("plain", "suspect")}
    assert driven.aborted, "the others are not in its iteration"


def test_tenants_share_no_kv() -> None:
    driven = FakeDriven()
    prompt = tuple(range(2, 40))
    requests = [ask(f"r{n}", prompt=prompt, tenant=tenant) for n, tenant in enumerate(["x", "x", "y", None, None])]
    run(engine_with(driven), *requests)
    salts = Counter(one.salt for one in driven.asked)
    assert sorted(salts.values()) == [1, 1, 1, 2], "one of each tenant, and one of each request without"
    assert all(salts)


def test_an_adapter_gets_a_new_number_each_time_it_is_loaded(layout: AdapterLayout) -> None:
    folders: list[Path] = []
    driven = FakeDriven(
        takes=lambda folder: folders.append(folder.joinpath("adapter_config.json").resolve(strict=True))
    )
    engine = engine_with(driven, max_resident_adapters=1)
    for _ in range(2):
        for digest in (A, B):
            engine.load_adapter(digest, layout)
            ran = run(engine, ask("a", adapter=digest))
            assert [event.digest for event in ran.of(AdapterLoaded)] == [digest]
            assert len(driven.adapters) == 1
    assert [one.adapter for one in driven.asked] == [1, 2, 3, 4]
    assert not [folder for folder in folders if folder.exists()], "vLLM has read them"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("rank 9\nis wrong"),
        AdapterIncompatible("wrong"),
        AssertionError(),
        KeyError("lora_A"),
        Exception("an error of vLLM's own kind"),
    ],
)
def test_an_adapter_that_vllm_does_not_take_fails_alone(layout: AdapterLayout, error: Exception) -> None:
    def takes(_: Path) -> None:
        raise error

    engine = engine_with(FakeDriven(takes=takes))
    engine.load_adapter(A, layout)
    ran = run(engine, ask("a", adapter=A), ask("base"))
    (failed,) = ran.of(AdapterFailed)
    assert isinstance(failed.error, AdapterError)
    assert "\n" not in failed.error.message
    assert ran.last["a"].error is not None
    assert len(ran.tokens["base"]) == 40


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error")])
def test_an_adapter_whose_files_fail_may_come_again(layout: AdapterLayout, error: Exception) -> None:
    def takes(_: Path) -> None:
        raise error

    engine = engine_with(FakeDriven(takes=takes))
    engine.load_adapter(A, layout)
    ran = run(engine, ask("a", adapter=A), ask("base"))
    (failed,) = ran.of(AdapterFailed)
    assert isinstance(failed.error, Overloaded)
    assert len(ran.tokens["base"]) == 40


def test_without_room_for_a_folder_an_adapter_fails_alone(
    layout: AdapterLayout, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "not there"))
    engine = engine_with(FakeDriven())
    engine.load_adapter(A, layout)
    ran = run(engine, ask("a", adapter=A), ask("base"))
    (failed,) = ran.of(AdapterFailed)
    assert isinstance(failed.error, Overloaded)
    assert len(ran.tokens["base"]) == 40


def test_a_row_that_no_plan_has_ends_the_engine() -> None:
    """Its tokens would be lost, and whose they are is not known."""
    driven = FakeDriven()
    engine = engine_with(driven)
    run(engine, ask("a"), steps=2)
    (one,) = driven.asked
    driven.add(one._replace(name="of nobody"))
    with pytest.raises(LostStep):
        engine.step()
