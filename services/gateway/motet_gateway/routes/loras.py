"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM: on a local stack they do what `motet adapter push` and
`rm` do. On a cluster, manifests are the only source of what is served, so the answer says which one to apply."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from motet.domain import ObjectName
from motet.errors import AlreadyDeclared, Internal, InvalidRequest, MotetError, NotFound, Overloaded, SetupError
from motet.keys import KeyScope
from motet_gateway.catalog import Target
from motet_gateway.errors import ChangesNotAllowed, wrong
from motet_gateway.gateway import Gateway
from motet_gateway.identity.caller import Caller, caller_of
from motet_gateway.lora_bodies import (
    LOAD_PATH,
    MAX_BODY_BYTES,
    UNLOAD_PATH,
    LoadLoraBody,
    UnloadLoraBody,
    folder_below,
    own_name,
    recipe_to_load,
    recipe_to_unload,
)
from motet_gateway.lora_changes import WRONG_USE, Done, LoraChanges
from motet_gateway.parameters import AnyBody, parse

MAX_NAMES = 16
"""Of base models in a message"""
CATALOG_SECONDS = 10.0
"""How long the scheduler may take to say what the operator has said already"""


class _Change:
    """Goes on if its client leaves, as in vLLM; not if its key ends or the gateway stops."""

    def __init__(self, caller: Caller, work: "asyncio.Task[Response]") -> None:
        self.caller = caller
        self.work = work
        self.ended: MotetError | None = None

    def abort(self, error: MotetError) -> None:
        self.ended = error
        self.work.cancel()


