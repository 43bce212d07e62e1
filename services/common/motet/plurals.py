"""Numbers with their nouns, for messages that people read."""


def counted(number: int, noun: str) -> str:
    """`1 runner`, `2 runners`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
