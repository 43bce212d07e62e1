"""Each role is given to a back end by itself. All of it is pure: no back end computes here."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from motet.errors import SetupError
from motet_runner.execute.kernels.choice_policy import ChoicePolicy
from motet_runner.execute.kernels.roles import BackEnd, by_role


def back_end(name: str, *roles: str, **more: Any) -> BackEnd:
    return replace(BackEnd(name, has_threads=True, **{role: f"{role} of {name}" for role in roles}), **more)


TORCH = back_end("torch", "add_lora", "attention", room_bytes=lambda _: 1)
ALL = ("add_lora", "attention", "packing", "makes_forward")


def test_one_back_end_may_have_all_roles() -> None:
    kernels = by_role(back_end("new", *ALL, packing=SimpleNamespace(only_fused=True), room_bytes=lambda _: 2), TORCH)
    assert (kernels.name, kernels.makes_forward, kernels.packing.only_fused) == ("new", "makes_forward of new", True)
    assert kernels.room_bytes(None) == 2


@pytest.mark.parametrize("role", ["add_lora", "attention"])
def test_a_back_end_may_have_one_role_and_torch_has_the_others(role: str) -> None:
    kernels = by_role(back_end("new", role, has_threads=False), TORCH)
    other = ({"add_lora", "attention"} - {role}).pop()
    assert (getattr(kernels, role), getattr(kernels, other)) == (f"{role} of new", f"{other} of torch")
    assert (kernels.name, kernels.packing, kernels.makes_forward) == ("new + torch", None, None)
    assert (kernels.has_threads, kernels.room_bytes(None)) == (False, 1)


@pytest.mark.parametrize("only_fused", [False, True])
@pytest.mark.parametrize("role", ["add_lora", "attention"])
def test_a_forward_pass_serves_only_beside_its_own_attention_and_adapters(role: str, only_fused: bool) -> None:
    packing = SimpleNamespace(only_fused=only_fused)
    rest = back_end("whole", *ALL, packing=packing, library="its library")
    kernels = by_role(back_end("new", role), rest, TORCH)
    assert (kernels.makes_forward, kernels.library) == (None, None)
    assert kernels.packing is (None if only_fused else packing)
    assert (kernels.name, kernels.compiled) == ("new + whole", True)


def policy(kernels: str, device: str = "cpu", *, adapter_dtype: str = "auto", has_folder: bool = True) -> ChoicePolicy:
    return ChoicePolicy(kernels, device, adapter_dtype=adapter_dtype, has_folder=has_folder)


@pytest.mark.parametrize(
    ("of", "triton", "builds", "packs"),
    [
        (policy("auto"), False, True, False),
        (policy("auto", has_folder=False), False, False, True),
        (policy("auto", "cuda"), True, False, False),
        (policy("torch"), False, False, True),
        (policy("torch", "cuda"), False, False, False),
        (policy("triton"), True, False, True),
        (policy("auto", adapter_dtype="int8"), True, False, True),
        (policy("cpp"), False, False, True),
    ],
)
def test_what_is_asked_for_says_what_is_tested_and_built(
    of: ChoicePolicy, triton: bool, builds: bool, packs: bool
) -> None:
    assert (of.wants_triton, of.builds_meanwhile, of.packs_at_once) == (triton, builds, packs)


def test_what_was_asked_for_by_name_is_an_error_where_it_does_not_serve_and_a_note_with_auto() -> None:
    for kernels, event, says in (
        ("triton", ChoicePolicy.not_triton, "the GPU's kernels do not serve: it is broken"),
        ("cpp", ChoicePolicy.refused, "the compiled kernels do not serve: it is broken"),
        ("cpp", ChoicePolicy.not_compiled, "there are no compiled kernels: it is broken (MOTET_RUNNER_COMPILER"),
    ):
        auto = policy("auto")
        event(auto, "it is broken")
        assert auto.note.startswith(says)
        with pytest.raises(SetupError, match=f"engine.kernels is {kernels}, and .*it is broken"):
            event(policy(kernels), "it is broken")


def test_a_note_stays_until_what_was_waited_for_serves() -> None:
    of = policy("auto")
    of.refused("it is broken")
    of.serve("", compiled=False)
    assert of.note == "the compiled kernels do not serve: it is broken"
    of.compiled()
    of.serve("", compiled=True)
    assert of.note == ""
    of.serve("some weights are not packed", compiled=True)
    assert of.note == "some weights are not packed"
