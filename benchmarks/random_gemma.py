"""A random Gemma of the size of a `LlamaShape`: a family whose forward pass is recorded from its modules.

Its linears have the same names and sizes, so adapters of that shape fit.
"""

from dataclasses import dataclass

import transformers

from benchmarks.random_llama import LlamaShape


@dataclass(frozen=True, kw_only=True)
class GemmaShape(LlamaShape):
    @property
    def name(self) -> str:
        return super().name.replace("llama", "gemma")

    def config(self) -> transformers.PreTrainedConfig:
        return transformers.GemmaConfig(
            architectures=["GemmaForCausalLM"],
            hidden_act="gelu_pytorch_tanh",
            tie_word_embeddings=True,
            **self.sizes(),
        )
