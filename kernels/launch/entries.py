"""entry_of: a device function that finds the entry of a block of query tokens.

An entry is a request's sequence in the step. The host only knows an upper bound of the number of
blocks, so programs search for their entry.
"""

import triton
import triton.language as tl


@triton.jit
def entry_of(query_start, first_entry, num_entries, index, QUERIES: tl.constexpr):
    """Return the entry of block `index`, the entry's first token in the step, and the block's first
    query in the entry.

    Blocks have QUERIES queries of one entry.
    """
    # Blocks of entry e start at index (query_start[e] - origin) // QUERIES + (e - first_entry).
    # Entry num_entries stands for the padding tokens after the last entry.
    origin = tl.load(query_start + first_entry)
    low = first_entry
    high = num_entries
    while low < high:
        middle = (low + high + 1) // 2
        blocks_before = (tl.load(query_start + middle) - origin) // QUERIES + middle - first_entry
        at_or_before = blocks_before <= index
        low = tl.where(at_or_before, middle, low)
        high = tl.where(at_or_before, high, middle - 1)
    begin = tl.load(query_start + low)
    first = (index - ((begin - origin) // QUERIES + low - first_entry)) * QUERIES
    return low, begin, first
