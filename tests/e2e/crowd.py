# SPDX-License-Identifier: Apache-2.0
"""Many requests at once with the OpenAI client, which lies in SGLang's environment: `python crowd.py URL MODEL < questions > answers`.

A question has `prompt`, `max_tokens`, `stream`, and `hang_up_after`: pieces after which its client goes away, or null. An answer is text
and the reason why it ended, null where the client did not wait for it. An error ends the program.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from openai import AsyncOpenAI

TIMEOUT_S = 1_800.0


async def ask(client: AsyncOpenAI, model: str, question: dict[str, Any]) -> dict[str, Any]:
    request = {
        "model": model,
        "messages": [{"role": "user", "content": question["prompt"]}],
        "max_tokens": question["max_tokens"],
        "temperature": 0,
    }
    if not question["stream"]:
        choice = (await client.chat.completions.create(**request)).choices[0]
        return {"text": choice.message.content, "ended": choice.finish_reason}
    text, ended, pieces = "", None, 0
    async with await client.chat.completions.create(**request, stream=True) as stream:
        async for piece in stream:
            pieces += 1
            if pieces == question["hang_up_after"]:
                break
            for choice in piece.choices:
                text += choice.delta.content or ""
                ended = choice.finish_reason or ended
    return {"text": text, "ended": ended}


async def main(url: str, model: str) -> None:
    questions = json.load(sys.stdin)
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
        answers = await asyncio.gather(*(ask(client, model, question) for question in questions))
    json.dump(answers, sys.stdout)


asyncio.run(main(*sys.argv[1:]))
