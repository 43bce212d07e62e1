"""The chat template of an adapter, ready to be rendered for the namespaces whose adapters have it."""

from pathlib import Path
from typing import Final, Self

from motet.adapter_template import AdapterTemplate
from motet.tool_calls.formats import format_of_template
from motet_gateway.tokens.render_pool import TemplateText

MAX_NAMESPACES = 16
"""Whose texts are kept of one template. Of others it is made again for each request."""


class OwnTemplate:
    def __init__(self, template: AdapterTemplate) -> None:
        self._template: Final = template
        self.special_tokens: Final = dict(template.special_tokens)
        self.shows_tools: Final = template.shows_tools
        self.tool_format: Final = format_of_template(template.text)
        self._texts: dict[str, TemplateText] = {}

    @classmethod
    def from_file(cls, file: Path) -> Self:
        return cls(AdapterTemplate.decode(file.read_bytes()))

    @property
    def bytes(self) -> int:
        """About what it takes in memory"""
        return 4 * len(self._template.text)

    def text_of(self, namespace: str) -> TemplateText:
        """As the adapters of this namespace have it: no two share a process."""
        if (text := self._texts.get(namespace)) is None:
            text = TemplateText(self._template.text, self.special_tokens, adapter_of=namespace)
            if len(self._texts) < MAX_NAMESPACES:
                self._texts[namespace] = text
        return text
