"""Which of several objects decides where only one can: for a group of pools, about a model name, in a full pool.

The one that decided in the last written status goes on deciding. Creation times alone would not do: a restored object
is a new one. Otherwise the older object decides, and of two of the same second the one whose name comes first.
"""

from collections.abc import Iterable
from typing import TypeVar

from motet_operator.reconcile.view import AdapterObject, PoolObject

Declared = TypeVar("Declared", PoolObject, AdapterObject)


def by_seniority(objects: Iterable[Declared]) -> list[Declared]:
    return sorted(objects, key=lambda one: (not one.decided, one.age, one.resource.object_name))
