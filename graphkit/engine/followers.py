"""An engine on several ranks: rank 0 takes the calls, and the others repeat them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from graphkit.distributed import Channel, RankGroup
from graphkit.engine.request import NewTokens, Request
from graphkit.errors import ConfigError, RankError
from graphkit.step import SamplingParams

_CHECK_EVERY = 32
_STEP, _CLOSE = "step", "close"


class Followers:
    """Repeats the calls of rank 0 on all ranks, and compares the tokens of their steps.

    Equal requests, seeds and weights give equal steps, so that calls are all that ranks need to
    share. Another rank than 0 either follows, or makes the same calls itself. Every few steps the
    ranks compare a checksum of each step's tokens.

    Args:
        group: The ranks; all have the same batch.

    Raises:
        ConfigError: The group's ranks may have different batches.
    """

    def __init__(self, group: RankGroup) -> None:
        if not group.same_batch:
            raise ConfigError(
                "an engine runs the same requests on all ranks. Pass RankGroup(same_batch=True).",
                field="group",
            )
        self._group, self._channel = group, Channel(group)
        self._calls: list[list[Any]] = []
        self._requests: dict[int, Request] = {}
        self._numbers: dict[Request, int] = {}
        self._submitted = self._steps = 0
        self._sums: list[int] = []
        self._follows = self._is_closed = False

    def submitted(self, request: Request) -> None:
        """Pass a request on with the next step, under a number that all ranks give it."""
        self._submitted += 1
        self._requests[self._submitted], self._numbers[request] = request, self._submitted
        sampling = asdict(request.sampling)
        sampling["stop_token_ids"] = sorted(sampling["stop_token_ids"])
        self._calls.append(["submit", list(request.prompt_ids), sampling])

    def aborted(self, request: Request) -> None:
        """Pass the end of a request on with the next step. The request has been submitted here."""
        self._calls.append(["abort", self._numbers[request]])

    def step(self) -> None:
        """Let all ranks run a step, after the calls since the last one.

        Raises:
            RankError: This rank made other calls than rank 0, or a rank has ended.
        """
        self._share(_STEP)

    def close(self) -> None:
        """Let the other ranks return from ``follow``, unless a rank has left."""
        if not self._is_closed and not self._group.is_lost:
            self._is_closed = True
            self._share(_CLOSE)

    def follow(
        self,
        submit: Callable[[list[int], SamplingParams], Request],
        abort: Callable[[Request], None],
        step: Callable[[], object],
    ) -> None:
        """Repeat the calls of rank 0 until it closes its engine."""
        self._follows = True
        try:
            while not self._is_closed:
                calls, then = _parsed(self._channel.broadcast())
                for name, *arguments in calls:
                    if name == "submit":
                        prompt, sampling = arguments
                        submit(prompt, SamplingParams(**sampling))
                    else:
                        abort(self._requests[arguments[0]])
                self._is_closed = then == _CLOSE
                if not self._is_closed:
                    step()
        finally:
            self._follows = False

    def check(self, new_tokens: NewTokens) -> None:
        """Compare the tokens of steps between ranks, every few steps.

        Raises:
            RankError: A step of another rank generated something else.
        """
        numbered = [(self._numbers[request], tokens) for request, tokens in new_tokens]
        self._sums.append(zlib.crc32(repr(numbered).encode()))
        self._steps += 1
        for request in [request for request in self._numbers if request.is_finished]:
            del self._requests[self._numbers.pop(request)]
        if len(self._sums) < _CHECK_EVERY:
            return
        mine, self._sums = self._sums, []
        by_rank = self._channel.gather(mine)
        for index, sums in enumerate(zip(*by_rank, strict=True)):
            for rank, each in enumerate(sums):
                if each != sums[0]:
                    step = self._steps - len(mine) + index
                    raise self._group.lose(
                        f"rank {rank} generated other tokens than rank 0 in step {step}. All ranks "
                        "need the same weights, settings and kernels.",
                        (rank,),
                    )

    def _share(self, then: str) -> None:
        """Send the calls since the last step, or compare them with those that rank 0 sends."""
        calls, self._calls = self._calls, []
        if self._follows:
            return
        message = json.dumps([calls, then]) if calls or then != _STEP else ""
        sent = self._channel.broadcast(message.encode()).decode()
        if sent != message:
            error = RankError(
                f"rank {self._group.rank} made other calls than rank 0: {message or _STEP!r} "
                f"instead of {sent or _STEP!r}. Make the same calls on all ranks, or call follow() "
                "on all but rank 0.",
                ranks=(self._group.rank,),
            )
            self._group.leave(error)
            raise error


def _parsed(message: bytes) -> tuple[list[list[Any]], str]:
    calls, then = json.loads(message) if message else ([], _STEP)
    return calls, then
