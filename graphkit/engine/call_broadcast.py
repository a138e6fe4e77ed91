"""The calls of an engine on rank 0, which the other ranks repeat."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict
from operator import itemgetter
from typing import Any

from graphkit.distributed import Channel, RankGroup
from graphkit.distributed.rank_store import names_of_ranks
from graphkit.engine.request import FinishReason, NewTokens, Request
from graphkit.engine.step import SamplingParams
from graphkit.errors import ConfigError, RankError

_CHECK_EVERY = 32
_STEP, _CLOSE, _COMPARE = "step", "close", "compare"


class CallBroadcast:
    """Repeats the calls of rank 0 on all ranks, and compares their tokens.

    Equal requests, seeds and weights give equal steps, so that ranks only need to share calls. All
    ranks but rank 0 either run ``worker_loop``, or make the same calls themselves. When requests
    finish, when the engine closes and at least every 32 steps, the ranks compare checksums of the
    whole output of each finished request and of the tokens of each step.

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
        self._aborted: list[Request] = []
        """Requests that were aborted since the last check. Waiting ones end without a step."""
        self._submitted = self._steps = 0
        self._sums: list[tuple[str, int]] = []
        """Checksums that ranks compare next, by name of the step or the request."""
        self._follows = self._is_closed = False

    def submitted(self, request: Request) -> None:
        """Send a request with the next step. It has the same number on all ranks."""
        self._submitted += 1
        self._requests[self._submitted], self._numbers[request] = request, self._submitted
        sampling = asdict(request.sampling)
        sampling["stop_token_ids"] = sorted(sampling["stop_token_ids"])
        sampling["logit_bias"] = [*(request.sampling.logit_bias or {}).items()]  # JSON has no ints
        self._calls.append(["submit", list(request.prompt_ids), sampling])

    def aborted(self, request: Request) -> None:
        """Send the abort of a submitted request with the next step."""
        assert request.finish_reason is not None, "its caller has set it"
        self._calls.append(["abort", self._numbers[request], request.finish_reason.name])
        self._aborted.append(request)

    def step(self) -> None:
        """Send the calls since the last step, and let all ranks run a step.

        Raises:
            RankError: This rank made other calls than rank 0, or a rank has failed.
        """
        self._share(_STEP)

    def close(self) -> None:
        """Compare the last tokens, and let the other ranks return from ``worker_loop``.

        Does nothing after a rank has failed.

        Raises:
            RankError: A rank has failed, or generated other tokens than rank 0.
        """
        if not self._is_closed and not self._group.has_raised:
            self._is_closed = True
            if self._sums:
                self._compare()
            self._share(_CLOSE)

    def worker_loop(
        self,
        submit: Callable[[list[int], SamplingParams], Request],
        abort: Callable[[Request, FinishReason], None],
        step: Callable[[], object],
    ) -> None:
        """Repeat the calls of rank 0 until it closes its engine."""
        self._follows = True
        try:
            while not self._is_closed:
                calls, then = _parsed(self._receive())
                for name, *arguments in calls:
                    if name == "submit":
                        prompt, sampling = arguments
                        sampling["logit_bias"] = dict(sampling["logit_bias"])
                        submit(prompt, SamplingParams(**sampling))
                    else:
                        number, reason = arguments
                        abort(self._requests[number], FinishReason[reason])
                self._is_closed = then == _CLOSE
                if not self._is_closed:
                    step()
        except BaseException as error:
            self._group.leave(error)
            raise
        finally:
            self._follows = False

    def check(self, new_tokens: NewTokens, ended: Iterable[Request]) -> None:
        """Compare tokens between ranks if requests have finished, and every few steps.

        Args:
            new_tokens: Tokens of the step that has been run.
            ended: Requests that ended since the last call, unless they were aborted.

        Raises:
            RankError: A rank has failed, or generated other tokens than rank 0.
        """
        self._group.require_open()
        numbered = [(self._numbers[request], tokens) for request, tokens in new_tokens]
        self._sums.append((f"step {self._steps}", zlib.crc32(repr(numbered).encode())))
        self._steps += 1
        aborted, self._aborted = self._aborted, []
        finished = {request: self._numbers[request] for request in (*ended, *aborted)}
        for request, number in sorted(finished.items(), key=itemgetter(1)):
            del self._numbers[request]
            del self._requests[number]
            output = repr((request.output_ids, request.finish_reason))
            self._sums.append((f"request {number}", zlib.crc32(output.encode())))
        if finished or len(self._sums) >= _CHECK_EVERY:
            self._compare()

    def _compare(self) -> None:
        """Compare checksums with those of rank 0, on all ranks."""
        message = json.dumps([self._sums, _COMPARE])
        sent = self._channel.broadcast(message.encode())
        if _parsed(sent)[1] != _COMPARE:
            raise self._diverged((self._group.rank,), "ended a request in another step than rank 0")
        self._compare_with(sent)

    def _compare_with(self, sent: bytes) -> None:
        """Compare checksums with a message of rank 0, and the results of all ranks."""
        first = [(name, checksum) for name, checksum in _parsed(sent)[0]]
        mine, self._sums = self._sums, []
        pairs = zip(first, [*mine, *[None] * len(first)], strict=False)
        equal = next((place for place, (a, b) in enumerate(pairs) if a != b), len(first))
        places = [place for (place,) in self._channel.gather([equal])]
        wrong = tuple(rank for rank, place in enumerate(places) if place < len(first))
        if wrong:
            where = first[places[wrong[0]]][0]
            raise self._diverged(wrong, f"generated other tokens than rank 0 in {where}")

    def _diverged(self, ranks: tuple[int, ...], what: str) -> RankError:
        advice = "All ranks need the same weights, settings and kernels."
        return self._group.fail(ranks, f"{names_of_ranks(ranks)} {what}. {advice}")

    def _receive(self) -> bytes:
        """Return the next calls of rank 0. Compares the checksums that it sends before them."""
        while _parsed(sent := self._channel.broadcast())[1] == _COMPARE:
            self._compare_with(sent)
        return sent

    def _share(self, then: str) -> None:
        """Send the calls since the last step, or compare them with those that rank 0 sends."""
        calls = self._calls
        if self._follows:
            self._calls = []
            return
        message = (json.dumps([calls, then]) if calls or then != _STEP else "").encode()
        sent = self._channel.broadcast(message) if not self._group.rank else self._receive()
        self._calls = []
        if sent != message:
            rank = self._group.rank
            raise self._group.fail(
                (rank,),
                f"rank {rank} made other calls than rank 0: {message.decode() or _STEP!r} instead "
                f"of {sent.decode() or _STEP!r}. Make the same calls on all ranks, or call "
                "worker_loop() on all but rank 0.",
            )


def _parsed(message: bytes) -> tuple[list[list[Any]], str]:
    calls, then = json.loads(message) if message else ([], _STEP)
    return calls, then
