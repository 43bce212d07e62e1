"""The gateway: one OpenAI-compatible URL in front of every runner.

The gateway decides what the client sees: names, order of tokens, stop strings, errors, usage. The scheduler places
requests, the predictor estimates lengths, and the runners hold the weights.
"""
