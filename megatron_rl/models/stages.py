"""Which layers each model chunk of a pipeline holds. Pure."""

from __future__ import annotations


def stage_layers(
    num_layers: int, pp: int, vpp: int = 1, first: int | None = None, last: int | None = None
) -> list[list[range]]:
    """[pp][vpp] layers of each model chunk, by global number, as Megatron-Core places them.

    first, last: layers of the first and last stage where they are not an even share. A stage's layers are cut into vpp
    chunks; chunk 0 of every stage comes first, then chunk 1 of every stage, and so on.

    Raises ValueError, saying what does not divide, where the layers cannot be placed.
    Example: 8 layers, pp 2, vpp 2 -> [[range(0, 2), range(4, 6)], [range(2, 4), range(6, 8)]]
    """
    counts: list[int | None] = [None] * pp
    if first is not None:
        counts[0] = first
    if last is not None:
        counts[-1] = last
    open_stages = counts.count(None)
    left = num_layers - sum(count for count in counts if count is not None)
    if left < 0 or (open_stages == 0 and left) or (open_stages and left % open_stages) or (open_stages and not left):
        raise ValueError(f"{left} of {num_layers} layers are left for {open_stages} of {pp} pipeline stages")
    share = left // open_stages if open_stages else 0
    sizes = [share if count is None else count for count in counts]
    odd = [size for size in sizes if size % vpp]
    if odd:
        raise ValueError(f"a stage of {odd[0]} layers cannot be cut into vpp {vpp} chunks")
    stages: list[list[range]] = [[] for _ in range(pp)]
    start = 0
    for _ in range(vpp):
        for stage, size in zip(stages, sizes, strict=True):
            stage.append(range(start, start + size // vpp))
            start += size // vpp
    return stages
