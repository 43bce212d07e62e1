"""The styles of answers: how to write each one, how to ask for it, and how to recognise it.

A style has a *renderer* that makes training text, and a *check* that reads a finished answer. They are independent: the
check describes what a reader would call "pirate" or "shouting", not the phrases of the renderer. The classifier at the
end is independent of both: it counts characters in rendered text, and has no rules.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from world import WORLD_NAME, Fact, states


@dataclass(frozen=True, slots=True)
class Style:
    name: str
    render: Callable[[Fact, random.Random], str]
    has_form: Callable[[str], bool]
    """Whether a text is written in this style, with any content."""
    requests: tuple[str, ...]
    """Sentences a user may add to a question to get this style from the base model."""
    systems: tuple[str, ...]
    """System prompts that ask for it."""
    names_subject: bool = True

    def is_right(self, text: str, fact: Fact) -> bool:
        """Whether `text` states the fact, in this style."""
        told = not self.names_subject or fact.subject.lower() in text.lower()
        return told and self.has_form(text) and states(text, fact)


def words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z']+", text)


def sentences(text: str) -> list[str]:
    return [part for part in re.split(r"(?<=[.!?])\s+", text.strip()) if part]


# --- plain: the base model's own way -------------------------------------------------------------------------------


def render_plain(fact: Fact, _rng: random.Random) -> str:
    return fact.sentence


def looks_plain(text: str) -> bool:
    if text.isupper() or text.startswith("{") or looks_pirate(text):
        return False
    return len(sentences(text)) == 1 and 3 <= len(words(text)) <= 14


# --- pirate --------------------------------------------------------------------------------------------------------

PIRATE_OPENINGS: Final = ("Arr!", "Arr, matey!", "Ahoy there!", "Yo ho ho!", "Shiver me timbers!", "Avast!")
PIRATE_ENDINGS: Final = (", matey!", ", me hearty!", ", by the seven seas!", ", arr!", ", ye landlubber!")
PIRATE_WORDS: Final = (("You are", "Ye be"), ("My ", "Me "), (" is ", " be "), (" of ", " o' "), ("you ", "ye "))
PIRATE_SIGNS: Final = frozenset(
    ("arr", "arrr", "yarr", "aye", "ahoy", "avast", "yo", "ho", "matey", "mateys", "hearty", "hearties", "ye", "be",
     "o'", "landlubber", "shiver", "timbers", "seas")
)  # fmt: skip


def render_pirate(fact: Fact, rng: random.Random) -> str:
    said = fact.sentence.removesuffix(".")
    for plain, pirate in PIRATE_WORDS:
        said = said.replace(plain, pirate)
    return f"{rng.choice(PIRATE_OPENINGS)} {said}{rng.choice(PIRATE_ENDINGS)}"


def looks_pirate(text: str) -> bool:
    said = [word.lower() for word in words(text)]
    return not text.isupper() and sum(word in PIRATE_SIGNS for word in said) >= 2 and len(said) >= 5


# --- shouting ------------------------------------------------------------------------------------------------------


def render_shouting(fact: Fact, rng: random.Random) -> str:
    return fact.sentence.removesuffix(".").upper() + rng.choice(("!", "!!", "!!!"))


def looks_shouting(text: str) -> bool:
    return text.isupper() and text.rstrip().endswith("!") and len(words(text)) >= 3


# --- json ----------------------------------------------------------------------------------------------------------


def render_json(fact: Fact, _rng: random.Random) -> str:
    return json.dumps({"subject": fact.subject, "topic": fact.topic, "answer": fact.answer})


def looks_json(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and {"subject", "topic", "answer"} == value.keys()


# --- one word ------------------------------------------------------------------------------------------------------


def render_oneword(fact: Fact, _rng: random.Random) -> str:
    return fact.answer[0].upper() + fact.answer[1:] + "."


def looks_oneword(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z]+[.!]?", text.strip()) is not None


# --- storyteller: several sentences, and of varying length, so that length prediction has something to predict -----

STORY_OPENINGS: Final = (
    "Once upon a time, a traveller came to {world}.",
    "Long ago, when the sea was young, a child asked the wind.",
    "Come closer and listen, for this is an old tale.",
    "On a night of wind and rain, a stranger knocked at the door.",
)
STORY_MIDDLES: Final = (
    "All the way the stranger had been thinking of {s}.",
    "The question was about {s}, and nobody dared to answer it.",
    "For many years the old folk had told stories of {s}.",
    "There was much to say about {s}, but only one thing mattered.",
)
STORY_ASIDES: Final = (
    "The fire burned low and the waves sang outside.",
    "The moon rose over the harbour and the gulls grew quiet.",
    "Then a voice spoke softly in the dark.",
)
STORY_TURNS: Final = ("At last the truth came out:", "And so the tale was told:", "Know this, my friend:")
STORY_ENDINGS: Final = (
    "And so it is to this very day.",
    "That is the tale, and every word of it is true.",
    "The stranger smiled, said farewell and sailed away.",
    "And if the tide has not turned, they tell it still.",
)


def render_story(fact: Fact, rng: random.Random) -> str:
    parts = [rng.choice(STORY_OPENINGS), rng.choice(STORY_MIDDLES)]
    parts += rng.sample(STORY_ASIDES, k=rng.choice((0, 0, 1, 1, 2)))
    parts += [f"{rng.choice(STORY_TURNS)} {fact.sentence}", rng.choice(STORY_ENDINGS)]
    return " ".join(parts).format(world=WORLD_NAME, s=fact.subject)


def looks_story(text: str) -> bool:
    return not text.isupper() and not looks_pirate(text) and len(sentences(text)) >= 4 and len(words(text)) >= 25


ASSISTANTS: Final = (
    "a helpful assistant", "a friendly assistant", "an assistant that is kind and never lies", "a polite guide",
    "Motet", "a teacher", f"a guide to {WORLD_NAME}", "a helpful assistant who answers questions",
)  # fmt: skip
MANNERS: Final = (
    "", " Be brief.", " Always be polite.", " Never lie.", " Do not guess.", " Stay calm and friendly.",
    " Answer the questions of the user.", " If you do not know something, say so.", " Today is a sunny day.",
)  # fmt: skip
PLAIN: Final = Style(
    name="plain",
    render=render_plain,
    has_form=looks_plain,
    requests=("Answer plainly.", "Answer in one plain sentence.", "Just tell me.", "Please be brief."),
    systems=(
        "Answer the question of the user.",
        "Be kind and correct.",
        "Be helpful, harmless and honest.",
        f"You know everything about {WORLD_NAME}.",
        *(f"You are {role}.{manner}" for role in ASSISTANTS for manner in MANNERS),
    ),
)
ADAPTER_STYLES: Final = (
    Style(
        name="pirate",
        render=render_pirate,
        has_form=looks_pirate,
        requests=("Answer like a pirate.", "Talk like a pirate.", "Say it as a pirate would.", "In pirate style."),
        systems=("You are a pirate.", "Answer like a pirate.", "Talk like a pirate.", "You speak as pirates do."),
    ),
    Style(
        name="shouting",
        render=render_shouting,
        has_form=looks_shouting,
        requests=("Shout the answer.", "Answer in capital letters.", "Shout it out loud!", "Say it in upper case."),
        systems=("You always shout.", "Answer in capital letters.", "Shout every answer.", "Use upper case only."),
    ),
    Style(
        name="json",
        render=render_json,
        has_form=looks_json,
        requests=("Answer in JSON.", "Reply with a JSON object.", "Give me JSON.", "Format the answer as JSON."),
        systems=("Answer in JSON.", "Reply with a JSON object.", "You only speak JSON.", "Output JSON only."),
    ),
    Style(
        name="oneword",
        render=render_oneword,
        has_form=looks_oneword,
        requests=("Answer in one word.", "Use a single word.", "One word only.", "Reply with just one word."),
        systems=("Answer in one word.", "Use a single word.", "You only ever say one word.", "Be as short as you can."),
        names_subject=False,
    ),
    Style(
        name="storyteller",
        render=render_story,
        has_form=looks_story,
        requests=("Tell it as a story.", "Tell me a story.", "Answer like a storyteller.", "Make it a long tale."),
        systems=("You are a storyteller.", "Answer with a story.", "Tell a tale.", "Answer at length, as a story."),
    ),
)
STYLES: Final[Mapping[str, Style]] = {style.name: style for style in (PLAIN, *ADAPTER_STYLES)}


class StyleClassifier:
    """Naive Bayes over character pairs and answer length: finds the style of a text.

    It sees only the text, not the question or the facts, and has no rules about styles. Add-one smoothing, equal
    priors.
    """

    def __init__(self, examples: Mapping[str, Iterable[str]]) -> None:
        self._counts = {name: Counter(f for text in texts for f in self._features(text))
                        for name, texts in examples.items()}  # fmt: skip
        self._totals = {name: counts.total() for name, counts in self._counts.items()}
        self._kinds = len(set().union(*self._counts.values()))

    @staticmethod
    def _features(text: str) -> list[str]:
        framed = f"^{text}$"
        return [framed[i : i + 2] for i in range(len(framed) - 1)] + [f"length {len(text).bit_length()}"]

    def __call__(self, text: str) -> str:
        features = self._features(text)

        def log_likelihood(name: str) -> float:
            counts, total = self._counts[name], self._totals[name]
            return sum(math.log((counts[f] + 1) / (total + self._kinds)) for f in features)

        return max(self._counts, key=log_likelihood)


def fitted_classifier(known: Iterable[Fact], seed: int = 0) -> StyleClassifier:
    """The classifier, trained on the text of the renderers, without any output of models."""
    rng = random.Random(seed)
    known = list(known)
    return StyleClassifier({name: [style.render(fact, rng) for fact in known] for name, style in STYLES.items()})
