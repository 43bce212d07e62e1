"""What pools and adapters declare of chats reaches the gateways whole."""

from dataclasses import fields

import pytest

from motet.api.v1 import scheduler_pb2
from motet.chat_formats import UNDECLARED, ChatFormats

NAMES = [field.name for field in fields(ChatFormats)]
DECLARED = [ChatFormats(**{name: True if name == "request_templates" else "hermes"}) for name in NAMES]


def test_the_wire_has_each_field() -> None:
    assert [field.name for field in scheduler_pb2.ChatFormats.DESCRIPTOR.fields] == NAMES


@pytest.mark.parametrize("formats", DECLARED, ids=NAMES)
def test_each_field_crosses_the_wire_and_stands_over_what_is_undeclared(formats: ChatFormats) -> None:
    assert ChatFormats.from_proto(formats.to_proto()) == formats
    assert formats.over(UNDECLARED) == UNDECLARED.over(formats) == formats
