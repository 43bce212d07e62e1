"""The compiled kernels of a CPU."""

import structlog

from motet_kernels.cpp import Built, CppBackend, Library, PagedAttention
from motet_runner.execute.adapters.add_lora import AddLora
from motet_runner.execute.kernels.roles import BackEnd
from motet_runner.execute.pack.linear_packing import LibraryPacking

log = structlog.get_logger(__name__)


def compiled_back_end(library: Library, instructions: str) -> BackEnd:
    return BackEnd(
        f"cpp ({instructions})",
        AddLora(
            lambda groups, memory, dtype, _: CppBackend(groups, memory, dtype, library=library),
            CppBackend.tile,
            CppBackend.copies,
        ),
        lambda pages: PagedAttention(library, pages),
        LibraryPacking(library),
        library=library,
        has_threads=True,
    )


def of_built(built: Built) -> BackEnd:
    if built.damaged:
        log.warning("kernels_made_again", damaged=built.damaged)
    if built.skipped:
        log.warning("faster_kernels_skipped", reasons=built.skipped, serving=built.instructions)
    if built.unmarked:
        log.info("kernels_tested_at_each_start", reason=built.unmarked)
    return compiled_back_end(built.library, built.instructions)
