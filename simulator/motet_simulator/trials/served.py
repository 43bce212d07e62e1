"""Which revisions of adapters a gateway serves: what it serves never gets older."""

from collections.abc import Mapping, Sequence

from motet_gateway.catalog import Catalog
from motet_simulator.trials.adapters import digest_of
from motet_simulator.trials.operator import TENANT
from motet_simulator.trials.plan import AdapterChange


class ServedRevisions:
    """What one process of a gateway has served. `history`: all that was ever declared about each adapter."""

    def __init__(self, history: Mapping[str, Sequence[AdapterChange]]) -> None:
        self._history = history
        self._revision = (0, 0)
        self._newest: dict[str, int] = {}
        """By adapter: which change of it is served, or a later one. Several may have had the same bytes."""

    def problem_of(self, catalog: Catalog) -> str:
        """What is wrong with the next catalog; empty if nothing is."""
        if catalog.revision < self._revision:
            return f"serves catalog {catalog.revision} after {self._revision}"
        self._revision = catalog.revision
        served = {one.ref.name: one.digest for one in catalog.adapters if one.ref.namespace == TENANT}
        for name, history in self._history.items():
            newest = self._newest.get(name, 0)
            later = [one for one in history if one.number >= newest]  # a smaller plan lacks some of them
            if name not in served:
                # It was deleted, unless this catalog is of before its first change: then later ones count as well.
                number = next((one.number for one in later if one.deleted), newest)
            elif digest := served[name]:
                fitting = (one.number for one in later if not one.deleted and digest_of(one.content) == digest)
                number = next(fitting, -1)
                if number < 0:
                    return f"serves {digest[-4:]} of {name} after its change {newest}"
            else:
                continue
            self._newest[name] = number
        return ""
