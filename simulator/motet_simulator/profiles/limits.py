"""How large a simulated runner may be. The command line names these limits, so nothing is imported here."""

MAX_ITERATION_SECONDS = 60.0
"""Of an iteration. A longer one says that the machine slept."""

MAX_PAGES = 1 << 22
"""67 million tokens. Each simulated runner has a list of its pages."""

MAX_PAGES_SIMULATED = 1 << 26
"""Of all runners of a simulation. They take about 50 bytes each."""

MAX_PLACES = 1 << 20
"""For sequences or adapters."""

MAX_BYTES = 1 << 40
"""Of a page, or of a row of an adapter."""
