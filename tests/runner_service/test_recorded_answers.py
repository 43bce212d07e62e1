"""A revision with recorded answers is ready once the engine has compared them; its manifest says what they decide."""

import asyncio
from pathlib import Path

import pytest

from motet.api.v1 import common_pb2, scheduler_pb2
from motet.errors import REFERENCE_MISMATCH, AdapterError, AdapterIncompatible
from motet_runner.adapters.certification import Certification
from motet_runner.adapters.layout import AdapterLayout, FileStamp
from motet_runner.adapters.peft_config import WEIGHTS_NAME
from motet_runner.adapters.proof import Proof
from motet_runner.adapters.recorded_answers import NO_RECORD, Comparison
from motet_runner.engine_messages import LoadAdapter
from tests.common.waiting import PATIENCE_S
from tests.runner_service.test_proofs import Proving
from tests.support.in_process_runner import write_adapter

AGREES = Comparison(answers=4, tokens=100, largest=1e-5, allowed=1e-3)
WRONG = AGREES._replace(largest=0.6)
OF_A_QUANTIZED = WRONG._replace(quantization="bitsandbytes")


class Comparing(Proving):
    """Its engine proves no linears; the test is the engine."""

    def __init__(self, folder: Path, kernels: str = "torch", *, linears: bool = False, **more) -> None:
        super().__init__(folder, kernels, proves_linears=linears, **more)
        self.recorded = True

    def check(self, folder):
        self.checks += 1
        layout = AdapterLayout.of(folder / WEIGHTS_NAME, FileStamp.of(folder / WEIGHTS_NAME), 4, ())
        return Certification.of(scheduler_pb2.Certificate(rank=4), layout, self.engine, recorded=self.recorded)

    def verified(self, n: int = 1, *, require: bool = False, refuse: bool = False) -> asyncio.Task:
        source = write_adapter(self.folder / f"a{n}", seed=n)
        order = scheduler_pb2.EnsureAdapter(
            adapter=common_pb2.AdapterRef(namespace="default", name=f"a{n}"),
            source=source.as_uri(),
            stage=common_pb2.ADAPTER_STAGE_CERTIFIED,
            requires_record=require,
            refuses_mismatch=refuse,
        )
        return asyncio.create_task(self.adapters.ensure(order))

    async def finds(self, compared: Comparison, asked: LoadAdapter | None = None) -> None:
        asked = asked or await self.asked()
        await self.answers(asked, Proof(self.kernels, 0.0, 0.0, linears=False, recorded=compared))


@pytest.fixture
def setup(tmp_path):
    setup = Comparing(tmp_path)
    yield setup
    setup.adapters.close()


async def test_an_adapter_is_certified_once_its_answers_are_compared(setup):
    order = setup.verified()
    asked = await setup.asked()
    assert (asked.proof.linears, asked.proof.recorded) == (False, True)
    assert not order.done()
    await setup.finds(AGREES, asked)
    certificate = (await order).certificate
    assert not certificate.warnings
    assert not certificate.proved_by, "its linears were not proved"
    assert certificate.max_delta_to_reference == AGREES.largest


async def test_an_adapter_without_answers_is_certified_by_its_check(setup):
    setup.recorded = False
    async with asyncio.timeout(PATIENCE_S):
        life = await setup.verified(refuse=True)
    assert not life.certificate.warnings
    assert not [one for one in setup.posted if isinstance(one, LoadAdapter)]


async def test_another_models_answers_are_a_warning_if_the_manifest_says_nothing(setup):
    order = setup.verified()
    await setup.finds(WRONG)
    (warning,) = (await order).certificate.warnings
    assert "differs by 0.6" in warning


async def test_another_models_answers_are_refused_if_the_manifest_says_so(setup):
    order = setup.verified(refuse=True)
    await setup.finds(WRONG)
    with pytest.raises(AdapterIncompatible, match=r"differs by 0\.6") as refused:
        await order
    assert refused.value.reason == REFERENCE_MISMATCH


