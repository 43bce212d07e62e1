"""`motet plan`: declares it. `plan_commands.py` carries it out."""

from pathlib import Path
from typing import Annotated

import typer

from motet.domain import MAX_LORA_RANK
from motet_cli.completion import Adapters, LawName, Lengths, Rate, Requests, Speed, completion_of
from motet_simulator.lines import MAX_TOKENS

MAX_RUNNERS = 1000

Trace = Annotated[Path, typer.Option("--trace", help="A workload, or a published trace of a known form.")]


def plan(  # noqa: PLR0917 - typer calls it by name
    trace: Trace,
    profile: Annotated[Path, typer.Option("--profile", help="What `motet profile` has written.")],
    slo: Annotated[str, typer.Option("--slo", help="What is promised, such as ttft=500ms,tpot=50ms.")],
    adapters: Adapters = None,
    law: LawName = "zipf",
    runners: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_RUNNERS, help="Ask about this number, instead of the fewest that suffice."),
    ] = None,
    most_runners: Annotated[int, typer.Option(min=1, max=MAX_RUNNERS, help="The most that are tried.")] = 64,
    percent: Annotated[float, typer.Option(help="Of the requests, which must meet each promise.")] = 95.0,
    seeds: Annotated[
        int, typer.Option(min=1, max=100, help="How many simulations. Each draws other random numbers.")
    ] = 3,
    rate: Rate = None,
    speed: Speed = 1.0,
    lengths: Lengths = None,
    requests: Requests = None,
    estimate: Annotated[
        str, typer.Option(help="How lengths are estimated: answers (seen so far), exact or max_tokens.")
    ] = "answers",
    max_tokens: Annotated[
        int,
        typer.Option("--max-tokens", min=1, max=MAX_TOKENS, help="That clients ask for, where the trace does not say."),
    ] = 1024,
    rank: Annotated[int, typer.Option(min=1, max=MAX_LORA_RANK, help="Of the adapters.")] = 16,
    machine: Annotated[str | None, typer.Option(help="The machine that is planned for. Default: this one.")] = None,
    model: Annotated[str, typer.Option(help="The model that is planned for. Default: the profile's.")] = "",
    kernels: Annotated[str, typer.Option(help="Its kernels. Default: the profile's.")] = "",
    anyway: Annotated[bool, typer.Option("--anyway", help="Take a profile of something else.")] = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write a picture (SVG).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say how many runners a workload needs, by simulating it. Exit status 1 if the promise cannot be kept."""
    from motet_cli.plan_commands import Question, lengths_named
    from motet_cli.plan_commands import plan as run
    from motet_simulator.plan.slo import Slo
    from motet_simulator.profiles.identity import this_machine

    completion = completion_of(rate=rate, speed=speed, lengths=lengths, adapters=adapters, law=law, requests=requests)
    raise typer.Exit(
        run(
            Question(
                trace=trace,
                profile=profile,
                slo=Slo.parse(slo, percent=percent),
                completion=completion,
                runners=runners,
                most_runners=most_runners,
                seeds=seeds,
                lengths=lengths_named(estimate),
                max_tokens=max_tokens,
                rank=rank,
                machine=this_machine() if machine is None else machine,
                model=model,
                kernels=kernels,
                anyway=anyway,
                plot=plot,
                as_json=as_json,
            )
        )
    )
