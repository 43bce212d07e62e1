"""What Motet's services share. What only one of them needs is in the package of that service.

Everything that two processes must agree on is here: the messages, the ids, the sizes, the errors, the settings and
the fields of a resource. Decisions are not here: each decision belongs to one service, in its own package.
"""

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
"""No service uses gRPC on both sides of a fork. With gRPC's support for forks, each child process of a service would
write a line into the service's log. gRPC reads the variable when it is imported, so we set it before that."""

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
"""A log has one JSON object in each line. gRPC's own lines, such as one for each peer that disconnects, would be
between them. Our own lines also report what fails."""
