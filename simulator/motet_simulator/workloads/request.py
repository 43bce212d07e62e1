"""One request of a workload, with the length of its answer: what a trace knows afterwards."""

from dataclasses import dataclass

from motet.domain import PAGE_TOKENS

BLOCK_TOKENS = 512
"""Of a block of a prompt, unless the workload says another size: that of Mooncake's traces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRequest:
    at: float
    """Seconds after the workload's beginning."""
    prompt_tokens: int
    output_tokens: int
    max_tokens: int = 0
    """That its client asks for. 0: the trace does not say."""
    tenant: str = ""
    adapter: str = ""
    """Empty: the base model."""
    request_class: str = "standard"
    blocks: tuple[int, ...] = ()
    """Names of the prompt's blocks, which many prompts may begin with."""
    block_tokens: int = BLOCK_TOKENS

    def prompt(self, number: int) -> tuple[int, ...]:
        """Token ids: equal where blocks are, and nowhere else. `number` is the request's own."""
        own = -1 - number
        if not self.blocks:
            return (_token(own),) * self.prompt_tokens
        tokens: list[int] = []
        for block in self.blocks:
            if len(tokens) + self.block_tokens > self.prompt_tokens:
                break
            tokens += (_token(block),) * self.block_tokens
        tokens += (_token(own),) * (self.prompt_tokens - len(tokens))
        return tuple(tokens)


def _token(name: int) -> int:
    """Ids of named blocks are even, those of one request's own tokens are odd. All fit into 32 bits."""
    return (2 * name if name >= 0 else 2 * -name - 1) % (1 << 31)


assert BLOCK_TOKENS % PAGE_TOKENS == 0, "equal blocks are equal pages"
