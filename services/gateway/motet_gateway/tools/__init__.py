"""Tools: how clients offer them, and what a chat template gets of earlier calls."""
