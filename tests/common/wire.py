"""The messages and calls of the API as text, one line for each thing that two versions must agree on.

`python -m tests.common.wire` records additions. It removes only what is reserved.
"""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto

from motet.api.v1 import common_pb2, predictor_pb2, runner_pb2, scheduler_pb2, supervisor_pb2

MODULES: tuple[ModuleType, ...] = (common_pb2, predictor_pb2, runner_pb2, scheduler_pb2, supervisor_pb2)
RECORD = Path(__file__).with_name("wire.txt")

_TYPES = {
    number: name.removeprefix("TYPE_").lower()
    for name, number in vars(FieldDescriptor).items()
    if name.startswith("TYPE_")
}


def lines(files: list[FileDescriptor] | None = None) -> list[str]:
    found: list[str] = []
    for file in files if files is not None else [module.DESCRIPTOR for module in MODULES]:
        for enum in file.enum_types_by_name.values():
            found += _enum(enum)
        for message in file.message_types_by_name.values():
            found += _message(message)
        for service in file.services_by_name.values():
            for method in service.methods:
                up, down = (
                    f"{'stream ' if streaming else ''}{kind.full_name}"
                    for kind, streaming in (
                        (method.input_type, method.client_streaming),
                        (method.output_type, method.server_streaming),
                    )
                )
                found.append(f"{method.full_name}({up}) returns ({down})")
    return sorted(found)


def reserved() -> set[str]:
    """Removed fields, whose numbers are never used again, as `message = number`."""
    return {
        f"{name} = {number}"
        for module in MODULES
        for message in module.DESCRIPTOR.message_types_by_name.values()
        for name, proto in [(message.full_name, _proto(message))]
        for span in proto.reserved_range
        for number in range(span.start, span.end)
    }


def field_of(line: str) -> str:
    """`message = number` of a field's line."""
    name, _, rest = line.partition(" = ")
    return f"{name.rpartition('.')[0]} = {rest.partition(' ')[0]}"


def _message(message: Descriptor) -> Iterator[str]:
    for field in message.fields:
        kind = field.message_type or field.enum_type
        of = f" {kind.full_name}" if kind is not None else ""
        repeated = " repeated" if field.is_repeated else ""
        oneof = f" in {field.containing_oneof.name}" if field.containing_oneof is not None else ""
        yield f"{field.full_name} = {field.number} {_TYPES[field.type]}{of}{repeated}{oneof}"
    for nested in message.nested_types:
        yield from _message(nested)
    for enum in message.enum_types:
        yield from _enum(enum)


def _enum(enum: EnumDescriptor) -> Iterator[str]:
    for value in enum.values:
        yield f"{enum.full_name}.{value.name} = {value.number}"


def _proto(message: Descriptor) -> DescriptorProto:
    proto = DescriptorProto()
    message.CopyToProto(proto)
    return proto


if __name__ == "__main__":
    kept = {line for line in RECORD.read_text().splitlines() if field_of(line) not in reserved()}
    RECORD.write_text("\n".join(sorted(kept | set(lines()))) + "\n")
