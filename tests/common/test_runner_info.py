from motet.api.v1 import common_pb2
from motet.domain import Digest, RequestId
from motet.runner_info import (
    RequestClass,
    RunnerRequest,
    SequenceState,
    Tier,
    read_resident_adapters,
    read_runner_requests,
)


def test_each_value_of_a_reported_request_is_read_from_its_own_field():
    message = common_pb2.RunnerRequest(
        request="a",
        epoch=1,
        promise=common_pb2.Promise(pages=2, tokens=3, adapter_bytes=4, number=11),
        pages_used=5,
        state=common_pb2.SEQUENCE_STATE_PREFILL,
        prompt_tokens=6,
        output_tokens=7,
        max_tokens=8,
        tenant="t",
        adapter_digest="d",
        request_class=common_pb2.REQUEST_CLASS_BATCH,
        parked_times=9,
        gateway="g",
        charged_pages=10,
    )
    assert {field.name for field, _ in message.ListFields()} == set(message.DESCRIPTOR.fields_by_name)
    read = RunnerRequest(
        request=RequestId("a"),
        epoch=1,
        pages=2,
        pages_used=5,
        state=SequenceState.PREFILL,
        prompt_tokens=6,
        output_tokens=7,
        max_tokens=8,
        digest=Digest("d"),
        request_class=RequestClass.BATCH,
        parked_times=9,
        gateway="g",
        charged_pages=10,
        promise_number=11,
    )
    assert read_runner_requests([message]) == (read,)


def test_of_a_resident_adapter_its_digest_and_tier_are_read():
    on_host = common_pb2.ResidentAdapter(digest="d", tier=common_pb2.MEMORY_TIER_HOST, bytes=1)
    on_disk = common_pb2.ResidentAdapter(digest="e", tier=common_pb2.MEMORY_TIER_DISK)
    assert read_resident_adapters([on_host, on_disk]) == {Digest("d"): Tier.HOST, Digest("e"): Tier.DISK}
