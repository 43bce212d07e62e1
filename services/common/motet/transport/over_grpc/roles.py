"""Which role may call which method. The caller's TLS certificate has its role. On one machine nothing is checked here:
only the owner can open the folder of the sockets (mode 0700).

An attacker who controls one process must not be able to do the work of the others. For example, a runner reads the
files of tenants, and its TLS certificate is in the namespace of its pool. With `Sync` it could replace the whole
catalog.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
import structlog

from motet import tls

log = structlog.get_logger(__name__)

Roles = Mapping[str, frozenset[str]]


def _only(*roles: str) -> frozenset[str]:
    return frozenset(roles)


ANY_ROLE: frozenset[str] = frozenset()
"""Every caller with a TLS certificate of the authority."""

ROLES: Roles = {
    "/motet.api.v1.Scheduler/Serve": _only("gateway"),
    "/motet.api.v1.Scheduler/Attach": _only("runner"),
    "/motet.api.v1.Scheduler/Sync": _only("operator"),
    "/motet.api.v1.Scheduler/Explain": _only("cli", "gateway"),
    "/motet.api.v1.Scheduler/Succeed": _only("scheduler"),
    "/motet.api.v1.Runner/Generate": _only("gateway"),
    "/motet.api.v1.Runner/Assets": _only("gateway"),
    "/motet.api.v1.Supervisor/Watch": _only("runner"),
    "/motet.api.v1.Supervisor/Advise": _only("scheduler"),
    "/motet.api.v1.Predictor/Predict": _only("gateway", "supervisor"),
    "/motet.api.v1.Predictor/Observe": _only("gateway", "supervisor"),
    "/motet.api.v1.Predictor/ExplainEstimate": _only("cli"),
    "/grpc.health.v1.Health/Check": ANY_ROLE,
    "/grpc.health.v1.Health/List": ANY_ROLE,
    "/grpc.health.v1.Health/Watch": ANY_ROLE,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": ANY_ROLE,
}
"""All methods of all services. A method that is missing here is refused to everybody."""


class RoleInterceptor(grpc.aio.ServerInterceptor):
    """Accepts a call if the caller's TLS certificate has one of the method's roles."""

    def __init__(self, roles: Roles) -> None:
        self._roles = roles
        self._logged: set[tuple[str, str]] = set()

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        roles = self._roles.get(method)
        if handler is None or roles is ANY_ROLE:
            return handler

        async def admit(context: Any) -> None:
            caller_roles = roles_of(context)
            if roles is not None and caller_roles & roles:
                return
            who = " and ".join(sorted(caller_roles)) or "no role"
            wanted = " or ".join(sorted(roles)) if roles else "no role"
            if (method, who) not in self._logged:
                self._logged.add((method, who))
                log.warning("call_refused", method=method, caller=who, allowed=wanted)
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED,
                f"{method} is only for the role {wanted}, but the caller's certificate has {who}. Give each component "
                f"the certificate of its own role (<role>.{tls.DOMAIN}).",
            )

        return _guarded(handler, admit)


def roles_of(context: Any) -> frozenset[str]:
    """The roles in the TLS certificate of the caller."""
    names = context.auth_context().get("x509_subject_alternative_name", ())
    found = (name.decode(errors="replace").removesuffix(f".{tls.DOMAIN}") for name in names if name.endswith(_SUFFIX))
    return frozenset(found)


_SUFFIX = f".{tls.DOMAIN}".encode()


def _guarded(handler: Any, admit: Callable[[Any], Awaitable[None]]) -> Any:
    kind = f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
    behaviour = getattr(handler, kind)

    if inspect.isasyncgenfunction(behaviour):

        async def yielding(request: Any, context: Any) -> Any:
            await admit(context)
            async for response in behaviour(request, context):
                yield response

        guarded: Any = yielding
    else:

        async def answering(request: Any, context: Any) -> Any:
            await admit(context)
            return await behaviour(request, context)

        guarded = answering

    return handler._replace(**{kind: guarded})
