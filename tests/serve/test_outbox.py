"""A request receives every item that the engine's thread puts, even if the wake comes late."""

import asyncio

from ztk.serve.loop import Outbox


def test_a_late_wake_ends_no_answer():
    async def taken() -> list:
        outbox = Outbox()
        outbox.put([(0, ValueError("first"))])
        outbox.wake()
        outbox.put([(0, ValueError("second"))])  # taken with the first one
        found = [await outbox.take()]
        outbox.wake()  # the second one's

        async def put_later() -> None:
            outbox.put([(0, ValueError("third"))])
            outbox.wake()

        later = asyncio.create_task(put_later())
        found.append(await outbox.take())
        await later
        return [str(error) for items in found for _, error in items]

    assert asyncio.run(taken()) == ["first", "second", "third"]
