"""GPT-J takes its attention from its own table, not from `ALL_ATTENTION_FUNCTIONS`. `register` puts our attention into
that table."""

import torch
from transformers.models.gptj import modeling_gptj

from motet_runner.execute.forward import attention


class Attention(modeling_gptj.GPTJAttention):  # type: ignore[misc] # transformers is not typed here
    """The model's own code projects and rotates; our code attends."""

    def _attn(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, None]:
        """query, key, value [1, heads, rows, dim] → [1, heads, rows, dim]"""
        attended, _ = attention.attend(self, query, key, value, attention_mask)
        return attended.transpose(1, 2), None


def register() -> None:
    modeling_gptj.GPTJ_ATTENTION_CLASSES[attention.NAME] = Attention
