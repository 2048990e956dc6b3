"""Frees of sleep-mode memory, on a device that, like CUDA, does not forgive an unmap of what is not mapped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron_rl.rollout.vllm_memory import Allocation, MappedFrees


class Device:
    """Mapped addresses, and an allocator that keeps books as vLLM's does."""

    def __init__(self) -> None:
        self.mapped: set[int] = set()
        self.allocator: Any = SimpleNamespace(pointer_to_data={}, _python_free_callback=self._forget)
        self.frees = MappedFrees(self.allocator, self.map)

    def map(self, handle: Allocation) -> None:
        assert handle[2] not in self.mapped
        self.mapped.add(handle[2])

    def unmap(self, handle: Allocation) -> None:
        self.mapped.remove(handle[2])

    def malloc(self, address: int) -> None:
        handle = (0, 2 << 20, address, 7 * address)
        self.allocator.pointer_to_data[address] = SimpleNamespace(handle=handle, is_asleep=False)
        self.map(handle)

    def _forget(self, address: int) -> Allocation:
        return self.allocator.pointer_to_data.pop(address).handle

    def sleep(self) -> None:
        for data in self.allocator.pointer_to_data.values():
            self.unmap(data.handle)
            data.is_asleep = True

    def free(self, address: int) -> None:
        """What the extension does when torch frees a block."""
        self.unmap(self.frees.by_torch(address))


def test_each_block_is_mapped_when_torch_frees_it() -> None:
    """Awake, asleep, and given back by vLLM's hand before; then an address that comes again."""
    device = Device()
    for address in (1, 2, 3):
        device.malloc(address)
    device.unmap(device.frees.by_hand(3))
    device.free(1)
    device.sleep()
    for address in (3, 2):
        device.free(address)
    assert not device.mapped and not device.allocator.pointer_to_data
    device.malloc(3)
    device.free(3)
    assert not device.mapped
