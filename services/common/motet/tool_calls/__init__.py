"""Calls of tools in answers: the formats in which models write them, the parser, and the grammar of each format."""
