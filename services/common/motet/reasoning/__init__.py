"""Reasoning in answers: the tags between which models write it, and what divides it from the content."""
