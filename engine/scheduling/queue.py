"""WaitingQueue: the requests without a row: in the queue, or waiting for adapters or blocks."""

import time
from bisect import bisect_left, insort
from collections.abc import Container

from engine.lora.tiers.adapter import Adapter
from engine.scheduling.request import Request, RequestPhase


class WaitingQueue:
    """The queue of requests without a row, in the order of service: (priority, arrival).

    num_tokens: known tokens of all queued requests.
    """

    def __init__(self) -> None:
        self.waiting: list[Request] = []  # in the order of service
        # Requests that reached the head of the queue while their adapter was not on the device.
        self.waiting_for_adapter: dict[Adapter, list[Request]] = {}
        self.waiting_for_blocks: list[Request] = []  # requests that wait for loads
        self.num_tokens = 0
        self.retry = True  # whether memory or rows may now suffice for the first request
        self.only: Container[Request] | None = None  # the only requests that may start; None = all

    def __len__(self) -> int:
        blocked = len(self.waiting_for_blocks) + sum(map(len, self.waiting_for_adapter.values()))
        return len(self.waiting) + blocked

    def first(self) -> Request | None:
        """Return the request that may start next; None if there is none."""
        if self.only is None:
            return self.waiting[0] if self.waiting else None
        return next((r for r in self.waiting if r in self.only), None)

    def add_request(self, request: Request) -> None:
        """Add a new or a preempted request."""
        request.phase = RequestPhase.WAITING
        request.queued_tokens = len(request.token_ids)
        self.num_tokens += request.queued_tokens
        insort(self.waiting, request)
        self.retry |= self.waiting[0] is request

    def remove_request(self, request: Request) -> None:
        """Remove a request that starts or has ended."""
        at = bisect_left(self.waiting, request)
        assert self.waiting[at] is request
        del self.waiting[at]
        self.num_tokens -= request.queued_tokens

    def wait_for_adapter(self, adapter: Adapter, request: Request) -> None:
        """Set the request aside until its adapter is on the device."""
        self.waiting.remove(request)
        request.phase = RequestPhase.WAITING_FOR_ADAPTER
        request.adapter_us -= time.monotonic_ns() // 1000
        self.waiting_for_adapter.setdefault(adapter, []).append(request)

    def adapter_ready(self, adapter: Adapter) -> None:
        """Put the requests that wait for this adapter back into the order of service."""
        for request in self.waiting_for_adapter.pop(adapter, []):
            request.phase = RequestPhase.WAITING
            request.adapter_us += time.monotonic_ns() // 1000
            insort(self.waiting, request)
            self.retry = True

    def drop_waiting_for_adapter(self, request: Request) -> None:
        """Remove a request that has ended while it waited for its adapter."""
        assert request.adapter is not None
        others = self.waiting_for_adapter[request.adapter]
        others.remove(request)
        self.num_tokens -= request.queued_tokens
        if not others:
            del self.waiting_for_adapter[request.adapter]
            self.retry = True

    def wait_for_blocks(self, request: Request) -> None:
        """Set the request aside until its prefix is on the device."""
        self.waiting.remove(request)
        request.phase = RequestPhase.WAITING_FOR_BLOCKS
        self.waiting_for_blocks.append(request)

    def blocks_ready(self, request: Request) -> None:
        """Put a request that waited for blocks back into the order of service."""
        self.waiting_for_blocks.remove(request)
        request.phase = RequestPhase.WAITING
        insort(self.waiting, request)
        self.retry = True

    def drop_waiting_for_blocks(self, request: Request) -> None:
        """Remove a request that has ended while it waited for blocks."""
        self.waiting_for_blocks.remove(request)
        self.num_tokens -= request.queued_tokens
        self.retry = True

    def check_integrity(self) -> None:
        blocked = [r for requests in self.waiting_for_adapter.values() for r in requests]
        assert all(r.phase is RequestPhase.WAITING for r in self.waiting)
        assert all(r.phase is RequestPhase.WAITING_FOR_ADAPTER for r in blocked)
        loading = RequestPhase.WAITING_FOR_BLOCKS
        assert all(r.phase is loading for r in self.waiting_for_blocks)
        blocked += self.waiting_for_blocks
        assert self.waiting == sorted(self.waiting)
        assert self.num_tokens == sum(r.queued_tokens for r in self.waiting + blocked)
