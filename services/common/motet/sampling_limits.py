"""The ranges of sampling options. Gateways check what clients send, and engines whatever reaches them."""

MAX_TEMPERATURE = 10
MAX_PENALTY = 2
"""Of presence and frequency, to either side: OpenAI's range."""
MAX_REPETITION_PENALTY = 10
MAX_LOGIT_BIAS = 100
MAX_LOGIT_BIASES = 1024
MAX_STOP_TOKENS = 128
"""The limits of vLLM. Both fields go to the runner with every request."""
MAX_TOP_LOGPROBS = 20
