"""The gateway: one OpenAI-compatible URL in front of every runner.

It owns what the client sees: names, order of tokens, stop strings, errors, usage. It does not place requests (the
scheduler does), predict lengths (the predictor) or hold weights (the runners).
"""
