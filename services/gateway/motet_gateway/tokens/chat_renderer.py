"""Renders chat templates: short messages here on the event loop, all others in separate processes.

Sending messages to another process costs far more than most renderings. So short messages are rendered in this process
if the template's work can be counted (`metered_template`). Templates that come with requests are always rendered in a
process (`request_templates`): to find out whether their work can be counted takes a process of its own.
"""

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import structlog

from motet.errors import InvalidRequest, MotetError
from motet_gateway.tokens.chat_template import CannotRender
from motet_gateway.tokens.content_parts import as_read
from motet_gateway.tokens.metered_template import MeteredTemplate
from motet_gateway.tokens.render_pool import RenderPool, TemplateText, encoded
from motet_gateway.tokens.request_templates import RequestTemplates
from motet_gateway.tokens.template_meter import NotMeterable
from motet_gateway.tokens.text_model import ModelTokenizer

log = structlog.get_logger(__name__)

SHORT_BYTES = 8 * 1024
"""The largest messages that are rendered here. Their size bounds the cost of each step."""
SLOW_SECONDS = 0.01
"""A template that takes so much CPU time for short messages, and again for the same ones, is not rendered here any
more. Most take a thousandth of it."""
MAX_TEMPLATES = 64
"""How many compiled templates are kept. Beyond it the oldest is dropped."""
SYSTEM_PROBE = "motet-probe"
"""The text of a system message, to see whether a template shows it, in whatever case."""


class ChatRenderer:
    def __init__(self, processes: RenderPool) -> None:
        self._processes = processes
        self.metered: dict[bytes, MeteredTemplate | None] = {}
        """None for templates that are being compiled or must be rendered in a process."""
        self.compiling: set[asyncio.Task[None]] = set()
        self._brought = RequestTemplates(processes)

    async def render(self, template: TemplateText, context: bytes, *, tenant: str = "") -> str:
        """The prompt as text. Raises InvalidRequest if these messages can't be rendered within the limits."""
        if template.brought_by is not None:
            return await self._brought.render(template.brought_by, template, context)
        # A tenant's code never runs in this process, however well it is counted.
        if template.adapter_of is None and len(context) <= SHORT_BYTES:
            if (metered := self.metered.get(template.digest)) is not None:
                try:
                    return self._render_here(template, metered, context)
                except (NotMeterable, MemoryError):
                    pass
            elif template.digest not in self.metered:
                self._start_compiling(template)
        return await self._processes.render(template, context, tenant=tenant)

    async def shows_tools(self, template: TemplateText, model: ModelTokenizer) -> bool:
        """Whether a template, the model's own or another one, writes the tools that a request offers."""
        if template.brought_by is None:
            return model.shows_tools
        return await self._brought.reads(template.brought_by, template, "tools")

    async def takes_system(self, template: TemplateText, extra: Mapping[str, Any] | None, *, tenant: str) -> bool:
        """Whether a template shows a system message, with these variables; some refuse it. The answer is not kept: it
        may be another one with the variables of another request."""
        said = [{"role": "system", "content": SYSTEM_PROBE}, {"role": "user", "content": "?"}]
        probe = as_read(template.text, said)
        try:
            return SYSTEM_PROBE in (await self.render(template, encoded(probe, extra=extra), tenant=tenant)).lower()
        except InvalidRequest:
            return False

    async def close(self) -> None:
        compiling = list(self.compiling)
        for task in compiling:
            task.cancel()
        await asyncio.gather(*compiling, return_exceptions=True)
        await self._brought.close()
        await self._processes.close()

    def _render_here(self, template: TemplateText, metered: MeteredTemplate, context: bytes) -> str:
        began = time.thread_time()
        try:
            # A template may write lone surrogates, which no tokenizer accepts.
            return metered.render(context).encode(errors="replace").decode()
        except NotMeterable:
            raise
        except CannotRender as error:
            raise template.error(error) from None
        finally:
            # Once says nothing: the garbage collector may have run meanwhile, for all that the process holds.
            if time.thread_time() - began > SLOW_SECONDS and (took := _seconds(metered, context)) > SLOW_SECONDS:
                log.warning("chat_template_slow", seconds=round(took, 3))
                self.metered[template.digest] = None

    def _start_compiling(self, template: TemplateText) -> None:
        if len(self.metered) >= MAX_TEMPLATES:
            del self.metered[next(iter(self.metered))]
        self.metered[template.digest] = None
        task = asyncio.create_task(self._compile(template), name="compile a chat template")
        self.compiling.add(task)
        task.add_done_callback(self.compiling.discard)

    async def _compile(self, template: TemplateText) -> None:
        try:
            code = await self._processes.metered_code(template)
            self.metered[template.digest] = MeteredTemplate(code, template.special_tokens)
        except (ValueError, OSError, MemoryError, MotetError) as error:
            log.info("chat_template_not_metered", reason=str(error) or "it cannot be compiled here")


def _seconds(metered: MeteredTemplate, context: bytes) -> float:
    """The CPU time that it takes."""
    began = time.thread_time()
    with suppress(CannotRender, MemoryError):
        metered.render(context)
    return time.thread_time() - began
