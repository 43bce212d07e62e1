"""Adapters that scale or shift the linears' own results equal PEFT: DoRA, biases on lora_B, trained biases of the base.

`peft_reference.py` says what the same is.
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from motet.domain import BASE, Digest, RequestId
from motet.errors import AdapterIncompatible
from motet_runner.adapters.certification import certify
from motet_runner.adapters.layout import WITH_VLLM
from motet_runner.engine import Engine
from motet_runner.execute.load.base_outline import limits_of
from motet_runner.external.vllm.plain_adapter import write_adapter
from motet_runner.interface import EngineConfig, NewSequence, Sampling
from testbed.compiled_kernels import CACHE, needs_a_compiler
from tests.runner.engines import device_of, load
from tests.runner.peft_reference import Served, World, assert_equal, reference_logits
from tests.runner.random_models import VOCABULARY, RandomAdapter, save_adapter, save_base

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

TARGETS = {
    "llama": ("q_proj", "up_proj"),
    "qwen2": ("q_proj", "down_proj"),
    "gpt2": ("c_attn",),
    "gpt_neox": ("dense",),
}
DECODED = 8
WEIGHTS = "adapter_model.safetensors"


def specs(family: str) -> dict[str, RandomAdapter]:
    found = {
        "plain": RandomAdapter(8, 16),
        "dora": RandomAdapter(4, 8, dora=True),
        "dora of a whole tile": RandomAdapter(16, 16, dora=True),
        "dora and rslora": RandomAdapter(6, 6, rslora=True, dora=True, rank_pattern=((TARGETS[family][0], 3),)),
        "dora of some linears": RandomAdapter(8, 8, dora=True, targets=TARGETS[family]),
    }
    if family == "llama":
        return found | {"bias all, without any": RandomAdapter(8, 8, bias="all")}
    if family == "qwen2":  # it has biases in its linears alone, also in those that have no LoRA
        found |= {"bias all": RandomAdapter(8, 8, bias="all", targets=("q_proj", "down_proj"))}
    return found | {
        "lora_bias": RandomAdapter(8, 8, lora_bias=True, targets=TARGETS[family]),
        "lora_bias and rslora": RandomAdapter(5, 8, rslora=True, lora_bias=True, targets=TARGETS[family]),
        "bias lora_only": RandomAdapter(8, 8, bias="lora_only", targets=TARGETS[family]),
        "dora and bias lora_only": RandomAdapter(8, 8, dora=True, bias="lora_only", targets=TARGETS[family]),
    }


@pytest.fixture(scope="module")
def worlds() -> dict[str, World]:
    """By family: each is made once, in whatever order tests run."""
    return {}


@pytest.fixture
def world(request: pytest.FixtureRequest, worlds: dict[str, World], tmp_path_factory: pytest.TempPathFactory) -> World:
    if request.param not in worlds:
        worlds[request.param] = make_world(request.param, tmp_path_factory.mktemp(request.param))
    return worlds[request.param]


def make_world(family: str, folder: Path) -> World:
    base = save_base(family, folder / "base", biased=True)
    adapters = {
        Digest(f"sha256:{name}"): save_adapter(base, family, spec, folder / name, seed=number)
        for number, (name, spec) in enumerate(specs(family).items())
    }
    return World(family, base, adapters)


def serve(world: World, **config: object) -> list[Served]:
    """Each adapter answers a short prompt and a long one, all at once."""
    served = [
        Served(RequestId(f"{adapter} {length}"), adapter, prompt_of(length), [], [])
        for adapter in (BASE, *world.adapters)
        for length in (5, 70)
    ]
    by_request = {one.request: one for one in served}

    def keep(requests: list[RequestId], logits: torch.Tensor) -> None:
        for request, row in zip(requests, logits, strict=True):
            by_request[request].logits.append(row.clone())

    engine = Engine(EngineConfig(model=world.base, kv_cache_mib=16, **config), on_logits=keep)
    for digest, folder in world.adapters.items():
        load(engine, digest, folder)
    for one in served:
        sampling = Sampling(max_tokens=DECODED, ignore_eos=True)
        engine.add(
            NewSequence(
                request=one.request, epoch=1, prompt=one.prompt, adapter=one.adapter, promise=8, sampling=sampling
            )
        )
    while engine.has_work():
        for output in engine.step().sequences:
            assert output.error is None
            by_request[output.request].tokens += output.tokens
        engine.check()
    return served


def prompt_of(length: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(length)
    return tuple(torch.randint(2, VOCABULARY, (length,), generator=generator).tolist())


IN_SHORT = {(family, "cpp") for family in TARGETS} | {("llama", "exact"), ("qwen2", "torch"), ("gpt2", "torch")}


@pytest.mark.parametrize(
    ("world", "kernels"),
    [
        pytest.param(family, kernels, marks=() if (family, kernels) in IN_SHORT else pytest.mark.soak)
        for family in TARGETS
        for kernels in ("torch", "cpp", "exact")
    ],
    indirect=["world"],
)
def test_what_scales_and_shifts_equals_peft(world: World, kernels: str) -> None:
    if kernels == "cpp":
        needs_a_compiler()
    served = serve(world, device=device_of("cpp").type, kernels=kernels, kernel_cache=CACHE)
    print(assert_equal(served, reference_logits(world, served)))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("qwen")
    base = save_base("qwen2", folder / "base", biased=True)
    spec = RandomAdapter(4, 8, dora=True, bias="lora_only", targets=TARGETS["qwen2"])
    return base, save_adapter(base, "qwen2", spec, folder / "adapter", seed=1)


MODULE = "base_model.model.model.layers.1.self_attn.q_proj."


@pytest.mark.parametrize(
    ("tensor", "values", "says"),
    [
        ("lora_magnitude_vector", torch.ones(64).index_fill(0, torch.tensor([3]), 0.0), "magnitude of 0"),
        ("lora_magnitude_vector", torch.full((64,), torch.nan), "lora_magnitude_vector in .* not a number"),
        ("lora_magnitude_vector", torch.ones(63), r"lora_magnitude_vector of .*q_proj has the shape \(63,\)"),
        ("lora_magnitude_vector", None, "q_proj has no lora_magnitude_vector tensor, but use_dora"),
        ("base_layer.bias", torch.ones(64, 1), "bias of .*q_proj has the shape"),
        ("base_layer.bias", torch.full((64,), torch.inf), "base_layer.bias in .* infinite"),
        ("lora_B.bias", torch.ones(64), "q_proj has a lora_B.bias tensor, but lora_bias .* says that there is none"),
        ("lora_A.weight", None, "q_proj has no lora_A tensor"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_name(
    qwen: tuple[Path, Path], tmp_path: Path, tensor: str, values: torch.Tensor | None, says: str
) -> None:
    base, adapter = qwen
    folder = shutil.copytree(adapter, tmp_path / "changed")
    tensors = load_file(folder / WEIGHTS)
    tensors.pop(MODULE + tensor, None)
    save_file(tensors if values is None else tensors | {MODULE + tensor: values}, folder / WEIGHTS)
    with pytest.raises(AdapterIncompatible, match=says):
        certify(folder, limits_of(EngineConfig(model=base, device="cpu")))


@pytest.mark.parametrize("more", [{}, {"kernels": "triton"}, {"adapter_dtype": "int8"}])
def test_no_kernels_refuse_them(qwen: tuple[Path, Path], more: dict[str, str]) -> None:
    base, adapter = qwen
    assert certify(adapter, limits_of(EngineConfig(model=base, device="cpu", **more))).certificate.method == "dora"


def test_vllm_refuses_them_by_name(qwen: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = qwen
    limits = limits_of(EngineConfig(model=base, device="cpu"))
    with pytest.raises(AdapterIncompatible, match=r"down_proj has DoRA.* not serve with vLLM yet"):
        certify(adapter, limits._replace(no_scales=WITH_VLLM))
    with pytest.raises(AdapterIncompatible, match=r"_proj has DoRA.* not serve with vLLM yet"):
        write_adapter(certify(adapter, limits).layout, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_certificate_has_the_rank_that_the_device_gives(qwen: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = qwen
    limits = limits_of(EngineConfig(model=base, device="cpu"))
    found = certify(adapter, limits)
    assert (found.certificate.rank, found.certificate.device_rank, found.layout.rank) == (4, 6, 6)
    plain = certify(save_adapter(base, "qwen2", RandomAdapter(16, 8), tmp_path / "plain", seed=1), limits)
    assert (plain.certificate.device_rank, plain.layout.rank) == (16, 16), "it takes no more than without DoRA"


def test_a_bias_that_the_linear_lacks_is_refused_by_its_name(qwen: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = qwen
    folder = shutil.copytree(adapter, tmp_path / "changed")
    changed = {MODULE.replace("q_proj", "o_proj") + "bias": torch.ones(64)}
    save_file(load_file(folder / WEIGHTS) | changed, folder / WEIGHTS)
    engine = Engine(EngineConfig(model=base, kv_cache_mib=16, kernels="torch", device="cpu"))
    for limits in (engine.info, limits_of(EngineConfig(model=base, device="cpu"))):
        with pytest.raises(AdapterIncompatible, match="o_proj, which has no bias in this base model") as refused:
            certify(folder, limits)
        assert refused.value.reason == "UnmappedTensors"


@pytest.mark.parametrize(
    ("tensor", "dtype", "reached"),
    [
        ("base_layer.bias", "float16", 1e5),
        ("base_layer.bias", "float32", 1e300),
        ("base_layer.bias", "float32", 1e30),  # finite once, and not when it is squared
        ("lora_magnitude_vector", "float16", 1e300),
        ("lora_magnitude_vector", "float16", 1e4),  # times the length of an input
        ("lora_magnitude_vector", "bfloat16", 1e20),
        ("lora_magnitude_vector", "float32", 1e19),
    ],
)
def test_a_number_that_the_engine_cannot_hold_is_refused_by_its_linear(
    qwen: tuple[Path, Path], tmp_path: Path, tensor: str, dtype: str, reached: float
) -> None:
    base, adapter = qwen
    folder = shutil.copytree(adapter, tmp_path / "changed")
    changed = {MODULE + tensor: torch.full((64,), reached, dtype=torch.float64)}
    save_file(load_file(folder / WEIGHTS) | changed, folder / WEIGHTS)
    with pytest.raises(AdapterIncompatible, match=rf"{tensor.rpartition('.')[2]} of .*q_proj .* can't be computed in"):
        certify(folder, limits_of(EngineConfig(model=base, device="cpu"))._replace(dtype=dtype))


def test_what_shows_beside_the_base_alone_is_refused_when_it_is_loaded(qwen: tuple[Path, Path], tmp_path: Path) -> None:
    """A product that is infinite only with the magnitude"""
    base, adapter = qwen
    folder = shutil.copytree(adapter, tmp_path / "changed")
    changed = {
        MODULE + "lora_A.weight": torch.zeros(4, 64),
        MODULE + "lora_B.weight": torch.full((64, 4), 1e38),
        MODULE + "lora_magnitude_vector": torch.full((64,), 100.0),
    }
    save_file(load_file(folder / WEIGHTS) | changed, folder / WEIGHTS)
    engine = Engine(EngineConfig(model=base, kv_cache_mib=16, kernels="torch", device="cpu"))
    load(engine, Digest("sha256:a"), folder)
    sequence = NewSequence(
        request=RequestId("r"),
        epoch=1,
        prompt=(2, 3),
        adapter=Digest("sha256:a"),
        promise=8,
        sampling=Sampling(max_tokens=2),
    )
    engine.add(sequence)
    errors = []
    while engine.has_work():
        errors += [output.error for output in engine.step().sequences]
    assert "q_proj can't be computed in torch.float32" in str(errors[-1])
