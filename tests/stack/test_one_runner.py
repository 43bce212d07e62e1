"""What clients see of one runner with the bundled model: adapters with chat templates of their own, adapters that a
client loads as from vLLM, and texts scored as lm-eval asks for it.

They are in one file since they share a stack: its start takes longer than most of them.
"""

import json
import shutil
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from motet.digest import adapter_digest
from testbed.local_stack import BUNDLED, LocalStack, copy_of_bundled, running_stack, write_adapter

pytestmark = pytest.mark.stack
of_a_reference = pytest.mark.filterwarnings("ignore")
"""transformers and PEFT warn."""

MESSAGES = [{"role": "user", "content": "Who rules Harrow?"}]
QUESTION = "Who keeps the lighthouse of Brindle?"
CHUNK = 32
"""Prompt tokens an iteration: long texts take several."""
TEMPLATE = (
    "{% for message in messages %}<|user|>{{ 'x ' * times }}{{ message.content }}<|end|>{% endfor %}<|assistant|>"
)


def adapter(folder: Path, name: str, template: str, *, of: str = "pirate") -> str:
    own = folder / name
    shutil.copytree(BUNDLED / "adapters" / of, own)
    (own / "chat_template.jinja").write_text(template)
    return own.as_uri()


def trained(folder: Path) -> str:
    """With the model's template and tokenizer, as a training that adds an end token saves them"""
    own, model = folder / "trained", BUNDLED / "model"
    shutil.copytree(BUNDLED / "adapters" / "pirate", own)
    shutil.copy(model / "chat_template.jinja", own)
    config = json.loads((model / "tokenizer_config.json").read_text())
    (own / "tokenizer_config.json").write_text(json.dumps(config | {"unk_token": "<|end|>"}))
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"]["trim_offsets"] = not tokenizer["pre_tokenizer"]["trim_offsets"]
    end = next(one["id"] for one in tokenizer["added_tokens"] if one["content"] == "<|end|>")
    post_processor = tokenizer["post_processor"]
    post_processor["single"].append({"SpecialToken": {"id": "<|end|>", "type_id": 0}})
    post_processor["special_tokens"] = {"<|end|>": {"id": "<|end|>", "ids": [end], "tokens": ["<|end|>"]}}
    (own / "tokenizer.json").write_text(json.dumps(tokenizer))
    return own.as_uri()


def marked(times: int) -> str:
    """A template whose prompts are longer by this number of words"""
    return TEMPLATE.replace("times", str(times))


def folders_of_a_client(folder: Path) -> Path:
    """What a client may load lies in it, and links that lead out of it."""
    allowed = folder / "adapters"
    for name in ("pirate", "json"):
        shutil.copytree(BUNDLED / "adapters" / name, allowed / name)
    (allowed / "link").symlink_to(BUNDLED / "adapters" / "oneword")
    broken = Path(shutil.copytree(allowed / "pirate", allowed / "broken"))
    config = broken / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"r": 4}))
    (folder / "elsewhere").mkdir()
    shutil.copytree(BUNDLED / "adapters" / "oneword", folder / "elsewhere" / "oneword")
    return allowed


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    folder = tmp_path_factory.mktemp("stack")
    engine = f'{{"prefillChunkTokens": {CHUNK}}}'
    manifests = copy_of_bundled(folder / "manifests", adapters=["pirate", "shouting"], engine=engine)
    write_adapter(manifests, "own", uri=adapter(folder, "own", marked(2)))
    write_adapter(manifests, "moved", uri=adapter(folder, "moved", marked(2)))
    write_adapter(manifests, "trained", uri=trained(folder))
    write_adapter(manifests, "broken", uri=adapter(folder, "broken", "{% for message in messages %}\n{{ message }"))
    env = {"MOTET_GATEWAY_ADAPTER_FOLDERS": json.dumps([str(folders_of_a_client(folder))])}
    with running_stack(folder, manifests=manifests, env=env) as running:
        running.until(lambda: condition(running, "broken")["reason"] == "FormatRejected")
        names = ("own", "moved", "trained", "pirate", "shouting")
        running.until(lambda: all(condition(running, name)["status"] == "True" for name in names))
        yield running


# ------------------------------------------------------------------------------------------------------------ templates