def lora_routes(gateway: Gateway) -> APIRouter:
    router = APIRouter(tags=["adapters"])
    changes = LoraChanges(gateway.process.data_dir)

    @router.post(LOAD_PATH)
    async def load(request: Request) -> Response:
        body = await read(LoadLoraBody, request)
        body.refuse_unsupported()
        return await changed(request, loaded(body, caller_of(request.scope)))

    @router.post(UNLOAD_PATH)
    async def unload(request: Request) -> Response:
        body = await read(UnloadLoraBody, request)
        return await changed(request, unloaded(body, caller_of(request.scope)))

    async def read(kind: type[AnyBody], request: Request) -> AnyBody:
        caller_of(request.scope).needs(KeyScope.ADMIN)
        gateway.admission.check_request()
        with gateway.bodies.hold() as held:
            return parse(kind, await held.read_json(request.scope, request.receive, limit=MAX_BODY_BYTES))

    async def changed(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
        change = _Change(caller_of(request.scope), asyncio.create_task(work))
        try:
            with gateway.answering(change):
                return await change.work
        except asyncio.CancelledError:
            if change.ended is None:
                raise
            raise change.ended from None
        finally:
            change.work.cancel()

    def present(name: ObjectName) -> Target | None:
        return gateway.catalog.current.adapter(name)

    def group_for(body: LoadLoraBody, before: Target | None, caller: Caller) -> str:
        """Of the pools that are to serve it"""
        bases = gateway.catalog.current.bases(caller)
        if body.base_model_name is not None:
            found = [base for base in bases if base.group.served_name == body.base_model_name]
        elif before is not None:
            return before.group.group
        else:
            found = bases
        if len(found) != 1:
            names = ", ".join(base.group.served_name for base in bases[:MAX_NAMES]) or "none"
            raise wrong("base_model_name", f"name the base model that it is for, one of these: {names}")
        return found[0].group.group

    def refuse_elsewhere(recipe: str, shell: str) -> None:
        settings = gateway.settings
        if settings.metrics_dir is None:  # only the local stack sets it
            raise ChangesNotAllowed(f"On a cluster, adapters are manifests. Do this instead:\n{recipe}")
        if not settings.adapter_folders:
            raise ChangesNotAllowed(
                f"Adapters are not changed over HTTP here. Use `{shell}`, or allow it: MOTET_GATEWAY_ADAPTER_FOLDERS="
                "'[\"/folder/of/adapters\"]' motet up"
            )

    async def loaded(body: LoadLoraBody, caller: Caller) -> Response:
        said, name = body.lora_name, own_name(body.lora_name, caller)
        group = group_for(body, present(name), caller)
        push = f"motet adapter push DIR --as {name.name} -n {name.namespace}"
        refuse_elsewhere(recipe_to_load(name, body.lora_path, group), push)
        if any(base.group.served_name == said for base in gateway.catalog.current.bases(caller)):
            raise wrong("lora_name", f"{said!r} is the name of a base model; choose another one")
        below, folder = folder_below(body.lora_path, gateway.settings.adapter_folders)
        async with changes.turn(name):
            if present(name) is not None and not body.load_inplace:
                raise _already_loaded(said)
            done = await changes.push(name, folder, below=below, group=group, new=not body.load_inplace)
            if _code_of(done) == AlreadyDeclared.mapping.code:  # it is not served now: suspended, or refused
                raise _already_loaded(said)
            pushed = done.document.get("pushed") or {}
            if done.status != 0:
                if pushed.get("new"):
                    await changes.rm(name)  # a name that never served must not stay taken
                raise _not_loaded(done)
            is_known = await until(lambda: (now := present(name)) is not None and _is_there(now, pushed))
            if not (is_known or pushed["ready"]):
                raise InvalidRequest(f"'{said}' is declared, but not served: {pushed['message']}", param="lora_name")
        return PlainTextResponse(f"Success: LoRA adapter '{said}' added successfully.")

    async def unloaded(body: UnloadLoraBody, caller: Caller) -> Response:
        said, name = body.lora_name, own_name(body.lora_name, caller)
        refuse_elsewhere(recipe_to_unload(name), f"motet adapter rm {name.name} -n {name.namespace}")
        async with changes.turn(name):
            done = await changes.rm(name)
            if _is_of_the_stack(done):
                raise Overloaded(done.said, retry_after=5.0)
            if done.status != 0 and present(name) is None:
                raise NotFound(f"The lora adapter '{said}' cannot be found.", param="lora_name")
            if done.status == WRONG_USE:  # a manifest of somebody's declares it
                raise InvalidRequest(done.said, param="lora_name")
            if done.status != 0:
                raise Overloaded(f"The lora adapter '{said}' is not removed yet; the operator's log may say why.")
            await until(lambda: present(name) is None)
        return PlainTextResponse(f"Success: LoRA adapter '{said}' removed successfully.")

    async def until(holds: Callable[[], bool]) -> bool:
        """Until the catalog says so, or for a while: requests that come after this answer find what it says. Returns
        whether it does."""
        heard = asyncio.Event()
        stop = gateway.catalog.listen(heard.set)
        try:
            async with asyncio.timeout(CATALOG_SECONDS):
                while not holds():
                    heard.clear()
                    await heard.wait()
        except TimeoutError:
            return holds()
        else:
            return True
        finally:
            stop()

    return router


def _is_there(target: Target, pushed: dict[str, Any]) -> bool:
    """A pool without runners checks nothing: then the name alone is there."""
    return not pushed["ready"] or target.adapter_digest == pushed["digest"]


def _is_of_the_stack(done: Done) -> bool:
    """Whether it failed at a full disk, say, or a stack that does not run: that is not for who asks to correct."""
    return done.status == WRONG_USE and bool(done.said) and _code_of(done) != SetupError.mapping.code


def _code_of(done: Done) -> object:
    return (done.document.get("error") or {}).get("code")


def _already_loaded(name: str) -> InvalidRequest:
    """In vLLM's words"""
    return InvalidRequest(
        f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
        "'load_inplace' to True.",
        param="lora_name",
    )


def _not_loaded(done: Done) -> MotetError:
    check, pushed = (done.document.get(name) or {} for name in ("check", "pushed"))
    if _is_of_the_stack(done):
        return Overloaded(done.said, retry_after=5.0)
    if pushed:
        return InvalidRequest(pushed["message"], param="lora_path")
    if not check:
        return InvalidRequest(done.said, param="lora_path") if done.said else Internal("The push has said nothing.")
    if not check["digest"] and not check["reason"]:  # not there, or outside of what may be read
        return NotFound(check["message"], param="lora_path")
    return InvalidRequest(check["message"], param="lora_path")
