"""OpenAI's agents, by `responses`, which is their default."""

import asyncio
import importlib
import os
from typing import Any

from tools.clients.drivers.protocol import Asked, must_raise, serve

os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"
agents: Any = importlib.import_module("agents")
openai: Any = importlib.import_module("openai")


def agent(asked: Asked, model: str, *, broken: bool = False, **more: Any) -> Any:
    url = asked.broken_url if broken else asked.url
    client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)
    return agents.Agent(
        name="guide",
        model=agents.OpenAIResponsesModel(model, client),
        model_settings=agents.ModelSettings(temperature=0),
        **more,
    )


def chat(asked: Asked) -> None:
    assert agents.Runner.run_sync(agent(asked, asked.adapter), asked.question).final_output == asked.answer


async def pieces(asked: Asked, *, broken: bool = False) -> str:
    run = agents.Runner.run_streamed(agent(asked, asked.adapter, broken=broken), asked.question)
    said = ""
    async for event in run.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            said += event.data.delta
    return said


def stream(asked: Asked) -> None:
    assert asyncio.run(pieces(asked)) == asked.answer


def loop(asked: Asked) -> None:
    called: list[str] = []

    def tool_of(described: dict[str, Any]) -> Any:
        async def run(_context: Any, arguments: str) -> str:
            asked.check_arguments(arguments)
            called.append(described["name"])
            return asked.result

        return agents.FunctionTool(
            name=described["name"],
            description=described["description"],
            params_json_schema=described["parameters"],
            on_invoke_tool=run,
        )

    tools = [tool_of(tool["function"]) for tool in asked.tools]
    answer = agents.Runner.run_sync(agent(asked, asked.caller, tools=tools), asked.question, max_turns=3)
    assert called == [asked.tool], called
    asked.check_end(answer.final_output)


def errors(asked: Asked) -> None:
    must_raise(openai.NotFoundError, lambda: agents.Runner.run_sync(agent(asked, "nobody"), "Hello!"))


def broken(asked: Asked) -> None:
    must_raise(Exception, lambda: asyncio.run(pieces(asked, broken=True)))


if __name__ == "__main__":
    serve({"chat": chat, "stream": stream, "loop": loop, "errors": errors, "broken": broken})
