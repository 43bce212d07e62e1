"""The device code for a GPU, in Triton. Most modules here import Triton, which some builds of torch lack: ask
`triton_is_here` first. With TRITON_INTERPRET=1, Triton's interpreter runs the same code on a CPU, slowly, for tests.
"""

from importlib.util import find_spec


def triton_is_here() -> bool:
    """True if the modules of this package can be imported."""
    return find_spec("triton") is not None
