"""Text to tokens and back: tokenizer, chat template, incremental detokenising, stop strings."""
