"""Defects that the sanitizers must find, each in a copy of the product's sources."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from tools.sanitize.builds import PRODUCT


class Changed(Exception):
    """The sources no longer have the text that a defect replaces."""


@dataclass(frozen=True)
class Defect:
    what: str
    file: str
    replaced: tuple[tuple[str, str], ...]
    """Texts, of which the file has one each, and what comes in their place"""
    only_with: str = ""
    """The instructions that the changed lines are for; empty: they are for all"""

    def plant(self, into: Path) -> Path:
        """A folder with the sources and this defect"""
        shutil.copytree(PRODUCT, into)
        path = into / self.file
        text = path.read_text(encoding="utf-8")
        for old, new in self.replaced:
            if text.count(old) != 1:
                raise Changed(f"{self.file} has {text.count(old)} times what {self.what!r} replaces: {old}")
            text = text.replace(old, new)
        path.write_text(text, encoding="utf-8")
        return into


DEFECTS = (
    Defect(
        "it reads one number past the end of a row of logits",
        "largest.h",
        (("for (int64_t i = 0; i < count; ++i) {", "for (int64_t i = 0; i <= count; ++i) {"),),
    ),
    Defect(
        "it writes a whole vector of products where fewer have room",
        "lora_products.h",
        (("memcpy(into + k, &totals, count * sizeof(float));", "memcpy(into + k, &totals, sizeof totals);"),),
    ),
    Defect(
        "rows of a linear's results are farther apart than their buffer's",
        "program.cpp",
        (("there.row / (int64_t)sizeof(T)};", "there.row / (int64_t)sizeof(T) * 3 / 2};"),),
    ),
    Defect(
        "it looks at the page after a sequence's last one",
        "attention.cpp",
        (("end_page = (position + rows - 1) / PAGE + 1;", "end_page = (position + rows - 1) / PAGE + 2;"),),
    ),
    Defect(
        "a thread's memory is freed before it is used",
        "program.cpp",
        (("static thread_local std::vector<char> memory;", "std::vector<char> memory;"),),
    ),
    Defect(
        "a thread's memory begins at an odd address",
        "program.cpp",
        (("(memory.data()) % 64);", "(memory.data()) % 64 - 1);"),),
    ),
    Defect(
        "no barrier between the linear and what follows it",
        "program.cpp",
        (("        stages_.end_stage(LINEARS);\n", ""),),
    ),
    Defect(
        "threads share what each needs for itself",
        "attention.cpp",
        (("thread_local Scratch scratch;", "static Scratch scratch;"),),
    ),
    Defect(
        "a stage ends before its numbers are visible",
        "parallel.cpp",
        (
            ("return all_done == stage.units;", "return all_done.load(std::memory_order_relaxed) == stage.units;"),
            ("all_done.fetch_add(computed)", "all_done.fetch_add(computed, std::memory_order_relaxed)"),
        ),
    ),
    Defect(
        "a helper works on a job that its caller has freed",
        "parallel.cpp",
        (
            ("std::shared_ptr<Job> job;\n", "Job *job;\n"),
            ("                job = job_;\n", "                job = job_.get();\n"),
        ),
    ),
    Defect(
        "a tile reads inputs that rows of x and a panel do not have",
        "tiles.h",
        (
            ("whole = inputs / INPUTS * INPUTS;", "whole = (inputs + INPUTS - 1) / INPUTS * INPUTS;"),
            ("if (const int64_t left = inputs - whole) {", "if (const int64_t left = 0) {"),
        ),
        only_with="amx-bf16",
    ),
    Defect(
        "a tile reads weights behind those of a block of keys",
        "tiled_attention.h",
        (("add_values(column, both, (pages_seen + 1) / 2);", "add_values(column, both, pages_seen / 2 + 1);"),),
        only_with="amx-bf16",
    ),
)  # fmt: skip


def defects_of(instructions: str) -> tuple[Defect, ...]:
    """Those that change what these instructions compute"""
    return tuple(one for one in DEFECTS if one.only_with in {"", instructions})
