"""What a profile is of. Step times of another machine, model or set of kernels say nothing here."""

from pathlib import Path

from motet.errors import SetupError
from motet_simulator.profiles.profile import Profile


def this_machine() -> str:
    from motet_runner.machine import machine_name

    return machine_name()


def check_identity(profile: Profile, file: Path, *, machine: str = "", model: str = "", kernels: str = "") -> None:
    """Raise SetupError if the profile is of something else than what is planned for. Empty: anything."""
    for what, own, wanted in (
        ("machine", profile.machine, machine),
        ("model", profile.model, model),
        ("kernels", profile.kernels, kernels),
    ):
        if wanted and own != wanted:
            raise SetupError(
                f"{file} is of the {what} {own!r}, and the plan is for {wanted!r}. Measure a profile there, or take "
                "this one with --anyway."
            )
