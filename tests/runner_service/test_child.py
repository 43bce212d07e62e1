"""The engine's process before it has made an engine."""

import gc

from motet_runner.engine_process import without_collections


def test_objects_made_without_collections_are_never_scanned() -> None:
    with without_collections():
        assert not gc.isenabled()
        made: list[object] = [[]]
    try:
        assert gc.isenabled()
        assert all(made is not one and made[0] is not one for one in gc.get_objects())
    finally:
        gc.unfreeze()
    assert any(made is one for one in gc.get_objects())
