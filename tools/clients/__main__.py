"""Tries clients against the product, unmodified (`make clients`). Writes what they did to `results.json` beside this.

Each client has an environment of its own in the user's cache. The product runs with its bundled model.

    python -m tools.clients [--only openai curl]
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from testbed.local_stack import REPORTS_AT_ONCE, copy_of_bundled, running_stack
from tools.clients.breaking import breaking_proxy
from tools.clients.clients import ACTIONS, CLIENTS
from tools.clients.environments import Installed, NotInstallable, install
from tools.clients.results import RESULTS, Tried, read_results, write_results
from tools.clients.trial import ADAPTER, CALLER, questions, try_one


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--only", nargs="+", choices=list(CLIENTS), help="only these clients; others keep their results"
    )
    given = parser.parse_args()
    names = given.only or list(CLIENTS)
    results = read_results() if RESULTS.exists() else {}
    ready: dict[str, Installed] = {}
    for name in names:
        try:
            ready[name] = install(name, CLIENTS[name], dict(os.environ))
        except NotInstallable as error:
            say(f"{name}: not installable. {error}")
            results[name] = Tried(version="", actions={}, missing=str(error))
    with tempfile.TemporaryDirectory(prefix="motet-clients-") as scratch:
        manifests = copy_of_bundled(Path(scratch) / "manifests", adapters=[ADAPTER, CALLER])
        with (
            running_stack(Path(scratch), manifests=manifests, env=REPORTS_AT_ONCE) as stack,
            breaking_proxy(stack.port) as broken,
        ):
            asked = questions(stack, broken)
            for name, installed in ready.items():
                actions = [action for action in ACTIONS if action in CLIENTS[name].does]
                results[name] = tried = Tried(installed.version, try_one(installed.command, actions, asked, stack), "")
                say(
                    f"{name} {tried.version}: "
                    + ", ".join(f"{one} {why or 'works'}" for one, why in tried.actions.items())
                )
    write_results({name: results[name] for name in CLIENTS if name in results})
    say("Run `make generate` for the pages.")
    return int(any(why for name in ready for why in results[name].actions.values()))


if __name__ == "__main__":
    raise SystemExit(main())
