"""The chat template of an adapter, ready to be rendered for the namespaces whose adapters have it."""

import sys
from pathlib import Path
from typing import Final, Self

from motet.adapter_template import AdapterTemplate
from motet.tool_calls.formats import format_of_template
from motet_gateway.tokens.render_pool import TemplateText

_OBJECT_BYTES = 1024
"""What each takes in memory besides its texts"""


class OwnTemplate:
    def __init__(self, template: AdapterTemplate) -> None:
        self.special_tokens: Final = dict(template.special_tokens)
        self.shows_tools: Final = template.shows_tools
        self.tool_format: Final = format_of_template(template.text)
        self._text: Final = TemplateText(template.text, self.special_tokens)

    @classmethod
    def from_file(cls, file: Path) -> Self:
        return cls(AdapterTemplate.decode(file.read_bytes()))

    @property
    def bytes(self) -> int:
        """About what it takes in memory, however many namespaces have it"""
        texts = (self._text.text, self._text.declared, *self.special_tokens.values())
        return sum(map(sys.getsizeof, texts)) + _OBJECT_BYTES

    def text_of(self, namespace: str) -> TemplateText:
        """As the adapters of this namespace have it: no two share a process."""
        return self._text.for_adapters_of(namespace)
