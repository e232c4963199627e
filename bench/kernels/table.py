"""Every kernel alone on one GPU: time, rate, and rate relative to the device's best or a library's.

    python -m bench.kernels.table --out bench/results

The device's best rate is measured in the same run: the bandwidth of a large copy for memory-bound
kernels, the rate of a large matmul for others. --only selects cases by how their names begin.
--fa3 also runs FlashAttention 3 on a long prompt, if vLLM, which contains it, is installed. A
failing case gives a row with its error, and the exit code is 1.

Each case first runs once in one of several processes, which compiles the kernels.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench.report.result_file import RawLines, versions

COMPILE_S = 60


def fa3() -> dict[str, Callable[..., Callable[[], object]]]:
    """Return calls of vLLM's FlashAttention 3: with contiguous keys, and with our pages."""
    from vllm.vllm_flash_attn.flash_attn_interface import (  # type: ignore[import-not-found]
        flash_attn_varlen_func,
    )

    def attend(q: Any, key: Any, value: Any, meta: Any, **where: Any) -> Callable[[], object]:
        return partial(
            flash_attn_varlen_func,
            q,
            key,
            value,
            max_seqlen_q=meta.max_kv_len,  # prompts from their first token on
            cu_seqlens_q=meta.query_start,
            max_seqlen_k=meta.max_kv_len,
            causal=True,
            fa_version=3,
            **where,
        )

    def in_a_row(q: Any, k_cache: Any, v_cache: Any, meta: Any) -> Callable[[], object]:
        shape = (q.shape[0], k_cache.shape[1], k_cache.shape[3])
        key, value = (cache.transpose(1, 2).reshape(shape) for cache in (k_cache, v_cache))
        return attend(q, key, value, meta, cu_seqlens_k=meta.query_start)

    def paged(q: Any, k_cache: Any, v_cache: Any, meta: Any) -> Callable[[], object]:
        key, value = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        where = {"seqused_k": meta.kv_len, "block_table": meta.block_table}
        return attend(q, key, value, meta, **where)

    return {"fa3": in_a_row, "fa3_paged": paged}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[""], metavar="PREFIX", help="of cases' names")
    parser.add_argument("--fa3", action="store_true", help="needs vLLM")
    parser.add_argument("--out", type=Path, help="folder for the result files")
    parser.add_argument("--these", nargs="+", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()

    from bench.kernels import measure
    from bench.kernels.cases import all_cases
    from bench.kernels.sweeping import first_launches, launch_these
    from kernels.dispatch import kernels_for

    began = time.perf_counter()
    libraries = {}
    if args.fa3:
        try:
            libraries = fa3()
        except Exception as error:  # another package's import may raise anything
            print(f"without FlashAttention 3: {error}", flush=True)
    cases = {
        name: make
        for name, make in all_cases(libraries=libraries).items()
        if name.startswith(tuple(args.only))
    }
    if not cases:
        parser.error(f"--only: no case begins with {' or '.join(args.only)}")
    if args.these is not None:
        # Do not tune GEMMs here, as other processes would disturb the timings.
        kernels_for("cuda").tune_linear = lambda weights, sizes, add: None
        all_rows = list(cases.values())
        launch_these(args.these, lambda number: all_rows[number]().calls[0]())
        return 0
    # This compiles the cases' kernels. A failing case fails again, and is reported, when timed.
    first_launches("bench.kernels.table", ["--only", *args.only], len(cases), COMPILE_S)
    print(f"compiled after {time.perf_counter() - began:.1f} s", flush=True)
    best = measure.Best(measure.copy_bandwidth(), measure.matmul_rate())
    print(f"copy {best.copy / 1e12:.2f} TB/s, product {best.product / 1e12:.0f} TFLOP/s")
    raw = RawLines(args.out, "kernels") if args.out else None
    rows = []
    for row in measure.rows(cases, best, measure.time_us):
        print(measure.told(row), flush=True)
        rows.append(row)
        if raw:
            raw.keep(row, show=False)
    seconds = round(time.perf_counter() - began, 1)
    failed = sum("error" in row for row in rows)
    missed = [row["case"] for row in rows if row.get("reached") is False]
    print(f"{len(rows)} cases in {seconds} s, {failed} failed; targets missed: {missed or 'none'}")
    if raw:
        config = {
            "ours": {"sizes": "llama-8b unless named", "dtype": "bfloat16", "block_size": 16},
            "best": {"copy_bytes_s": best.copy, "product_flop_s": best.product},
            "only": args.only,
            "seconds": seconds,
            "versions": versions(*(["vllm"] if libraries else [])),
        }
        raw.finish(config, rows)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
