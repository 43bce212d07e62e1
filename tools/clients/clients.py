"""The clients that are tried against the product, unmodified, and what each of them is asked to do. Data."""

from dataclasses import dataclass

ACTIONS = {
    "list": "lists the models, with an adapter among them",
    "chat": "gets a whole answer of an adapter",
    "stream": "gets the same answer in pieces",
    "n": "gets two answers to one question",
    "logprobs": "gets a log probability of each token",
    "structured": "gets an object that fits a schema",
    "tools": "gets a call of the tool that it named, whose arguments fit",
    "loop": "asks, runs the tool that the model calls, and gets an answer with what the tool said",
    "cancel": "ends a stream early; nothing goes on computing for it",
    "errors": "reads an error as its own kind of error, with our advice",
    "broken": "notices a stream that breaks: it says so, and does not take the half for the whole",
    "load": "sends twenty requests, four at once, and counts that all have succeeded",
}
"""What a client does, by the word in the table"""


@dataclass(frozen=True, kw_only=True)
class Client:
    title: str
    driver: str
    """The module in `drivers` that uses it. Node: a file beside it. Empty: it was never installable where clients were
    tried."""
    packages: tuple[str, ...]
    """What pip or npm installs. The first one's version is shown. Empty: a program of the machine."""
    does: tuple[str, ...]
    """The actions for which it has a way"""
    node: bool = False
    shares: str = ""
    """The client whose environment this one uses, too"""
    peer: bool = False
    """It is part of the peer that `make peer PEERS=vllm` builds"""


ASKED = tuple(action for action in ACTIONS if action != "load")
"""Of those who ask. Load generators measure."""


def all_but(*actions: str) -> tuple[str, ...]:
    """All actions of those who ask, without these"""
    return tuple(action for action in ASKED if action not in actions)


CLIENTS = {
    "openai": Client(title="OpenAI, Python", driver="openai_python", packages=("openai>=2,<3",), does=ASKED),
    "openai-before": Client(
        title="OpenAI, Python, the major version before",
        driver="openai_python",
        packages=("openai>=1,<2",),
        does=ASKED,
    ),
    "openai-responses": Client(
        title="OpenAI, Python, by `responses`",
        driver="openai_responses",
        packages=("openai>=2,<3",),
        does=all_but("n"),
        shares="openai",
    ),
    "openai-node": Client(title="OpenAI, Node", driver="openai_node.mjs", packages=("openai",), does=ASKED, node=True),
    "anthropic": Client(
        title="Anthropic, Python",
        driver="anthropic_python",
        packages=("anthropic",),
        does=all_but("n", "logprobs", "structured"),
    ),
    "openai-agents": Client(
        title="OpenAI Agents",
        driver="openai_agents",
        packages=("openai-agents",),
        does=("chat", "stream", "loop", "errors", "broken"),
    ),
    "instructor": Client(
        title="Instructor", driver="instructor_python", packages=("instructor",), does=("structured", "tools", "errors")
    ),
    "litellm": Client(title="LiteLLM", driver="litellm_python", packages=("litellm",), does=all_but("list")),
    "langchain": Client(
        title="LangChain", driver="langchain_python", packages=("langchain-openai",), does=all_but("list")
    ),
    "llama-index": Client(
        title="LlamaIndex",
        driver="llama_index_python",
        packages=("llama-index-llms-openai-like",),
        does=("chat", "stream", "tools", "cancel", "errors", "broken"),
    ),
    "curl": Client(title="curl", driver="curl", packages=(), does=all_but("n", "logprobs", "tools", "loop")),
    "lm-eval": Client(
        title="lm-evaluation-harness",
        driver="lm_eval_python",
        packages=("lm-eval[api]", "transformers"),
        does=("chat", "logprobs"),
    ),
    "vllm-bench": Client(title="vllm bench serve", driver="vllm_bench", packages=(), does=("load",), peer=True),
    "guidellm": Client(title="GuideLLM", driver="guidellm_program", packages=("guidellm",), does=("load",)),
    "aiperf": Client(title="AIPerf", driver="aiperf_program", packages=("aiperf",), does=("load",)),
    "inference-perf": Client(title="inference-perf", driver="", packages=("inference-perf",), does=()),
}
