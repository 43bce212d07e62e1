"""/tokenize and /detokenize, as vLLM has them: the honest way to count a private model's tokens."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from motet.errors import InvalidRequest, NoRunner
from motet_gateway.answers.prompts import chat_prompt
from motet_gateway.bodies import read_json
from motet_gateway.catalog import ANYBODY, Obstacle, Target
from motet_gateway.gateway import Gateway
from motet_gateway.parameters import ChatBody, DetokenizeBody, TokenizeBody, check_tokens, parse
from motet_gateway.routes.json import json_response
from motet_gateway.tokens.text_model import TextModel


def token_routes(gateway: Gateway) -> APIRouter:
    router = APIRouter(tags=["tokens"])

    def text_of(model: str | None) -> tuple[Target, TextModel]:
        groups = gateway.catalog.current.groups
        if model is None and len(groups) != 1:
            raise InvalidRequest("model: this field is required where several models are served", param="model")
        found = gateway.find(model or groups[0].served_name, ANYBODY)
        if isinstance(found, Obstacle):
            raise NoRunner(f"The model's tokenizer is not here yet: {found.why}.")
        return found

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = parse(TokenizeBody, await read_json(request, limit=gateway.settings.max_body_bytes))
        target, text = text_of(body.model)
        tokens = _tokens(body, text)
        content = {"count": len(tokens), "max_model_len": target.group.max_model_length, "tokens": tokens}
        if body.return_token_strs:
            content["token_strs"] = [text.tokenizer.id_to_token(token) for token in tokens]
        return json_response(content)

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = parse(DetokenizeBody, await read_json(request, limit=gateway.settings.max_body_bytes))
        _, text = text_of(body.model)
        check_tokens(body.tokens, text, "tokens")
        return json_response({"prompt": text.decode(body.tokens, skip_special_tokens=False)})

    return router


def _tokens(body: TokenizeBody, text: TextModel) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("prompt: send either prompt or messages", param="prompt")
    if body.prompt is not None:
        return text.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    chat = ChatBody.model_validate(
        {
            "model": body.model or "-",
            "messages": body.messages,
            "add_generation_prompt": body.add_generation_prompt,
            "continue_final_message": body.continue_final_message,
            "chat_template_kwargs": body.chat_template_kwargs,
            "add_special_tokens": body.add_special_tokens,
        }
    )
    return chat_prompt(chat, text)
