"""errors.md: every error, with its docstring, its statuses and whether sending the request again makes sense."""

import sys

from motet_gateway.errors import errors_by_code
from tools.reference.markdown import flat, note


def errors_page() -> str:
    parts = [
        note("services/common/motet/errors.py and services/gateway/motet_gateway/errors.py"),
        "# Errors\n",
        flat("""All errors of Motet: the code and the type that HTTP clients read as `error.code` and `error.type`, the
        gRPC status between processes, and whether trying again makes sense. Every message says what is wrong and what
        to do.""")
        + "\n",
    ]
    for name, kind in sorted(errors_by_code().items()):
        row = kind.mapping
        meaning = vars(kind).get("__doc__")
        if not meaning:
            sys.exit(f"{kind.__module__}.{kind.__name__} has no docstring: say what happened and what to do")
        wait = f"clients retry after {row.retry_after:g} s, unless the answer says otherwise"
        retry = wait if row.retry_after else "clients do not retry automatically"
        parts += [
            f"## {name}\n",
            flat(meaning) + "\n",
            f"HTTP {row.http} · type `{row.type}` · gRPC `{row.grpc.name}` · {retry}\n",
        ]
    return "\n".join(parts)
