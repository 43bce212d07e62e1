"""`benchmarks.page` measures what the page shows."""

from benchmarks import engine, vllm_peer
from benchmarks.page import PARTS
from tools.performance.tables import TABLES

NOT_TIMED = {"counted"}


def cases(module: str, *options: str) -> set[str]:
    commands = [part.command.split() for part in PARTS.values()]
    chosen = [words for words in commands if words[0] == module and all(option in words for option in options)]
    after = [words[words.index("--cases") + 1 :] for words in chosen]
    known = {*vllm_peer.CASES, vllm_peer.SERVED, *engine.CASES}
    return {word for words in after for word in words if word in known}


def test_its_parts_have_every_case_that_has_a_row() -> None:
    assert cases("vllm_peer", "cpp") == {*vllm_peer.CASES, vllm_peer.SERVED}
    assert cases("vllm_peer", "torch") == {"base", "identical", "skewed", "distinct"}
    assert cases("engine") == {*engine.CASES} - {"gained", "dora", "host", "program"}
    modules = {part.command.split()[0] for part in PARTS.values()}
    assert modules == {"vllm_peer", "llama_cpp_peer", "engine", "lora_op", "served"}
    assert sum(name not in NOT_TIMED for name in TABLES) == 11
