"""Triton's interpreter, which runs the GPU's kernels on a CPU, without what it computes for nobody."""

from dataclasses import replace


def leave_out_what_nobody_reads() -> None:
    """For each sum, difference and product of integers it computes in 64 bits whether it overflows. It would say so
    with `debug` alone, which is never on."""
    from triton.runtime.interpreter import interpreter_builder

    if not interpreter_builder.options.debug:
        interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)
