"""Sums over programs that split K: the one that comes last adds up what all have left."""

import triton
import triton.language as tl


@triton.jit
def merged(total, partial_ptr, counter_ptr, at, inside, size, split):
    """(sum over all programs of this tile, whether this one came last). They add up in the order of their numbers, so
    bits do not depend on which came last; the counter is left at 0 for the next launch.

    Args:
        at, inside: where `total` lies in a result, whose size is `size` (64 bits), and what of it does.
    """
    tile, mine = tl.program_id(0), tl.program_id(1)
    tl.store(partial_ptr + mine * size + at, total, mask=inside)
    tl.debug_barrier()
    last = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == split - 1
    if last:
        total = tl.zeros_like(total)
        for i in range(split):
            total += tl.load(partial_ptr + i * size + at, mask=inside, other=0.0, cache_modifier=".cg")
        tl.store(counter_ptr + tile, 0)
    return total, last
