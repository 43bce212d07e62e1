"""Large parts of files that were moved from `make test` to `make soak` to save time, why, and what of each file stays
in `make test`."""

import ast
from dataclasses import dataclass

import pytest

from testbed.tree import ROOT


@dataclass(frozen=True)
class Moved:
    file: str
    soak: str
    """The function that does it in a soak, with each case or with the marked ones."""
    stays: str
    """The function that stays in `make test`; it may be the same one, with fewer cases."""
    why: str

    @property
    def functions(self) -> dict[str, str]:
        """The decorators of the file's functions, as they are written."""
        tree = ast.parse((ROOT / self.file).read_text())
        found = [one for one in tree.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
        return {one.name: "\n".join(map(ast.unparse, one.decorator_list)) for one in found}


MOVED = [
    Moved(
        "tests/runner/test_sanitizers.py",
        "test_sanitizers_find_what_is_planted_and_nothing_else",
        "test_sanitizers_have_nothing_to_report_of_some_of_the_kernels",
        "Most tests of the kernels with sanitizers, which take three minutes, and the random work of an engine, whose "
        "start takes much longer than its work. Some of the adapters', attention's and the program's stay, and the "
        "promises of threads.",
    ),
    Moved(
        "tests/runner/test_families.py",
        "test_tokens_and_logits_equal_generate",
        "test_tokens_and_logits_equal_generate",
        "Torch's kernels with adapters for twelve families whose linears, ropes and attention six others have, too. "
        "test_models.py has torch's kernels for all families.",
    ),
    Moved(
        "tests/kernels/test_gpu_compiles.py",
        "test_add_lora_compiles_and_all_its_programs_fit_at_once",
        "test_add_lora_compiles_and_all_its_programs_fit_at_once",
        "Each kernel takes a compiler four seconds: every group, type and form of adapters is compiled, and not each "
        "of them with all others.",
    ),
    Moved(
        "tests/runner/test_decode_graphs.py",
        "test_many_swaps_of_adapters_need_no_other_recording",
        "test_many_swaps_of_adapters_need_no_other_recording",
        "A thousand swaps: a hundred of them already swap each adapter out and in again in batches of all kinds.",
    ),
    Moved(
        "tests/kernels/test_peepholes.py",
        "test_what_is_brought_together_keeps_its_bits",
        "test_what_is_brought_together_keeps_its_bits",
        "Half of what nearly has a shape, for each type of numbers.",
    ),
    Moved(
        "tests/simulator/plan/test_leaps.py",
        "test_leaping_is_the_same_as_stepping",
        "test_leaping_is_the_same_as_stepping",
        "Eighty more of a hundred random clusters: each takes half a second, and they differ only in what was drawn.",
    ),
    Moved(
        "tests/simulator/test_trials.py",
        "test_nothing_goes_wrong_in_ten_thousand_trials",
        "test_nothing_goes_wrong_in_the_first_trials",
        "All but forty of ten thousand trials: each takes most of a second. Of twelve mended defects that are put "
        "back, the first forty find eight, and test_defects.py runs the seeds of the other four.",
    ),
]


@pytest.mark.parametrize("moved", MOVED, ids=lambda one: one.soak)
def test_what_was_moved_runs_in_a_soak_and_a_short_version_stays(moved: Moved) -> None:
    functions = moved.functions
    assert "pytest.mark.soak" in functions[moved.soak]
    stays = functions[moved.stays].splitlines()
    assert "pytest.mark.soak" not in stays, f"all of {moved.stays} runs in a soak only"
    assert moved.stays == moved.soak or not any("mark.soak" in one for one in stays)
    assert moved.why.endswith(".")
