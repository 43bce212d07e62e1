"""Defects of loading an adapter, planted one at a time: no proof may pass any of them [proof_missed = 0].

Each changes what the product's own loader does; the proof knows nothing of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partialmethod
from typing import Any

import pytest
import torch

from motet_kernels import RunLayout
from motet_kernels.int8_layout import Int8Layout
from motet_runner.adapters import expected_results, host_load
from motet_runner.adapters.host_load import BaseLinear, HostLoad
from motet_runner.adapters.layout import LoraLinear
from motet_runner.execute.adapters.adapter_uploads import AdapterLoads
from motet_runner.memory.copy_stream import CopyStream

Plant = Callable[[pytest.MonkeyPatch], None]
Read = Callable[[HostLoad, Sequence[LoraLinear], object, torch.Tensor], None]
"""As HostLoad._read_together"""

LAYER = "model.layers.1."


def reads(change: Callable[[dict[str, LoraLinear], LoraLinear], LoraLinear | None]) -> Plant:
    """`change` gets all linears of the adapter and one of them → what is read in its place; None: nothing"""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        read: Read = vars(HostLoad)["_read_together"]

        def mutant(self: HostLoad, linears: Sequence[LoraLinear], matrices: object, run: torch.Tensor) -> None:
            every = {one.module: one for one in self._adapter.linears}
            changed = (change(every, linear) for linear in linears)
            read(self, [one for one in changed if one is not None], matrices, run)

        monkeypatch.setattr(HostLoad, "_read_together", mutant)

    return plant


def writes(change: Callable[[RunLayout, torch.Tensor, str], None]) -> Plant:
    """`change` is made to the run after each linear is written."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        read: Read = vars(HostLoad)["_read_together"]

        def mutant(self: HostLoad, linears: Sequence[LoraLinear], matrices: object, run: torch.Tensor) -> None:
            for linear in linears:
                read(self, [linear], matrices, run)
                change(self.layout, run, linear.module)

        monkeypatch.setattr(HostLoad, "_read_together", mutant)

    return plant


