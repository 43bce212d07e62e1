"""Which kernels `engine.kernels` allows, and the notes about back ends that do not serve. Pure: callers say what is
available and what passed its test.

With `auto` on a GPU, the Triton back end serves if it passes a test on the model; if not, torch's back end serves. With
`auto` on a CPU, torch's back end serves while the compiled back end is built.
"""

from motet.errors import SetupError

KNOWN = ("auto", "torch", "cpp", "triton", "exact")
BEING_BUILT = "the compiled kernels are being built"


class ChoicePolicy:
    def __init__(self, kernels: str, device: str, *, adapter_dtype: str, has_folder: bool) -> None:
        """`has_folder`: True if compiled kernels have a folder. Raises SetupError for an impossible choice."""
        if kernels not in KNOWN:
            raise SetupError(f"engine.kernels {kernels!r} is unknown. Choose one of {', '.join(KNOWN)}.")
        self.int8 = _is_int8(adapter_dtype, kernels)
        self.asked = "triton" if self.int8 else kernels
        on_cpu, auto = device.startswith("cpu"), self.asked == "auto"
        if self.asked in ("cpp", "exact") and not on_cpu:
            raise SetupError(f"engine.kernels is {kernels}, which computes on a CPU, and the device is {device}.")
        if self.asked == "cpp" and not has_folder:
            raise SetupError("engine.kernels is cpp, and there is no folder for compiled kernels.")
        self.wants_triton = self.asked == "triton" or (auto and not on_cpu)
        self.builds_meanwhile = auto and on_cpu and has_folder
        self.packs_at_once = on_cpu and not self.builds_meanwhile
        """True if weights are packed for torch at the start. If compiled kernels follow, that would waste time."""
        self.note = ""
        """For people: which kernels do not serve, or which weights are not packed, and why"""

    def not_triton(self, reason: str) -> None:
        """The Triton back end is not available, or does not pass its test."""
        if self.asked == "triton":
            asked = "engine.adapter_dtype is int8, whose" if self.int8 else "engine.kernels is triton, and its"
            raise SetupError(f"{asked} kernels cannot serve: {reason}. Or use auto.")
        self.note = f"the GPU's kernels do not serve: {reason}"

    def not_compiled(self, reason: str) -> None:
        note = (
            f"there are no compiled kernels: {reason} (MOTET_RUNNER_COMPILER names a compiler, "
            "MOTET_RUNNER_KERNEL_CACHE the folder)"
        )
        if self.asked == "cpp":
            raise SetupError(f"engine.kernels is cpp, and {note}.")
        self.note = note

    def compiled(self) -> None:
        self.note = "the compiled kernels are tested, and serve soon"

    def refused(self, fault: str) -> None:
        """The compiled back end cannot serve this model."""
        if self.asked == "cpp":
            raise SetupError(f"engine.kernels is cpp, and its kernels cannot serve: {fault}. Use auto.")
        self.not_changed(fault)

    def not_changed(self, reason: str) -> None:
        self.note = f"the compiled kernels do not serve: {reason}"

    def serve(self, note: str, *, compiled: bool) -> None:
        """Kernels serve. `note`: which of their parts do not serve, and why. `compiled`: True for the compiled
        kernels"""
        if note or compiled:
            self.note = note


def _is_int8(adapter_dtype: str, kernels: str) -> bool:
    if adapter_dtype not in ("auto", "int8"):
        raise SetupError(f"engine.adapter_dtype {adapter_dtype!r} is unknown. Choose one of auto, int8.")
    if adapter_dtype == "int8" and kernels not in ("auto", "triton"):
        raise SetupError(
            f"engine.adapter_dtype is int8, which only the kernels triton compute with, and engine.kernels is "
            f"{kernels}. Change one of them to auto."
        )
    return adapter_dtype == "int8"
