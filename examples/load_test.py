"""Requests side by side over the asyncio client: python examples/load_test.py [ADDRESS] [REQUESTS] [CONCURRENCY].

`pdactors bench serve` measures much more carefully; this shows how to write one's own.
"""

import asyncio
import statistics
import sys
import time

from pdactors import AsyncClient, PDError

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "tcp://127.0.0.1:7071"
NUM_REQUESTS = int(sys.argv[2]) if len(sys.argv) > 2 else 16
CONCURRENCY = int(sys.argv[3]) if len(sys.argv) > 3 else 4


async def main() -> None:
    room = asyncio.Semaphore(CONCURRENCY)
    async with AsyncClient(ADDRESS) as client:

        async def ask(number: int) -> tuple[int, float, float] | PDError:
            async with room:
                try:
                    answer = await client.generate(f"Story number {number}: once upon a time", max_tokens=32)
                except PDError as error:
                    return error
            return answer.usage.completion_tokens, answer.timing.ttft_ms, answer.timing.tpot_ms

        began = time.perf_counter()
        outcomes = await asyncio.gather(*(ask(number) for number in range(NUM_REQUESTS)))
        seconds = time.perf_counter() - began
    failed = [outcome for outcome in outcomes if isinstance(outcome, PDError)]
    served = [outcome for outcome in outcomes if not isinstance(outcome, PDError)]
    if served:
        tokens, ttft, tpot = zip(*served, strict=True)
        print(f"{len(served)} answers, {sum(tokens) / seconds:.1f} tokens/s")
        print(f"median TTFT {statistics.median(ttft):.1f} ms, median TPOT {statistics.median(tpot):.1f} ms")
    for error in failed:
        print(f"failed: {error.code}: {error}")
    sys.exit(1 if failed else 0)


asyncio.run(main())
