"""What changes the logits of rows, without vLLM. `test_processors` has the same histories with vLLM's two runners."""

from copy import deepcopy
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch

from motet_runner.external.vllm.changed_logits import change_logits
from motet_runner.external.vllm.driven import Ask, Penalties, Produced
from motet_runner.external.vllm.row_changes import ChangedRows, RowChanges
from tests.runner.external.row_histories import ROWS, VOCABULARY, History

ASK = Ask("a", (5, 6, 7, 7), {}, 0, "")


@pytest.mark.parametrize("repeats_later", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_rows_draw_from_what_their_masks_and_penalties_leave(seed: int, *, repeats_later: bool) -> None:
    history, changed = History(seed), ChangedRows()
    for _ in range(30):
        history.change()
        history.allow()
        given = history.logits()
        logits = torch.from_numpy(given.copy())
        rows = {}
        for at, one in history.running.items():
            if not repeats_later:
                logits[at] = torch.from_numpy(one.repeated(given[at]))
            if (row := changed.row_of(one.extra_args, one.repetition if repeats_later else 1.0)) is not None:
                rows[at] = row.read()
        then = deepcopy(history.running)
        history.draw()  # the engine's process may be ahead
        history.allow()
        change_logits(logits, rows)
        for at in range(ROWS):
            found, one = logits[at].numpy(), then.get(at)
            if one is None:
                np.testing.assert_array_equal(found, given[at])
                continue
            found = one.repeated(found) if repeats_later else found
            np.testing.assert_allclose(found, one.expected(given[at]), atol=1e-5)


def test_a_row_without_a_mask_or_penalty_pays_nothing() -> None:
    changes = RowChanges(1, VOCABULARY, 8)
    for name in "abc":  # they take no row of the one that there is
        assert changes.begin(ASK._replace(name=name, output_tokens=2)) is None
    assert ChangedRows().row_of(None) is None
    assert ChangedRows().row_of({"of another": 1}) is None


def test_delivered_tokens_are_penalised_and_the_prompt_is_not() -> None:
    changes = RowChanges(2, VOCABULARY, 8)
    told = changes.begin(ASK._replace(penalties=Penalties(0.5, 0.25), output_tokens=3))
    row = ChangedRows().row_of(told)

    def penalised() -> dict[int, float]:
        read = row.read()
        return dict(zip(read.tokens.tolist(), read.amounts.tolist(), strict=True))

    assert penalised() == {6: 0.75, 7: 1.0}
    changes.take([Produced("a", 6, None, ended=False), Produced("other", 9, None, ended=False)])
    assert penalised() == {6: 1.0, 7: 1.0}
    assert row.read().bits is None


def test_a_row_of_a_request_that_has_ended_begins_anew() -> None:
    changes = RowChanges(1, VOCABULARY, 8)
    changes.begin(ASK._replace(masked=True, penalties=Penalties(1.0, 0.0), output_tokens=2))
    changes.take([Produced("a", 6, None, ended=True)])
    row = ChangedRows().row_of(changes.begin(ASK._replace(name="b", penalties=Penalties(1.0, 0.0))))
    assert row.read().bits is None
    assert len(row.read().tokens) == 0


def test_a_reader_sees_that_a_request_has_ended_also_when_another_has_its_row() -> None:
    changes = RowChanges(1, VOCABULARY, 8)
    first = ChangedRows().row_of(changes.begin(ASK._replace(masked=True)))
    assert not first.ended
    changes.take([Produced("a", 6, None, ended=True)])
    assert first.ended
    second = ChangedRows().row_of(changes.begin(ASK._replace(name="b", masked=True)))
    assert first.ended
    assert not second.ended
    changes.end(["b"])
    assert second.ended


def test_another_process_sees_what_is_written() -> None:
    changes = RowChanges(1, VOCABULARY, 8)
    told = changes.begin(ASK._replace(masked=True))
    with get_context("spawn").Pool(1) as pool:
        for allowed in (b"\x21", b"\xff" * 26):
            changes.allow("a", allowed)
            assert pool.apply(bits_of, (told,)) == allowed.ljust(26, b"\0")


def bits_of(told: dict[str, object]) -> bytes:
    return ChangedRows().row_of(told).read().bits.tobytes()


def test_nothing_is_left_of_its_memory() -> None:
    def files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = files()
    changes = RowChanges(4, VOCABULARY, 8)
    assert files() > before
    del changes
    assert files() == before
