"""docs/reference/compatibility.md: what unmodified clients do, from the results of `make clients`."""

from tools.clients.clients import ACTIONS, CLIENTS
from tools.clients.results import RESULTS, Tried, read_results
from tools.reference.markdown import flat, note, table

WORKS, FAILS, NO_WAY = "yes", "**no**", ""


def clients_page() -> str:
    results = read_results()
    tried = {name: results[name] for name in CLIENTS if name in results}
    rows = [
        [CLIENTS[name].title, one.version or "not installable", *(_cell(one, action) for action in ACTIONS)]
        for name, one in tried.items()
    ]
    return "\n".join(
        (
            note(str(RESULTS.relative_to(RESULTS.parents[2]))),
            "# Clients\n",
            flat("""Each client is the published package, unmodified, in an environment of its own; only the base URL is
            ours. It asks `motet up` with the bundled model. An empty cell: the client has no way to do that.""")
            + "\n",
            table(["client", "version", *ACTIONS], rows),
            "What each column means:\n",
            table(["column", "the client"], [[action, what] for action, what in ACTIONS.items()]),
            _red(tried),
        )
    )


def _cell(tried: Tried, action: str) -> str:
    if action not in tried.actions:
        return NO_WAY
    return FAILS if tried.actions[action] else WORKS


def _red(tried: dict[str, Tried]) -> str:
    """Why a cell says no"""
    lines = [
        f"- {CLIENTS[name].title}, {action}: {flat(why)}"
        for name, one in tried.items()
        for action, why in one.actions.items()
        if why
    ]
    lines += [f"- {CLIENTS[name].title}: {flat(one.missing)}" for name, one in tried.items() if one.missing]
    return "## What does not work\n\n" + "\n".join(lines or ["Nothing that was tried."]) + "\n"