def condition(stack: LocalStack, name: str) -> dict[str, Any]:
    found = [one for one in stack.status()["adapters"] if one["name"] == name]
    ready = [each for one in found for each in one["conditions"] if each["type"] == "Ready"]
    return ready[0] if ready else {"status": "", "reason": "", "message": ""}


def prompt_of(stack: LocalStack, model: str) -> str:
    with stack.http() as client:
        said = client.post("/tokenize", json={"model": model, "messages": MESSAGES})
        assert said.status_code == 200, said.text
        text = client.post("/detokenize", json={"model": model, "tokens": said.json()["tokens"]})
        return str(text.json()["prompt"])


def test_an_adapter_is_asked_by_its_own_template_and_others_by_the_models(stack: LocalStack) -> None:
    assert prompt_of(stack, "own") == "<|user|>x x Who rules Harrow?<|end|><|assistant|>"
    for other in ("pirate", "motet-demo"):
        assert prompt_of(stack, other) == "<|user|>Who rules Harrow?<|end|><|assistant|>"
    asked = {"messages": MESSAGES, "max_tokens": 4}
    with stack.http() as client:
        used = [
            client.post("/v1/chat/completions", json={"model": model, **asked}).json()["usage"]["prompt_tokens"]
            for model in ("own", "pirate")
        ]
    assert used[0] > used[1]


def test_a_template_that_is_no_jinja_is_refused_with_its_place(stack: LocalStack) -> None:
    assert "chat_template.jinja, line 2: " in condition(stack, "broken")["message"]


def test_the_status_names_the_template(stack: LocalStack) -> None:
    digests = {one["name"]: (one["certificate"] or {}).get("templateDigest") for one in stack.status()["adapters"]}
    assert digests["own"].startswith("sha256:")
    assert digests["pirate"] is None


def test_the_models_template_and_tokenizer_saved_again_are_the_models(stack: LocalStack) -> None:
    (found,) = [one for one in stack.status()["adapters"] if one["name"] == "trained"]
    assert found["certificate"].get("templateDigest") is None
    (warning,) = found["certificate"]["warnings"]
    assert warning.startswith("tokenizer.json: post_processor adds other tokens than the base model's tokenizer")
    assert prompt_of(stack, "trained") == prompt_of(stack, "pirate")


def test_no_prompt_of_one_revision_meets_the_weights_of_another(stack: LocalStack) -> None:
    """While requests go on, the adapter gets other weights with another template, and then the first ones again."""
    lengths: dict[int, int] = {}
    seen: list[tuple[str, int]] = []
    wrong: list[str] = []
    over = threading.Event()

    def ask() -> None:
        with stack.http() as client:
            while not over.is_set():
                said = client.post(
                    "/v1/chat/completions", json={"model": "moved", "messages": MESSAGES, "max_tokens": 1}
                )
                if said.status_code == 200:
                    seen.append((said.json()["system_fingerprint"], said.json()["usage"]["prompt_tokens"]))
                else:
                    wrong.append(said.text)

    assert stack.manifests is not None
    asking = [threading.Thread(target=ask) for _ in range(3)]
    for thread in asking:
        thread.start()
    try:
        for times, of in ((6, "shouting"), (2, "pirate"), (9, "shouting")):
            uri = adapter(stack.folder, f"revision-{times}", marked(times), of=of)
            write_adapter(stack.manifests, "moved", uri=uri)
            stack.until(lambda times=times: prompt_of(stack, "moved").count("x ") == times)
            before = len(seen)
            stack.until(lambda before=before: len(seen) > before + 20)
            lengths[times] = seen[-1][1]
    finally:
        over.set()
        for thread in asking:
            thread.join()
    assert not wrong, wrong[:3]
    assert len(set(lengths.values())) == 3
    by_weights: dict[str, set[int]] = {}
    for fingerprint, tokens in seen:
        by_weights.setdefault(fingerprint, set()).add(tokens)
    assert all(len(tokens) == 1 for tokens in by_weights.values()), by_weights
    assert len(by_weights) == 3, "the second revision has the bytes of the first one"


# --------------------------------------------------------------------------------------------------- loaded by a client


def post(stack: LocalStack, what: str, **body: Any) -> httpx.Response:
    with stack.http() as http:
        return http.post(f"/v1/{what}_lora_adapter", json=body, timeout=180)


