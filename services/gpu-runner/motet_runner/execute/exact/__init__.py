"""Exact mode: the bits of a request do not depend on the others. The rest of the engine does not know how."""
