"""A sequence whose rope depends on lengths gets the answer that it gets alone, whatever happens to it and beside it.

`test_families.py` compares these answers with transformers.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from motet.domain import ParkMethod, RequestId
from motet_runner.execute.forward.wide_modules import wide
from motet_runner.execute.load import load_model as execute
from motet_runner.interface import ParkedNow
from motet_runner.plan import LengthRope
from tests.runner.engines import ask, kernels_named, make_engine, run
from tests.runner.families import BY_NAME, TRAINED, save_model
from tests.runner.trials import pack
from tests.support.device import DEVICE

NAMES = ["Phi 3, longrope", "Llama, dynamic rope"]
PROMPT = tuple(range(3, 43))
SHORT = ask("short", prompt=20, max_tokens=20, tenant="one")
BECOMES_LONG = ask("becomes long", prompt=PROMPT, max_tokens=30, tenant="one")
LONG = ask("long", prompt=PROMPT + tuple(range(100, 150)), max_tokens=20, tenant="one")
STEPS = (1, 3, 6, 7, 8, 9, 10, 11, 15)
"""Before and after which iterations a sequence is parked that becomes long with its ninth token"""


@pytest.fixture(scope="module", params=NAMES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(BY_NAME[request.param].config, tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def alone(base: Path) -> dict[str, list[int]]:
    return {one.request: run(make_engine(base), one).tokens[one.request] for one in (SHORT, BECOMES_LONG, LONG)}


@pytest.mark.parametrize("plan_ahead", [0, 1])
def test_neighbours_and_cached_pages_change_nothing(base: Path, alone: dict[str, list[int]], plan_ahead: int) -> None:
    engine = make_engine(base, plan_ahead=plan_ahead, prefill_chunk_tokens=24)
    for first, *others in ((SHORT, BECOMES_LONG, LONG), (LONG, BECOMES_LONG, SHORT), (BECOMES_LONG, LONG, SHORT)):
        ran = run(engine, first, steps=7)
        assert run(engine, *others, ran=ran).tokens == alone
    assert engine.report().pages_free == engine.info.pages


@pytest.mark.parametrize(
    ("method", "plan_ahead"),
    [
        (ParkMethod.SWAP, 1),
        (ParkMethod.RECOMPUTE, 0),
        pytest.param(ParkMethod.SWAP, 0, marks=pytest.mark.soak),
        pytest.param(ParkMethod.RECOMPUTE, 1, marks=pytest.mark.soak),
    ],
)
def test_parking_anywhere_changes_nothing(
    base: Path, alone: dict[str, list[int]], method: ParkMethod, plan_ahead: int
) -> None:
    """Also in the iteration that brings the first token beyond the original context."""
    engine = make_engine(base, plan_ahead=plan_ahead, host_kv_mib=1, prefix_cache=False)
    engine.set_supervised(True)
    expected = alone[BECOMES_LONG.request]
    for steps in STEPS:
        ran = run(engine, BECOMES_LONG, steps=steps)
        promise = BECOMES_LONG.promise
        assert engine.park(RequestId(BECOMES_LONG.request), 1, promise, promise, method)
        run(engine, ran=ran, steps=2)
        assert len(ran.of(ParkedNow)) == 1
        assert engine.resume(RequestId(BECOMES_LONG.request), 1, promise)
        assert run(engine, ran=ran).tokens == {BECOMES_LONG.request: expected}, steps


def test_a_sequence_goes_on_elsewhere_as_it_would_have_here(base: Path, alone: dict[str, list[int]]) -> None:
    """Another runner computes the delivered tokens' keys with the same frequencies."""
    expected = alone[BECOMES_LONG.request]
    for delivered in (1, 7, 8, 9, 20):
        moved = ask(
            "becomes long", prompt=PROMPT, delivered=tuple(expected[:delivered]), max_tokens=len(expected), tenant="one"
        )
        assert run(make_engine(base), moved).tokens[moved.request] == expected[delivered:], delivered


def test_dynamic_rope_makes_the_context_longer(tmp_path: Path) -> None:
    family = BY_NAME["Llama, dynamic rope"]
    engine = make_engine(save_model(family.config, tmp_path))
    assert engine.info.max_model_length == 4 * TRAINED == 4 * family.config.max_position_embeddings


def test_a_forward_pass_whose_rotations_have_one_table_is_not_used(base: Path) -> None:
    loaded = execute.load(base, "float32", DEVICE.type)
    with torch.inference_mode():
        pack(loaded, kernels_named("cpp"))
    assert loaded.fused is None


def test_a_wide_pass_leaves_no_wide_frequencies(base: Path) -> None:
    """Loading makes such passes, too."""
    ours = execute.load(base, "float32", DEVICE.type).model.model.rotary_emb
    theirs = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).model.rotary_emb
    for positions in (torch.arange(60)[None], torch.arange(2)[None]):
        x = torch.ones(1, 1, 8)
        for one, other in zip(type(ours).forward(ours, x, positions), theirs(x, positions), strict=True):
            assert torch.equal(one, other)
    assert not [name for name, value in {**vars(ours), **dict(ours.named_buffers())}.items() if _is_wide(value)]


def _is_wide(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.float64


def test_a_wide_pass_leaves_no_attribute_of_another_kind(base: Path) -> None:
    """A dynamic rope keeps the longest length: a number at first, a tensor once it has grown."""
    loaded = execute.load(base, "float32", DEVICE.type)
    rope = loaded.model.model.rotary_emb
    before = {**vars(rope), **dict(rope.named_buffers())}
    with wide(loaded, torch.float64):
        type(rope).forward(rope, torch.ones(1, 1, 8), torch.arange(60)[None])
    after = {**vars(rope), **dict(rope.named_buffers())}
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before.keys() - {"_buffers"})


def test_who_may_share_keys_and_who_computes_them_again() -> None:
    longrope, dynamic = LengthRope(48, grows=False), LengthRope(48, grows=True)
    assert longrope.salt(40, 48) == dynamic.salt(48, 60) == b""
    assert longrope.salt(40, 49) == longrope.salt(90, 90) != b""
    assert len({dynamic.salt(49, 49), dynamic.salt(50, 50), b""}) == 3
    assert dynamic.salt(49, 49) == dynamic.salt(49, 60)
    assert longrope.restarts_after(48) == 48
    assert longrope.restarts_after(49) is dynamic.restarts_after(10) is None
