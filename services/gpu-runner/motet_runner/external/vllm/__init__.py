"""vLLM as an engine: the planner decides, and vLLM computes what each plan says.

`python -m motet_runner.external.vllm` is the engine's process. It runs in an environment with vLLM; only `surface`
and the two processors import vllm, and only in that process.
"""
