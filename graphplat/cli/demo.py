"""``graphplat demo``: a real model answers through captured graphs, and is checked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from graphplat.cli.demo_run import DemoReport

DEFAULT_PROMPT = "What is the capital of France?"

Prefill = Literal["full", "breakable", "disabled"]
Decode = Literal["full", "breakable", "compiled", "disabled"]
Precision = Literal["float32", "bfloat16", "float16"]


def command(
    *,
    device: Annotated[str, typer.Option(help="Torch device to run on.")] = "cpu",
    model: Annotated[
        Path | None, typer.Option(help="Hugging Face folder or GGUF file; by default the bundled weights.")
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="A question; give it several times for several at once.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 32,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Requests at once. Without prompts, five questions of ours share them."),
    ] = None,
    prefill: Annotated[Prefill, typer.Option(help="How prompts run.")] = "full",
    decode: Annotated[Decode, typer.Option(help="How new tokens run.")] = "full",
    dtype: Annotated[Precision, typer.Option(help="Below float32, near ties may flip.")] = "float32",
    random: Annotated[bool, typer.Option("--random", help="Run random weights of the 135M shape.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Answer a question with a real model through captured graphs.

    Greedy tokens are compared with those of the model's own generate(); the command
    fails if one differs.
    """
    from rich.console import Console

    from graphplat.cli.demo_run import Demo

    console = Console(quiet=json)
    report = Demo(
        device=device,
        model=model,
        prompts=choose_prompts(prompt or [], batch),
        max_new_tokens=max_new_tokens,
        batch=batch or min(8, max(1, len(prompt or []))),
        prefill=prefill,
        decode=decode,
        dtype=dtype,
        random=random,
        console=console,
    ).run()
    finish(report, console, json=json)


def finish(report: DemoReport, console: Console, *, json: bool) -> None:
    """Print *report*, and fail the command if a token differs. Raises :class:`typer.Exit`."""
    from graphplat.cli import render

    if json:
        render.print_json(report)
    else:
        show(report, console)
    if not report.identical:
        raise typer.Exit(1)


def choose_prompts(given: list[str], batch: int | None) -> list[str]:
    """The prompts to run: *given* ones, or our own; half as many again as run at once.

    So some have to wait, and join the batch when others leave it.
    """
    if given and (batch is None or len(given) >= batch):
        return given
    if batch is None or batch == 1:
        return [DEFAULT_PROMPT]
    wanted = batch + (batch + 1) // 2
    own = (_QUESTIONS[index % len(_QUESTIONS)] for index in range(wanted))
    return (given + list(own))[:wanted]


_QUESTIONS = (
    DEFAULT_PROMPT,
    "Name three colours.",
    "What is two plus two?",
    "Explain in one short sentence why the sky looks blue during the day.",
    "Say hello.",
    "Which animal barks, has four legs and is often called the best friend of people?",
)


def show(report: DemoReport, console: Console) -> None:
    """Print a finished demo for people."""
    from graphplat.cli import render

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    if len(report.answers) > 1:
        for answer in report.answers:
            say(f"\n> {answer.prompt}\n{answer.text}")
    shapes = [
        (s.key.phase, s.key.size, s.backend, s.seconds, s.warmup_seconds, render.size(s.bytes))
        for s in report.capture.shapes
    ]
    columns: tuple[str, ...] = ("phase", "size", "backend", "capture s", "warm-up s", "memory")
    console.print(render.table("Captured shapes", columns, shapes))
    for skip in report.capture.skipped:
        say(f"not captured: {skip.key or skip.phase} ({skip.reason}): {skip.detail}")
    speeds = []
    for speed in report.speeds:
        rates = (speed.prefill_tokens_per_second, speed.decode_tokens_per_second)
        shown = ("-" if rate is None else f"{rate:.1f}" for rate in rates)
        speeds.append((speed.mode, *shown, f"{speed.seconds:.2f}"))
    columns = ("way", "prompt tokens/s", "new tokens/s", "seconds")
    console.print(render.table("Speed", columns, speeds))
    for phase, steps in report.steps.items():
        say(f"{phase}: {steps.describe()}")
    for answer in report.answers:
        for way, place in answer.differs.items():
            say(f"DIFFERENT from generate(): {way}, {answer.prompt!r}, from new token {place}")
    if report.identical:
        say(f"Tokens are identical to generate(): {report.tokens} of {report.tokens}.")
