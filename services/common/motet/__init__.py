"""What Motet's deployables share, and nothing that only one of them needs.

Everything that two processes must agree on lives here: the messages, the ids, the sizes, the errors, the settings and
the shape of a resource. Decisions do not: each has one owner, in its own package.
"""

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
"""Nobody here uses gRPC on both sides of a fork. With its support for that, each process that a service starts writes a
line of its own into the service's log. It reads the variable when it is imported, so this has to come before."""

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
"""A log is one JSON object a line: what gRPC notes for itself, such as each peer that goes away, would stand between
them. What fails is in our own lines, too."""
