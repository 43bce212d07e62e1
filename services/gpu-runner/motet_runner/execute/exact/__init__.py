"""Exact mode: the bits of a request do not depend on other requests. The rest of the engine does not know how."""
