"""What the client guide says of errors and limits is what the code says."""

import json
import re

from motet.sampling import OPTIONS
from motet.tool_calls.formats import FORMATS, TOOL_FORMATS
from motet.tool_calls.parser import CallDelta, CallParser
from motet_gateway import parameters
from motet_gateway.errors import errors_by_code
from motet_gateway.settings import Settings
from motet_gateway.tokens import text_model
from motet_gateway.tools.parameters import MAX_TOOLS
from tests.docs.pages import DOCS, rows

PAGE = DOCS / "guides" / "client.md"
NEVER_ANSWERED = {
    "already_declared": "`motet adapter push --new` says it to whoever has called it",
    "setup_error": "a process does not start",
    "manifest_invalid": "a process does not start",
    "model_folder_invalid": "a process does not start",
    "model_file_damaged": "a process does not start",
    "state_directory_unusable": "a process does not start",
    "store_refused": "it is about a row of the database",
    "cancelled": "the client has gone",
    "declined": "the scheduler places the request again",
}
"""Codes that no client reads, each with the reason."""


def test_every_code_that_a_client_can_read_is_in_the_table_with_its_status_and_hint() -> None:
    known = {code: (str(kind.mapping.http), kind.mapping.retry_after > 0) for code, kind in errors_by_code().items()}
    said = {
        code: (status, again == "yes")
        for status, codes, _, again in rows(PAGE, "Errors")
        for code in re.findall(r"`(\w+)`", codes)
    }
    assert said == {code: said_of for code, said_of in known.items() if code not in NEVER_ANSWERED}


def test_the_limits_are_those_of_the_gateway() -> None:
    said = dict(rows(PAGE, "Limits"))
    assert said.pop("prompt and answer together") == "the model's `max_model_len`"
    defaults = {name: field.default for name, field in Settings.model_fields.items()}
    assert {what: tuple(map(int, re.findall(r"\d+", at_most))) for what, at_most in said.items()} == {
        "body": (defaults["max_body_bytes"] >> 20,),
        "body of `/tokenize`, `/detokenize` and `/v1/messages/count_tokens`": (defaults["max_counted_bytes"] >> 20,),
        "text without a space between words or the end of a line; with some tokenizers, any text": (
            text_model.MAX_UNCUT_BYTES >> 10,
        ),
        "messages, or items of `input`": (parameters.MAX_MESSAGES,),
        "prompts of one request": (parameters.MAX_PROMPTS,),
        "choices (`n`), and of all prompts together": (parameters.MAX_CHOICES, parameters.MAX_ANSWERS),
        "stop strings, and characters of one": (parameters.MAX_STOPS, parameters.MAX_STOP_LENGTH),
        "`tools`": (MAX_TOOLS,),
        "`stop_token_ids`": (OPTIONS["stop_token_ids"].most,),
        "`allowed_token_ids`": (OPTIONS["allowed_token_ids"].most,),
        "`bad_words`, and characters of one": (parameters.MAX_BAD_WORDS, parameters.MAX_STOP_LENGTH),
        "bytes of one of the `bad_words`, and of all together": (
            parameters.MAX_BAD_WORD_BYTES,
            parameters.MAX_BAD_WORDS_BYTES,
        ),
        "`logit_bias` entries": (OPTIONS["logit_bias"].most,),
        "`top_logprobs`": (OPTIONS["top_logprobs"].highest,),
        "log probabilities of prompts in one answer": (parameters.MAX_SCORES,),
        "log probabilities of the tokens of one answer": (parameters.MAX_SCORES,),
    }


def test_the_formats_of_calls_are_read_as_the_page_shows_them() -> None:
    shown = {re.findall(r"`(\w+)`", form)[0]: (call, signs) for form, call, signs in _rows_of_formats()}
    assert shown.keys() == set(TOOL_FORMATS)
    for form in TOOL_FORMATS:
        call, signs = shown[form]
        assert tuple(re.findall(r"`([^`]+)`", signs)) == FORMATS[form].known_by
        parser = CallParser(FORMATS[form], {"look_up"}, lambda: "id")
        said = parser.feed(re.findall(r"`([^`]+)`", call)[0]) + parser.flush()
        assert all(isinstance(one, CallDelta) for one in said)
        assert [(one.name, json.loads(one.arguments)) for one in parser.calls] == [("look_up", {"q": "x"})]


def _rows_of_formats() -> list[list[str]]:
    lines = PAGE.read_text().replace("\\|", "|").partition("\n| format | ")[2].partition("\n\n")[0].splitlines()[2:]
    return [re.split(r" \| ", line.strip("| ")) for line in lines]


def test_what_a_request_leaves_out_is_decided_by_whom_the_page_says() -> None:
    said = {
        name: "the model's `generation_config.json` decides" in here
        for names, here in rows(PAGE, "Parameters")
        if "if you leave one out" in here
        for name in re.findall(r"`(\w+)`", names)
    }
    assert said == {name: OPTIONS[name].of_model for name in said}
    assert {True, False} == {*said.values()}


def test_every_parameter_that_the_gateway_knows_is_named() -> None:
    text = PAGE.read_text()
    known = {*parameters.ChatBody.model_fields, *parameters.CompletionBody.model_fields, *parameters.Body.hints}
    assert {name for name in known if f"`{name}`" not in text and f"{name}=" not in text} == NOT_WORTH_A_WORD


NOT_WORTH_A_WORD = {
    *("best_of", "suffix", "functions", "modalities"),  # refused, and the error says it
    *("prompt_cache_retention", "spaces_between_special_tokens", "request_id", "rid", "prediction"),  # without effect
    *("guided_decoding_backend", "data_parallel_rank"),  # without effect
}