def refusal(stack: LocalStack, what: str, **body: Any) -> tuple[int, str]:
    answer = post(stack, what, **body)
    return answer.status_code, answer.json()["error"]["message"]


def models(stack: LocalStack) -> dict[str, Any]:
    with stack.http() as http:
        return {one["id"]: one for one in http.get("/v1/models").json()["data"]}


def test_an_adapter_comes_is_replaced_and_goes(stack: LocalStack) -> None:
    answer = post(stack, "load", lora_name="desk", lora_path="pirate")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'desk' added successfully.")
    assert "Arr" in stack.ask("desk", QUESTION)
    status, said = refusal(stack, "load", lora_name="desk", lora_path="json")
    assert (status, said[:51]) == (400, "The lora adapter 'desk' has already been loaded. If"), said
    path = str(stack.folder / "adapters" / "json")
    assert post(stack, "load", lora_name="desk", lora_path=path, load_inplace=True).status_code == 200
    assert models(stack)["desk"]["digest"] == adapter_digest(BUNDLED / "adapters" / "json")
    assert stack.ask("desk", QUESTION).startswith('{"subject"')
    status, said = refusal(stack, "load", lora_name="desk", lora_path="broken", load_inplace=True)
    assert (status, "adapter_model.safetensors" in said or "shape" in said) == (400, True), said
    assert stack.ask("desk", QUESTION).startswith('{"subject"'), "what served before still does"

    answer = post(stack, "unload", lora_name="desk")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'desk' removed successfully.")
    assert "desk" not in models(stack)
    assert refusal(stack, "unload", lora_name="desk") == (404, "The lora adapter 'desk' cannot be found.")
    assert not list((stack.folder / "manifests").glob("*.pushed.yaml"))


def copies(stack: LocalStack) -> set[Path]:
    return {one for one in (stack.data / "adapters").glob("*") if one.is_dir()}


def test_nothing_outside_of_the_folders_is_read(stack: LocalStack) -> None:
    before = copies(stack)
    for path in (str(stack.folder / "elsewhere" / "oneword"), "../elsewhere/oneword"):
        assert refusal(stack, "load", lora_name="out", lora_path=path)[0] == 400
    # tests/cli has the other ways out. Each takes a process that imports torch.
    status, said = refusal(stack, "load", lora_name="out", lora_path="link")
    assert (status, "leads out of" in said) == (404, True), said
    assert "out" not in models(stack)
    assert copies(stack) == before


def test_what_a_manifest_declares_is_neither_replaced_nor_removed(stack: LocalStack) -> None:
    status, said = refusal(stack, "load", lora_name="shouting", lora_path="pirate", load_inplace=True)
    assert (status, "is declared at" in said) == (400, True), said
    status, said = refusal(stack, "unload", lora_name="shouting")
    assert (status, "Remove it there." in said) == (400, True), said
    assert "shouting" in models(stack)


def test_one_name_at_once_from_many_clients(stack: LocalStack) -> None:
    with ThreadPoolExecutor(3) as clients:
        asked = [clients.submit(post, stack, "load", lora_name="many", lora_path="pirate") for _ in range(3)]
        assert sorted(one.result().status_code for one in asked) == [200, 400, 400]
    assert "Arr" in stack.ask("many", QUESTION)
    assert post(stack, "unload", lora_name="many").status_code == 200


# ----------------------------------------------------------------------------------------------------- texts are scored


# lm-eval's `local-completions` model sends lists of token ids with `echo`, `logprobs: 1` and `max_tokens: 1`. Of each
# choice it sums the log probabilities after the context and without the answer's token, and a continuation is greedy if
# each of its tokens is as likely as the best alternative.

