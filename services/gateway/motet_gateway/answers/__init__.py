"""Turns tokens into the response: the text of each choice, the two response formats, and the answer as a whole."""
