"""Copies between host and GPU, in order, beside what the GPU computes.

A lane is a stream of its own. Three rules make its use safe; none of them depends on how fast anything is:
- a lane waits for what the caller's stream has been given before it copies from a tensor of the GPU, and the tensor's
  memory is not given to others before that copy is done;
- who reads what a lane has written lets his stream follow a mark that was set behind the copy;
- memory of the host that is to be written again is left alone until a mark behind the copies from it is reached.

The caller's stream is the one that is current in the calling thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch


class Mark(Protocol):
    """A point of a lane: what was put before it."""

    def done(self) -> bool:
        """Whether all of it is copied."""
        ...

    def wait(self) -> None:
        """Return when all of it is copied."""
        ...

    def follow(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let the caller's stream use these tensors, which the lane has written.

        What the stream is given from now on comes after the copies, and the tensors' memory stays theirs until what
        the stream has been given by the time they are dropped is done.
        """
        ...


class Lane(Protocol):
    """Copies to or from one device, in the order in which they were given. Threads may share a lane."""

    def host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """New memory of the host, not initialised, that copies go beside computation from or to."""
        ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """New memory of the device, not initialised, to be written by this lane alone."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Put a copy, converted to the target's dtype on the device.

        Args:
            target, source: of one shape; one of them from `host`, or memory of the host that is not written again
                before a mark behind this is reached, the other one on the device.
        """
        ...

    def mark(self) -> Mark:
        """The point behind what was put so far."""
        ...


class CudaMark:
    """A `Mark` of a `CudaLane`."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self._event.synchronize()

    def follow(self, tensors: Iterable[torch.Tensor]) -> None:
        stream = torch.cuda.current_stream(self._device)
        if not self.done():
            stream.wait_event(self._event)
        for tensor in tensors:
            tensor.record_stream(stream)


class CudaLane:
    """A `Lane` over a CUDA stream and pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # torch hands a few streams out in turns, those of each priority apart. On a stream that a graph is captured on,
        # which has the usual priority, a copy would become a part of the graph.
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        with torch.inference_mode(False):  # a tensor made in inference mode could not be written outside it
            return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        # On the lane's stream: what becomes free is used again behind the lane's copies, never before them.
        with torch.inference_mode(False), torch.cuda.stream(self._stream):
            return torch.empty(tuple(shape), dtype=dtype, device=self._device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if source.is_cuda:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            source.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            if source.dtype != target.dtype:  # torch would convert on the host
                source = source.to(self._device, non_blocking=True).to(target.dtype)
            target.copy_(source, non_blocking=True)

    def mark(self) -> CudaMark:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return CudaMark(event, self._device)
