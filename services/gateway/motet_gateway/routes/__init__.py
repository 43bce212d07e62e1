"""The HTTP routes: answers, models, tokens, probes."""
