"""An engine on several ranks: rank 0 takes the calls, and the others repeat them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from graphkit.distributed import Channel, RankGroup
from graphkit.engine.request import Request
from graphkit.engine.transfers import NewTokens
from graphkit.errors import ConfigError, ReplayError
from graphkit.step import SamplingParams

_CHECK_EVERY = 32
_STEP, _CLOSE = "step", "close"


class Followers:
    """Repeats the calls of rank 0 on all ranks, and compares the tokens of their steps.

    Equal requests, seeds and weights give equal steps, so that calls are all that ranks need to
    share. Every ``check_every`` steps they compare a checksum of each step's tokens.

    Args:
        group: The ranks; all have the same batch.
        check_every: Steps between two comparisons.

    Raises:
        ConfigError: The group's ranks may have different batches.
    """

    def __init__(self, group: RankGroup, *, check_every: int = _CHECK_EVERY) -> None:
        if not group.same_batch:
            raise ConfigError(
                "an engine runs the same requests on all ranks. Pass RankGroup(same_batch=True).",
                field="group",
            )
        self._group, self._channel = group, Channel(group)
        self._calls: list[list[Any]] = []
        self._requests: dict[int, Request] = {}
        self._numbers: dict[Request, int] = {}
        self._submitted = 0
        self._check_every, self._sums = check_every, list[int]()
        self._steps = 0
        self._is_following = False

    def require_leader(self, what: str) -> None:
        """Refuse a call on another rank than 0.

        Raises:
            ReplayError: This rank follows rank 0.
        """
        if self._group.rank and not self._is_following:
            raise ReplayError(
                f"{what} is called on rank {self._group.rank}, but rank 0 takes the calls of an "
                "engine with several ranks. Call follow() on all others."
            )

    def submitted(self, request: Request) -> None:
        """Pass a request on with the next step, under a number that all ranks give it."""
        self._submitted += 1
        self._requests[self._submitted], self._numbers[request] = request, self._submitted
        if not self._is_following:
            sampling = asdict(request.sampling)
            sampling["stop_token_ids"] = sorted(sampling["stop_token_ids"])
            self._calls.append(["submit", list(request.prompt_ids), sampling])

    def aborted(self, request: Request) -> None:
        """Pass the end of a request on with the next step. The request has been submitted here."""
        if not self._is_following:
            self._calls.append(["abort", self._numbers[request]])

    def lead(self, then: str) -> None:
        """Send all calls since the last step, and what comes after them. Only rank 0 does."""
        if not self._is_following:
            calls, self._calls = self._calls, []
            message = json.dumps([calls, then]) if calls or then != _STEP else ""
            self._channel.broadcast(message.encode())

    def step(self) -> None:
        """Let the other ranks run a step."""
        self.lead(_STEP)

    def close(self) -> None:
        """Let the other ranks return from ``follow``, unless a rank has left."""
        if not self._group.rank and not self._group.is_lost:
            self.lead(_CLOSE)

    def follow(
        self,
        submit: Callable[[list[int], SamplingParams], Request],
        abort: Callable[[Request], None],
        step: Callable[[], object],
    ) -> None:
        """Repeat the calls of rank 0 until it closes its engine."""
        self._is_following = True
        try:
            while True:
                message = self._channel.broadcast()
                calls, then = json.loads(message) if message else ([], _STEP)
                for name, *arguments in calls:
                    if name == "submit":
                        prompt, sampling = arguments
                        submit(prompt, SamplingParams(**sampling))
                    else:
                        abort(self._requests[arguments[0]])
                if then == _CLOSE:
                    return
                step()
        finally:
            self._is_following = False

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
        if len(self._sums) < self._check_every:
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
