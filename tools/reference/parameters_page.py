"""parameters.md: what each parameter that clients of other servers send does here."""

import json

from motet_gateway.answers.lorax import body as lorax
from motet_gateway.parameter_table import BODIES, Effect, Row, rows
from tools.reference.markdown import code, flat, note, table


def parameters_page() -> str:
    parts = [
        note("services/gateway/motet_gateway/parameter_table.py"),
        "# Parameters of other servers\n",
        flat("""What clients of OpenAI, vLLM, SGLang, LoRAX and TGI send, and what each parameter does here. One that is
        refused gets status 400 with its name in `error.param`. null asks for nothing, wherever it stands. Nobody knows
        the rest: it has no effect, and the header `x-motet-ignored` names it. The [API](api.md) has types and bounds of
        those that act.""")
        + "\n",
    ]
    for path, body in BODIES.items():
        shown = [[code(one.name), ", ".join(one.servers), _effect(one)] for one in rows(body)]
        parts += [f"## {path}\n", table(["parameter", "sent to", "here"], shown)]
    parts += [
        "## /generate and /generate_stream\n",
        "LoRAX's own API, inside `parameters`.\n",
        table(["parameter", "here"], [[code(name), what] for name, what in sorted(_of_lorax().items())]),
    ]
    return "\n".join(parts)


def _effect(row: Row) -> str:
    if row.effect is not Effect.REFUSED:
        return row.effect
    harmless = f"; no effect: {', '.join(code(_json(one)) for one in row.harmless)}" if row.harmless else ""
    return f"refused: {row.why}{harmless}"


def _of_lorax() -> dict[str, str]:
    acts = dict.fromkeys([*lorax.GenerateParameters.model_fields, *lorax.OPTIONS_OF_LORAX], "acts")
    return acts | {
        name: _effect(Row(name, (), Effect.REFUSED, why, harmless)) for name, (why, harmless) in lorax.REFUSED.items()
    }


def _json(value: object) -> str:
    return json.dumps(value)
