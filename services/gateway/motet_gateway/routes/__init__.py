"""The HTTP surface, one module per kind of caller: people who want answers, tools that count tokens, probes."""