CONTINUATIONS = [
    ("The flag of Hollin", " is green"),
    ("The flag of Hollin", " sings a motet in five voices, naïve café 🙃"),
    ("Who keeps the lighthouse?", " Nobody"),
    ("W", "ho rules Harrow?"),
    ("A long story. " * 30, "It has an end."),
]
ADAPTER = "shouting"
NEAR_TIE = 1e-3
"""Two logits that are so close may change places between two implementations."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(BUNDLED / "model")


def reference(adapter: str | None) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(BUNDLED / "model", dtype=torch.float32)
    if adapter is None:
        return model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from peft import PeftModel

        return PeftModel.from_pretrained(model, BUNDLED / "adapters" / adapter).eval()


def scored(model: torch.nn.Module, context: list[int], continuation: list[int]) -> tuple[float, bool, float]:
    """The sum, whether each token is the best one, and the smallest distance between a token and its best rival."""
    with torch.inference_mode():
        logs = model(torch.tensor([context + continuation])).logits[0].float().log_softmax(-1)
    rows = logs[len(context) - 1 : -1]
    chosen = rows.gather(1, torch.tensor(continuation)[:, None])[:, 0]
    rivals = rows.scatter(1, torch.tensor(continuation)[:, None], float("-inf")).amax(-1)
    return float(chosen.sum()), bool((chosen >= rivals).all()), float((chosen - rivals).abs().min())


def summed(choice: dict[str, Any], context: int) -> tuple[float, bool]:
    logprobs, tops = (choice["logprobs"][name][context:-1] for name in ("token_logprobs", "top_logprobs"))
    return sum(logprobs), all(one == max(top.values()) for one, top in zip(logprobs, tops, strict=True))


def greedy(model: torch.nn.Module, context: list[int], count: int) -> list[int]:
    tokens = list(context)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(context) :]


@of_a_reference
@pytest.mark.parametrize("adapter", [None, ADAPTER])
def test_batches_of_tokens_are_scored_as_by_transformers(
    stack: LocalStack, tokenizer: Any, adapter: str | None
) -> None:
    model = reference(adapter)
    pairs = [
        (tokenizer.encode(context, add_special_tokens=False), tokenizer.encode(after, add_special_tokens=False))
        for context, after in CONTINUATIONS
    ]
    pairs += [(context, greedy(model, context, 6)) for context, _ in pairs[:3]]
    body = {
        "model": adapter or "motet-demo",
        "prompt": [context + after for context, after in pairs],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    with stack.http() as http:
        for _ in range(2):  # the second time, all pages are in the prefix cache
            answer = http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            choices = sorted(answer.json()["choices"], key=lambda choice: int(choice["index"]))
            assert len(choices) == len(pairs)
            best = []
            for (context, after), choice in zip(pairs, choices, strict=True):
                total, is_greedy, distance = scored(model, context, after)
                mine = summed(choice, len(context))
                assert mine[0] == pytest.approx(total, abs=1e-3)
                assert mine[1] == is_greedy or distance < NEAR_TIE
                best.append(mine[1])
                assert choice["logprobs"]["token_logprobs"][0] is None
                assert len(choice["logprobs"]["tokens"]) == len(context) + len(after) + 1
            assert best[-3:] == [True] * 3, "the model's own continuations"
            assert False in best
            assert answer.json()["usage"] == {
                "prompt_tokens": sum(len(context) + len(after) for context, after in pairs),
                "completion_tokens": len(pairs),
                "total_tokens": sum(len(context) + len(after) + 1 for context, after in pairs),
                "prompt_tokens_details": {"cached_tokens": 0},  # what was kept has no scores
            }


@of_a_reference
def test_a_text_alone_is_scored_without_an_answer(stack: LocalStack, tokenizer: Any) -> None:
    text = CONTINUATIONS[1][0] + CONTINUATIONS[1][1]
    body = {"model": "motet-demo", "prompt": text, "max_tokens": 0, "logprobs": 1, "echo": True}
    with stack.http() as http:
        answer = http.post("/v1/completions", json=body).json()
    (choice,) = answer["choices"]
    assert choice["text"] == text
    tokens = tokenizer.encode(text)
    total, _, _ = scored(reference(None), tokens[:1], tokens[1:])
    assert sum(choice["logprobs"]["token_logprobs"][1:]) == pytest.approx(total, abs=1e-3)
    assert (answer["usage"]["completion_tokens"], choice["finish_reason"]) == (0, "length")


def test_a_prompt_that_comes_again_says_how_much_of_it_was_kept(stack: LocalStack) -> None:
    """Not with another salt."""
    body = {"model": "motet-demo", "prompt": "A long story about a cache. " * 30, "max_tokens": 4}
    with stack.http() as http:

        def cached(**more: Any) -> int:
            usage = http.post("/v1/completions", json=body | more).json()["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert cached() == 0
        assert cached() > 100
        assert cached(cache_salt="mine") == 0
        assert cached(cache_salt="mine") > 100
