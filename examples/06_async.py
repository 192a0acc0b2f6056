"""Concurrent requests that stream; one of them is given up half-way, which frees its part of the cache."""

from __future__ import annotations

import asyncio

from sameseed import AsyncLLM, SamplingParams


async def write(llm: AsyncLLM, name: str, prompt: str, patience: int) -> None:
    text = ""
    async for delta in llm.generate(prompt, SamplingParams(max_tokens=48)):
        text += delta.text
        patience -= 1
        if patience == 0:
            print(f"{name} gave up after: {text!r}")
            return
    print(f"{name} got: {text!r}")


async def main() -> None:
    async with AsyncLLM("embedded", draft="embedded-draft") as llm:
        await asyncio.gather(
            write(llm, "Ada", "def factorial(n):\n", patience=1000),
            write(llm, "Bo", "The largest planet is", patience=3),
            write(llm, "Cy", "To make tea, first", patience=1000),
        )


asyncio.run(main())
