"""Who asks. The layer around the application finds it, before anything of a body is read; everybody else reads it."""

from dataclasses import dataclass

from starlette.types import Scope

from motet import keys
from motet.errors import InsufficientScope

_IN_SCOPE = "motet.caller"


@dataclass(frozen=True, slots=True)
class Caller:
    tenant: str
    key_id: str = ""
    """Its id. Empty: nobody needs one."""
    scopes: frozenset[keys.KeyScope] = frozenset(keys.KeyScope)
    sees_all: bool = False
    """Every tenant's adapters, under their long names."""

    def needs(self, scope: keys.KeyScope) -> None:
        """Raises InsufficientScope."""
        if scope not in self.scopes:
            raise InsufficientScope(
                f"This key does not have the scope '{scope}'. An administrator can create a key that has it: "
                f"motet key create --tenant {self.tenant} --scopes {scope}."
            )


ANONYMOUS = Caller("default", sees_all=True)
"""Where no keys are needed: on a loopback address before the first was made, or by `auth: none`."""


def put(scope: Scope, caller: Caller) -> None:
    scope[_IN_SCOPE] = caller


def caller_of(scope: Scope) -> Caller:
    """A path that is served around the layer has none, which is a mistake of ours: it raises KeyError."""
    caller: Caller = scope[_IN_SCOPE]
    return caller
