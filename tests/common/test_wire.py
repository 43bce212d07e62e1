"""Two versions of Motet talk to each other during every upgrade, so fields and methods keep their meaning."""

from google.protobuf import descriptor_pb2, descriptor_pool

from motet.api.v1 import common_pb2
from tests.common import wire


def test_each_recorded_field_keeps_its_number_name_and_type() -> None:
    now, gone = set(wire.lines()), wire.reserved()
    changed = [
        line for line in wire.RECORD.read_text().splitlines() if line not in now and wire.field_of(line) not in gone
    ]
    assert not changed, (
        "an older peer would misread these. Give a new meaning a new field; to take one away, write `reserved` with "
        "its number in the message, and run `python -m tests.common.wire`. Names of fields and messages are not sent: "
        f"where nothing but such a name changes, change its lines in {wire.RECORD.name} by hand: {changed}"
    )


def test_each_new_field_is_recorded() -> None:
    new = set(wire.lines()) - set(wire.RECORD.read_text().splitlines())
    assert not new, f"run `python -m tests.common.wire` to write it down, and look at what it changes: {sorted(new)}"


def test_a_removed_field_is_dropped_from_the_record() -> None:
    gone = wire.reserved()
    left = [line for line in wire.RECORD.read_text().splitlines() if wire.field_of(line) in gone]
    assert not left, f"run `python -m tests.common.wire`: {left}"


def test_a_changed_number_type_or_label_is_found() -> None:
    def file(**field: object) -> list[str]:
        proto = descriptor_pb2.FileDescriptorProto(name="m.proto", package="p", syntax="proto3")
        message = proto.message_type.add(name="M")
        values = {"name": "f", "number": 1, "type": 13, "label": 1} | field
        message.field.add(**values)  # type: ignore[arg-type]
        return wire.lines([descriptor_pool.DescriptorPool().AddSerializedFile(proto.SerializeToString())])

    assert file() == ["p.M.f = 1 uint32"]
    assert len({tuple(file(**change)) for change in ({}, {"number": 2}, {"type": 4}, {"label": 3}, {"name": "g"})}) == 5


def test_every_enumeration_has_an_unspecified_zero() -> None:
    """A peer that does not know a field reads zero, so zero must not have a meaning."""
    for module in wire.MODULES:
        for enum in module.DESCRIPTOR.enum_types_by_name.values():
            assert enum.values_by_number[0].name.endswith("_UNSPECIFIED")
    assert common_pb2.REQUEST_CLASS_UNSPECIFIED == 0
