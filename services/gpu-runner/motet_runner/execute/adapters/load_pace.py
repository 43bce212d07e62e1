"""How much of adapters an iteration takes beside sequences: what can be read and copied in a part of its time. Pure."""

SHARE = 0.1
"""Of an iteration's time"""
SLICE_BYTES = 2 * 1024 * 1024
"""An iteration takes this number of bytes, also where that takes longer."""
MAX_SLICE_BYTES = 16 * 1024 * 1024

_NEW_SHARE = 0.25
"""The weight of the newest figure in an average"""
_MOST_GROWTH = 2.0
"""A long iteration, such as one with a long prompt, says little about the next one."""


class LoadPace:
    def __init__(self) -> None:
        self._iteration = 0.0
        """Seconds of an iteration"""
        self._byte = 0.0
        """Seconds of a processor to read a byte"""

    def iterated(self, seconds: float) -> None:
        self._iteration = _average(self._iteration, seconds)

    def loaded(self, size: int, cpu_seconds: float) -> None:
        """`cpu_seconds`: what the thread took that read `size` bytes. Others that help it do so in the same time. A
        disk that has not answered takes none."""
        self._byte = _average(self._byte, cpu_seconds / size)

    @property
    def seconds(self) -> float:
        """How long an iteration may wait for loads"""
        return SHARE * self._iteration

    @property
    def bytes(self) -> int:
        """How many bytes an iteration may read, and copy"""
        if not self._byte:
            return SLICE_BYTES
        return int(min(MAX_SLICE_BYTES, max(SLICE_BYTES, self.seconds / self._byte)))


def _average(average: float, new: float) -> float:
    if not average:
        return new
    return average + _NEW_SHARE * (min(new, _MOST_GROWTH * average) - average)
