"""A stream of the engine for an event loop: every step runs in a thread, so that the loop stays free."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor

from kv_rag.answer import Answer, AnswerStream


async def in_thread(start: Callable[[], AnswerStream]) -> AsyncGenerator[str | Answer, None]:
    """The pieces of ``start()`` and then its answer.

    One thread for each stream, so that closing it queues behind the step that is running when the task is cancelled: a
    running step cannot be stopped, the ones after it are not begun.
    """
    loop = asyncio.get_running_loop()
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv_rag")
    opened: list[AnswerStream] = []

    def open_stream() -> None:
        opened.append(start())

    def close_stream() -> None:
        for stream in opened:
            stream.close()

    try:
        await loop.run_in_executor(thread, open_stream)
        while (piece := await loop.run_in_executor(thread, next, opened[0], None)) is not None:
            yield piece
        yield opened[0].answer
    finally:
        thread.submit(close_stream)
        thread.shutdown(wait=False)
