"""Free callbacks for vLLM's sleep-mode memory that map a block again first.

vLLM gives memory back to the device without torch's knowledge: all of it when an engine sleeps, and at the end of
loading what is free by then (weights in whose place the engine reads the trainer's). When an engine is closed, torch
frees the same blocks, and vLLM's extension unmaps and releases them a second time, which ends the process. Here such a
block is mapped again just before; at most one at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Allocation = tuple[int, int, int, int]
"""device, size, address, and where the extension keeps its handle"""


class MappedFrees:
    """Free callbacks that map a block again first if vLLM has unmapped it without telling torch."""

    def __init__(self, allocator: Any, map_again: Callable[[Allocation], None]) -> None:
        """allocator: vLLM's CuMemAllocator. map_again: its extension's create_and_map."""
        self._allocator, self._map_again = allocator, map_again
        self._forget: Callable[[int], Allocation] = allocator._python_free_callback
        self._given_back: dict[int, Allocation] = {}

    def by_hand(self, address: int) -> Allocation:
        """vLLM unmaps the block itself; torch still has it."""
        handle = self._given_back[address] = self._forget(address)
        return handle

    def by_torch(self, address: int) -> Allocation:
        """The extension is about to unmap the block."""
        handle = self._given_back.pop(address, None)
        if handle is not None:
            self._map_again(handle)
            return handle
        data = self._allocator.pointer_to_data[address]
        if data.is_asleep:
            self._map_again(data.handle)
            data.is_asleep = False
        return self._forget(address)


def guard_frees() -> None:
    """Make the frees of this process's vLLM allocator safe. Before an engine that can sleep is made; safe to repeat."""
    from vllm.device_allocator import cumem

    allocator: Any = cumem.CuMemAllocator.get_instance()
    if isinstance(getattr(allocator.python_free_callback, "__self__", None), MappedFrees):
        return
    frees = MappedFrees(allocator, cumem.create_and_map)
    allocator.python_free_callback, allocator._python_free_callback = frees.by_torch, frees.by_hand