def of_written(change: Callable[..., tuple[torch.Tensor, torch.Tensor, float]]) -> Plant:
    """`change` gets A, B and the scale of one linear in each layer, as they would be written."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(RunLayout, "write_alike", partialmethod(_write_alike, RunLayout.write_alike, change))
        monkeypatch.setattr(Int8Layout, "write", partialmethod(_write, Int8Layout.write, change))

    return plant


def _write_alike(
    self: RunLayout, write: Callable[..., None], change: Callable[..., Any], run: Any, linears: Sequence[str], *of: Any
) -> None:
    each = [
        change(*of_one) if linear.startswith(LAYER) else of_one for linear, *of_one in zip(linears, *of, strict=True)
    ]
    a, b, scales = zip(*each, strict=True)
    write(self, run, linears, torch.stack(a), torch.stack(b), scales)


def _write(
    self: RunLayout, write: Callable[..., None], change: Callable[..., Any], run: Any, linear: str, *of: Any
) -> None:
    write(self, run, linear, *(change(*of) if linear.startswith(LAYER) else of))


def _swapped(first: str, second: str) -> Plant:
    def change(every: dict[str, LoraLinear], linear: LoraLinear) -> LoraLinear:
        for one, other in ((first, second), (second, first)):
            if linear.module.startswith(LAYER) and linear.module.endswith(one):
                return every[linear.module.replace(one, other)]._replace(module=linear.module)
        return linear

    return reads(change)


def _neighbours_a(every: dict[str, LoraLinear], linear: LoraLinear) -> LoraLinear:
    alike = [
        one for one in every.values() if one.a is not None and linear.a is not None and one.a.shape == linear.a.shape
    ]
    return linear._replace(a=alike[alike.index(linear) - 1].a) if linear.module.startswith(LAYER) else linear


def _other_layer(every: dict[str, LoraLinear], linear: LoraLinear) -> LoraLinear:
    other = every.get(linear.module.replace("layers.1", "layers.0"))
    return linear if other is None else other._replace(module=linear.module)


def _missing(every: dict[str, LoraLinear], linear: LoraLinear) -> LoraLinear | None:
    return None if linear.module == max(every) else linear


def _junk_in_padding(layout: RunLayout, run: torch.Tensor, linear: str) -> None:
    for matrix in layout.matrices(run, linear):
        unused = ~matrix.bool().any(1)
        matrix[unused] = 1


def _a_column_of_zeros(layout: RunLayout, run: torch.Tensor, linear: str) -> None:
    layout.matrices(run, linear)[1][:, 5] = 0


def _junk_elsewhere(layout: RunLayout, run: torch.Tensor, linear: str) -> None:
    """In the linears that come after it, before they are written"""
    after = list(layout.offsets)[list(layout.offsets).index(linear) + 1 :]
    for one in after:
        for matrix in layout.matrices(run, one):
            matrix.fill_(1)


def _last_rank_lost(layout: RunLayout, run: torch.Tensor, linear: str) -> None:
    a, _ = layout.matrices(run, linear)
    a[int(a.bool().any(1).nonzero().max())] = 0


def _stale_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the run keeps what another adapter has left there: these numbers at other places."""
    copy = CopyStream.copy

    def mutant(self: CopyStream, to: torch.Tensor, of: torch.Tensor) -> None:
        copy(self, to, of)
        stale = to[len(to) // 2 :]
        stale.copy_(stale.roll(64))

    monkeypatch.setattr(CopyStream, "copy", mutant)


def _at_another_page(monkeypatch: pytest.MonkeyPatch) -> None:
    place = vars(AdapterLoads)["_place"]
    monkeypatch.setattr(AdapterLoads, "_place", lambda self, digest, what, page: place(self, digest, what, page - 1))


def _not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A back end that skips the linears that an adapter does not change skips one too many."""
    arrived = vars(AdapterLoads)["_what_arrived"]

    def mutant(self: AdapterLoads, loading: object) -> object:
        what = arrived(self, loading)
        return replace(what, linears=what.linears - {max(what.linears)})

    monkeypatch.setattr(AdapterLoads, "_what_arrived", mutant)


def _no_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived = vars(AdapterLoads)["_what_arrived"]
    monkeypatch.setattr(
        AdapterLoads, "_what_arrived", lambda self, loading: replace(arrived(self, loading), product_rank=0)
    )


def _lengths(change: Callable[..., torch.Tensor]) -> Plant:
    """`change` gets what DoRA's lengths are of → other lengths, wherever the product computes them by its function."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (host_load, expected_results):
            monkeypatch.setattr(module, "norms_of_changed", change, raising=False)

    return plant


def _crossed_once(base: BaseLinear, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (NORMS(base, a, b).square() - (b * base.multiply(a).t().float()).sum(1)).clamp_min(0).sqrt()


NORMS = host_load.norms_of_changed


def _scaling(change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        for layout in (RunLayout, Int8Layout):
            write = layout.write_scaling
            monkeypatch.setattr(
                layout,
                "write_scaling",
                lambda self, run, linear, c, e, write=write: write(self, run, linear, *change(c, e)),
            )

    return plant


PLAIN: dict[str, Plant] = {
    "a scale that is 5 % too large": of_written(lambda a, b, scale: (a, b, scale * 1.05)),
    "the scale applied twice": of_written(lambda a, b, scale: (a, b, scale * scale)),
    "no scale": of_written(lambda a, b, _: (a, b, 1.0)),
    "B transposed": of_written(lambda a, b, scale: (a, b.t().reshape(b.shape), scale)),
    "A transposed": of_written(lambda a, b, scale: (a.t().reshape(a.shape), b, scale)),
    "the ranks of A in another order": of_written(lambda a, b, scale: (a.roll(1, 0), b, scale)),
    "the sign of A": of_written(lambda a, b, scale: (-a, b, scale)),
    "rounded to 5 bits": of_written(lambda a, b, scale: ((a * 32).round() / 32, (b * 32).round() / 32, scale)),
    "a neighbour's A": reads(_neighbours_a),
    "k and v swapped": _swapped("k_proj", "v_proj"),
    "gate and up swapped": _swapped("gate_proj", "up_proj"),
    "another layer": reads(_other_layer),
    "a linear missing": reads(_missing),
    "a linear not named": _not_named,
    "the last rank lost": writes(_last_rank_lost),
    "one output of zeros": writes(_a_column_of_zeros),
    "padding of the rank not zeroed": writes(_junk_in_padding),
    "a part of the slot stale": _stale_part,
    "read from another page": _at_another_page,
}
"""For an adapter of all linears whose rank is no multiple of a tile, and whose scale is neither 0 nor 1"""

SCALED: dict[str, Plant] = {
    "DoRA without the bias": _scaling(lambda c, e: (c, torch.zeros_like(e))),
    "the bias of DoRA with the other sign": _scaling(lambda c, e: (c, -e)),
    "magnitudes ignored": _scaling(lambda c, e: (torch.ones_like(c), e)),
    "magnitudes of the outputs shifted by one": _scaling(lambda c, e: (c.roll(1), e)),
    "what scales ignored": _no_scales,
    "the lengths of the base's rows": _lengths(lambda base, a, b: NORMS(base, a, 0 * b)),
    "the lengths without the scale": _lengths(lambda base, a, b: NORMS(base, a, b / 1.5)),
    "the lengths with the other sign": _lengths(lambda base, a, b: NORMS(base, a, -b)),
    "the lengths with half of what crosses": _lengths(_crossed_once),
}
"""For DoRA on linears with biases"""

OF_SOME = {"junk where the adapter changes nothing": writes(_junk_elsewhere)}
"""For an adapter of the first linears of each layer"""
