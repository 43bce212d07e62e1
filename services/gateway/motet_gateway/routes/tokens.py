"""/tokenize and /detokenize, as in vLLM, and /v1/messages/count_tokens, as Anthropic's: clients count a private model's
tokens with them."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from motet.errors import InvalidRequest, NoRunner
from motet.keys import KeyScope
from motet.sampling import check_tokens
from motet_gateway import ignored_fields
from motet_gateway.answers.chat import chat_prompts
from motet_gateway.answers.conversation import Conversation
from motet_gateway.answers.messages import errors as messages_errors
from motet_gateway.answers.messages.api import message_prompts
from motet_gateway.answers.messages.body import CountedMessages
from motet_gateway.answers.prompts import UNKNOWN_CONTEXT, Tokenising
from motet_gateway.asset_searches import Owner
from motet_gateway.catalog import NotReadyReason, Target
from motet_gateway.errors import ClientGone
from motet_gateway.gateway import Gateway
from motet_gateway.identity.caller import Caller, caller_of
from motet_gateway.parameters import AnyBody, DetokenizeBody, TokenizeBody, Tokens, parse
from motet_gateway.request_bodies import RequestBody
from motet_gateway.routes.json_response import json_response
from motet_gateway.tokens.text_model import ModelTokenizer
from motet_gateway.tools.calls import callable_tools, formats_of

AnyConversation = TypeVar("AnyConversation", bound=Conversation)
Prompts = Callable[[AnyConversation, Tokenising], Awaitable[list[Tokens]]]


TOKENIZER_WAIT_S = 10.0
"""How long a request waits while a runner sends the model's tokenizer: the first requests after a start come before it
has arrived."""


class _Asked:
    """Registered while it is answered: its key may end meanwhile, or its client leave."""

    def __init__(self, caller: Caller, work: "asyncio.Task[Response]") -> None:
        self.caller = caller
        self.work = work
        self.ended: Exception | None = None

    def abort(self, error: Exception) -> None:
        self.ended = error
        self.work.cancel()

    async def listen(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.abort(ClientGone())


def token_routes(gateway: Gateway) -> APIRouter:
    router = APIRouter(tags=["tokens"])

    def only_base(caller: Caller) -> str:
        return gateway.catalog.current.only_base(caller) if gateway.catalog.known else ""

    async def answered(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
        """Raises what has ended it before its answer."""
        asked = _Asked(caller_of(request.scope), asyncio.create_task(work))
        listener = asyncio.create_task(asked.listen(request.receive))
        try:
            with gateway.answering(asked):
                return await asked.work
        except asyncio.CancelledError:
            if asked.ended is None:
                raise
            raise asked.ended from None
        finally:
            listener.cancel()
            asked.work.cancel()

    async def text_of(model: str | None, caller: Caller) -> tuple[Target, ModelTokenizer]:
        """The model and its tokenizer. Waits for what takes a moment."""
        changed = asyncio.Event()
        wait_until = asyncio.get_running_loop().time() + TOKENIZER_WAIT_S
        template: tuple[str, Owner] | None = None
        stop_listening = gateway.listen(changed.set, lambda: template)
        try:
            while True:
                changed.clear()
                found = gateway.find(only_base(caller) if model is None else model, caller)
                if not isinstance(found, NotReadyReason):
                    return found
                template = found.template
                try:
                    async with asyncio.timeout_at(wait_until if found.soon else 0):
                        await changed.wait()
                except TimeoutError:
                    raise NoRunner(f"The model's tokens cannot be counted or read yet: {found.why}.") from None
        finally:
            stop_listening()

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        caller_of(request.scope).needs(KeyScope.USER)
        with gateway.bodies.hold() as held:
            body = await read(TokenizeBody, request, held)
            return await answered(request, tokens_of(body, caller_of(request.scope)))

    async def tokens_of(body: TokenizeBody, caller: Caller) -> Response:
        target, text = await text_of(body.model, caller)
        tokens = await counted(body, target, text, caller.tenant)
        longest = target.group.max_model_length or text.context_length or UNKNOWN_CONTEXT
        content: dict[str, Any] = {"count": len(tokens), "max_model_len": longest}
        strings = bool(body.return_token_strs)
        answer = partial(_counted_response, content, tokens, text, strings=strings)
        return await gateway.encoder.run(len(tokens), answer, tenant=caller.tenant)

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        caller_of(request.scope).needs(KeyScope.USER)
        with gateway.bodies.hold() as held:
            body = await read(DetokenizeBody, request, held)
            return await answered(request, prompt_of(body, caller_of(request.scope)))

    async def prompt_of(body: DetokenizeBody, caller: Caller) -> Response:
        _, text = await text_of(body.model, caller)
        check_tokens("tokens", body.tokens, text.vocabulary)
        decode = partial(text.decode, [body.tokens], skip_special_tokens=False)
        (prompt,) = await gateway.encoder.run(len(body.tokens), decode, tenant=caller.tenant)
        return json_response({"prompt": prompt})

    @router.post(f"{messages_errors.PATH}/count_tokens")
    async def count_tokens(request: Request) -> Response:
        caller_of(request.scope).needs(KeyScope.USER)
        with gateway.bodies.hold() as held:
            body = await read(CountedMessages, request, held)
            body.refuse_unsupported()
            return await answered(request, count_of(body, caller_of(request.scope)))

    async def count_of(body: CountedMessages, caller: Caller) -> Response:
        target, text = await text_of(body.model or None, caller)
        counted = await counted_chat(body, message_prompts, target, text, caller.tenant)
        ignored = ignored_fields.header(body.unknown_fields())
        return json_response({"input_tokens": len(counted)}, {"x-motet-ignored": ignored} if ignored else None)

    async def read(kind: type[AnyBody], request: Request, held: RequestBody) -> AnyBody:
        gateway.admission.check_request()
        limit = gateway.settings.max_counted_bytes
        return parse(kind, await held.read_json(request.scope, request.receive, limit=limit))

    async def counted(body: TokenizeBody, target: Target, text: ModelTokenizer, tenant: str) -> Tokens:
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("prompt: send either prompt or messages", param="prompt")
        if body.prompt is None:
            return await counted_chat(body.chat(), chat_prompts, target, text, tenant)
        special = body.add_special_tokens is not False
        (tokens,) = await gateway.encoder.encode([body.prompt], text, special=special, tenant=tenant)
        return tokens

    async def counted_chat(
        body: AnyConversation, prompts: Prompts[AnyConversation], target: Target, text: ModelTokenizer, tenant: str
    ) -> Tokens:
        formats = formats_of(target, text)
        callable_tools(body, formats)  # refuses them as a request for an answer would
        how = Tokenising(text, gateway.renderer, gateway.encoder, formats, tenant=tenant)
        (prompt,) = await prompts(body, how)
        return prompt

    return router


def _counted_response(content: dict[str, Any], tokens: Tokens, text: ModelTokenizer, *, strings: bool) -> Response:
    content["tokens"] = list(tokens)
    if strings:
        content["token_strs"] = [text.tokenizer.id_to_token(token) for token in tokens]
    return json_response(content)
