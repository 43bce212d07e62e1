from collections.abc import Iterator

import pytest

from tests.stack.harness import Stack, copy_of_bundled, running_stack


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One stack for several tests of a module, each of which leaves it as it found it."""
    folder = tmp_path_factory.mktemp("stack")
    manifests = copy_of_bundled(folder / "manifests", adapters=["pirate", "shouting"])
    with running_stack(folder, manifests=manifests) as stack:
        yield stack
