"""The caller of a request. The authentication middleware sets it before a body is read; the routes read it."""

from dataclasses import dataclass, field

from starlette.types import Scope

from motet import keys
from motet.api.v1 import scheduler_pb2
from motet.errors import InsufficientScope

_IN_SCOPE = "motet.caller"


@dataclass(frozen=True, slots=True)
class Caller:
    tenant: str
    key_id: str = ""
    """The id of the API key. Empty: no key is required."""
    scopes: frozenset[keys.KeyScope] = frozenset(keys.KeyScope)
    limits: keys.KeyLimits = keys.NO_LIMITS
    sees_all: bool = False
    """Whether the caller sees every tenant's adapters, under their long names."""
    tenant_uid: str = field(default="", compare=False)
    """Of the namespace that the key is bound to: another one of the same name has another. Empty: the key is bound to
    none."""
    rights: object = field(default=None, compare=False, repr=False)
    """The same object as long as the key's rights do not change; its limits are none."""

    @property
    def account(self) -> scheduler_pb2.KeyAccount | None:
        """Of its key, if that has limits of its own."""
        if not any(self.limits):
            return None
        return scheduler_pb2.KeyAccount(id=self.key_id, limits=scheduler_pb2.Limits(**self.limits._asdict()))

    def needs(self, scope: keys.KeyScope) -> None:
        """Raises InsufficientScope."""
        if scope not in self.scopes:
            raise InsufficientScope(
                f"This key does not have the scope '{scope}'. An administrator can create a key that has it: "
                f"motet key create --tenant {self.tenant} --scopes {scope}."
            )


ANONYMOUS = Caller("default", sees_all=True)
"""The caller if no key is required: on a loopback address before the first key was created, or with `auth: none`."""


def put(scope: Scope, caller: Caller) -> None:
    scope[_IN_SCOPE] = caller


def caller_of(scope: Scope) -> Caller:
    """Raises KeyError for a path that bypasses the middleware, which is a defect."""
    caller: Caller = scope[_IN_SCOPE]
    return caller
