"""How many log probabilities one answer may have: each is some 80 bytes of JSON. Pure."""

from collections.abc import Sequence

from motet.errors import InvalidRequest
from motet_gateway.parameters import MAX_SCORES, Body, Tokens


def limited_by_scores(body: Body, limits: Sequence[int]) -> list[int]:
    """The most tokens of the answer to each prompt. Where the client set no limit, an answer ends before it has too
    many log probabilities."""
    alternatives = body.top_logprobs_wanted
    if alternatives is None or body.output_limit[1] is not None:
        return list(limits)
    most = MAX_SCORES // (body.choices * len(limits) * (1 + alternatives))
    return [min(limit, most) for limit in limits]


def check_scores(body: Body, prompts: Sequence[Tokens], limits: Sequence[int]) -> None:
    """Refuse what would be too much for one answer: choices × tokens × alternatives. Raises InvalidRequest."""
    of_answers, of_prompts = body.top_logprobs_wanted, body.prompt_logprobs_wanted
    fields = {"n": body.choices, body.output_limit[0]: max(limits), body.alternatives_field: of_answers or 0}
    named = ", ".join(f"{name}: {value}" for name, value in fields.items())
    if of_prompts is not None:
        scores = sum(map(len, prompts)) * (1 + of_prompts) * body.choices
        if scores > MAX_SCORES:
            field = "prompt_logprobs" if body.scores_of_prompts == of_prompts else "logprobs"
            raise InvalidRequest(
                f"{field}: the prompts would come back with {scores} log probabilities, and an answer has at most "
                f"{MAX_SCORES}. Send fewer or shorter prompts, or lower {field} or n.",
                param=field,
            )
    if of_answers is not None and not body.scores_only:
        scores = sum(limits) * (1 + of_answers) * body.choices
        if scores > MAX_SCORES:
            raise InvalidRequest(
                f"{body.alternatives_field}: the answer could have {scores} log probabilities ({named}, prompts: "
                f"{len(limits)}), and an answer has at most {MAX_SCORES}. Lower one of these fields.",
                param=body.alternatives_field,
            )