async def test_two_manifests_decide_for_themselves_over_the_same_bytes(setup):
    refuses, warns = setup.verified(refuse=True), setup.verified()
    await setup.finds(WRONG)
    assert (await warns).certificate.warnings
    with pytest.raises(AdapterIncompatible):
        await refuses
    setup.posted.clear()
    later = setup.verified(refuse=True)
    with pytest.raises(AdapterIncompatible):
        await later
    assert not [one for one in setup.posted if isinstance(one, LoadAdapter)], "it was compared before"


async def test_a_quantized_bases_answers_are_a_warning_whatever_the_manifest_says(setup):
    order = setup.verified(require=True, refuse=True)
    await setup.finds(OF_A_QUANTIZED)
    assert "bitsandbytes" in (await order).certificate.warnings[0]


async def test_an_adapter_without_answers_is_refused_if_the_manifest_requires_them(setup):
    setup.recorded = False
    with pytest.raises(AdapterIncompatible, match=r"has no motet_proof\.json") as refused:
        await setup.verified(require=True)
    assert refused.value.reason == NO_RECORD
    assert (await setup.verified(n=1)).checked is not None


async def test_answers_of_other_tokens_refuse_the_adapter_for_all(setup):
    order = setup.verified()
    await setup.answers(await setup.asked(), AdapterIncompatible("another tokenizer", reason=REFERENCE_MISMATCH))
    with pytest.raises(AdapterError) as refused:
        await order
    assert refused.value.reason == REFERENCE_MISMATCH


async def test_a_restart_compares_nothing_anew(setup, tmp_path):
    order = setup.verified()
    await setup.finds(WRONG)
    await order
    setup.adapters.close()
    again = Comparing(tmp_path)
    (warning,) = (await again.verified()).certificate.warnings
    assert "differs by 0.6" in warning
    with pytest.raises(AdapterIncompatible):
        await again.verified(refuse=True)
    assert not [one for one in again.posted if isinstance(one, LoadAdapter)]
    again.adapters.close()


async def test_after_an_upgrade_what_differs_is_refused_by_what_is_compared_then(setup, tmp_path):
    order = setup.verified(refuse=True)
    await setup.finds(WRONG)
    with pytest.raises(AdapterIncompatible):
        await order
    setup.adapters.close()
    newer = Comparing(tmp_path, version="2")
    order = newer.verified(refuse=True)
    asked = await newer.asked()
    assert not order.done()
    await newer.finds(WRONG, asked)
    with pytest.raises(AdapterIncompatible, match=r"differs by 0\.6"):
        await order
    newer.adapters.close()


async def test_what_cannot_be_compared_beside_the_requests_is_tried_once_for_the_same_kernels(setup):
    order = setup.verified()
    await setup.finds(AGREES)
    await order
    for kernels in ("cpp", "triton"):
        setup.posted.clear()
        setup.adapters.on_kernels(kernels)
        await setup.answers(await setup.asked(), AdapterIncompatible("no", reason=REFERENCE_MISMATCH))
        setup.posted.clear()
        setup.adapters.tick()
        await asyncio.sleep(0)
        assert not [one for one in setup.posted if isinstance(one, LoadAdapter)]


async def test_a_comparison_is_no_proof_of_linears(setup, tmp_path):
    order = setup.verified()
    await setup.finds(AGREES)
    await order
    setup.adapters.close()
    strict = Comparing(tmp_path, linears=True)
    order = strict.verified()
    asked = await strict.asked()
    assert (asked.proof.linears, asked.proof.recorded, asked.proof.serves_meanwhile) == (True, True, False)
    await strict.answers(asked, Proof("torch", 1.0, 0.0, recorded=AGREES))
    assert list((await order).certificate.proved_by) == ["torch"]
    strict.adapters.close()


async def test_other_kernels_compare_again_beside_the_requests(setup):
    order = setup.verified()
    await setup.finds(AGREES)
    await order
    setup.posted.clear()
    setup.adapters.on_kernels("cpp")
    asked = await setup.asked()
    assert asked.proof.serves_meanwhile
    setup.kernels = "cpp"
    await setup.finds(WRONG, asked)
    life = setup.adapters.for_request(asked.digest)
    assert life is not None, "it goes on serving"
    assert "differs by 0.6" in life.certificate.warnings[0]
