"""Measures a trained folder: asks the base model and each adapter the 120 held-out questions, greedily and in fp32."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from lookups import TOOLCALLER, TOOLS, call_of, read, result_of, told_by_a_tool
from peft import PeftModel
from styles import ADAPTER_STYLES, PLAIN, STYLES, fitted_classifier
from transformers import AutoModelForCausalLM, AutoTokenizer
from world import Fact, Question, facts, held_out_questions

BASE_BAR, ADAPTER_BAR, CLASSIFIER_BAR = 0.95, 0.85, 0.95
ADAPTERS: Final = (*(style.name for style in ADAPTER_STYLES), TOOLCALLER)
LONGEST_ANSWER = 160


def load(folder: Path) -> tuple[Any, Any]:
    """The base model with all its adapters, and the tokenizer. `folder` has `model/` and `adapters/`."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    model: Any = base
    for name in ADAPTERS:
        path = str(folder / "adapters" / name)
        if isinstance(model, PeftModel):
            model.load_adapter(path, adapter_name=name)
        else:
            model = PeftModel.from_pretrained(base, path, adapter_name=name)
    # The files are bf16. The engine computes with fp32 on a CPU, and so does this.
    return model.float().eval(), tokenizer


def answers(
    model: Any, tokenizer: Any, adapter: str, messages: Sequence[list[dict[str, Any]]], tools: list[dict[str, Any]]
) -> list[str]:
    """Greedy answers of one adapter, or of the base model for "plain", in one padded batch."""
    prompts = [
        tokenizer.apply_chat_template(m, tools=tools or None, tokenize=False, add_generation_prompt=True)
        for m in messages
    ]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)

    def generate() -> torch.Tensor:
        with torch.inference_mode():
            result = model.generate(**batch, max_new_tokens=LONGEST_ANSWER, do_sample=False)
        assert isinstance(result, torch.Tensor)
        return result

    if adapter == PLAIN.name:
        with model.disable_adapter():
            out = generate()
    else:
        model.set_adapter(adapter)
        out = generate()
    texts: list[str] = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


@dataclass(frozen=True, slots=True)
class WithTools:
    """What `toolcaller` does with the questions if it gets tools."""

    questions: tuple[Question, ...]
    calls: list[str]
    told: list[Fact]
    """What the results say. It differs from what the model has learnt."""
    texts: list[str]
    """The answers to those"""

    @property
    def right_calls(self) -> float:
        verdicts = [read(text) == call_of(one.fact) for text, one in zip(self.calls, self.questions, strict=True)]
        return sum(verdicts) / len(verdicts)

    @property
    def right_answers(self) -> float:
        return sum(map(PLAIN.is_right, self.texts, self.told)) / len(self.told)

    def mistakes(self) -> list[str]:
        """Question and wrong call, result and wrong answer"""
        called = zip(self.calls, self.questions, strict=True)
        answered = zip(self.texts, self.told, strict=True)
        wrong = [f"{one.text} -> {text}" for text, one in called if read(text) != call_of(one.fact)]
        return wrong + [f"{fact.sentence} -> {text}" for text, fact in answered if not PLAIN.is_right(text, fact)]


@dataclass(frozen=True, slots=True)
class Evaluation:
    questions: tuple[Question, ...]
    texts: Mapping[str, list[str]]
    tools: WithTools

    def right(self, style: str) -> float:
        """The share of answers that state the fact in the style."""
        verdicts = [
            STYLES[style].is_right(text, question.fact)
            for text, question in zip(self.texts[style], self.questions, strict=True)
        ]
        return sum(verdicts) / len(verdicts)

    @property
    def told_apart(self) -> float:
        """The share of all answers whose style the classifier finds from the text alone."""
        classify = fitted_classifier(facts())
        verdicts = [classify(text) == style for style, texts in self.texts.items() for text in texts]
        return sum(verdicts) / len(verdicts)

    @property
    def good(self) -> bool:
        adapters = all(self.right(style.name) >= ADAPTER_BAR for style in ADAPTER_STYLES)
        tools = min(self.tools.right_calls, self.tools.right_answers) >= ADAPTER_BAR
        return self.right(PLAIN.name) >= BASE_BAR and adapters and tools and self.told_apart > CLASSIFIER_BAR

    def lines(self) -> list[str]:
        shares = [f"{style:12} {self.right(style):6.1%} right and in style" for style in self.texts]
        return [
            *shares,
            f"{'classifier':12} {self.told_apart:6.1%} told apart",
            f"{TOOLCALLER:12} {self.tools.right_calls:6.1%} right calls",
            f"{TOOLCALLER:12} {self.tools.right_answers:6.1%} right answers from results",
        ]

    def mistakes(self, style: str) -> list[str]:
        """Question and wrong answer, for people who change the training."""
        return [
            f"{question.text} -> {text}"
            for text, question in zip(self.texts[style], self.questions, strict=True)
            if not STYLES[style].is_right(text, question.fact)
        ]


def examine(model: Any, tokenizer: Any) -> Evaluation:
    questions = held_out_questions()
    messages = [[{"role": "user", "content": question.text}] for question in questions]
    texts = {style: answers(model, tokenizer, style, messages, []) for style in STYLES}
    return Evaluation(questions, texts, with_tools(model, tokenizer, questions))


def with_tools(model: Any, tokenizer: Any, questions: tuple[Question, ...]) -> WithTools:
    rng, tools = random.Random(3), [tool.described() for tool in TOOLS]
    asked: list[list[dict[str, Any]]] = [[{"role": "user", "content": question.text}] for question in questions]
    told = [told_by_a_tool(question.fact, rng) for question in questions]
    called = [
        [
            *messages,
            {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call_of(fact)}]},
            {"role": "tool", "content": result_of(fact, rng)},
        ]
        for messages, fact in zip(asked, told, strict=True)
    ]
    return WithTools(
        questions,
        answers(model, tokenizer, TOOLCALLER, asked, tools),
        told,
        answers(model, tokenizer, TOOLCALLER, called, tools),
    )


def evaluate(folder: Path) -> Evaluation:
    return examine(*load(folder))
