"""Every Triton kernel compiles for Hopper, as its launcher calls it; no GPU is needed for that.

The interpreter accepts types and shapes that the compiler does not. Here the launchers run on
unfilled CPU tensors, and each launch ends where the machine code is there.
"""

import importlib
import itertools
import json
import pkgutil
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import kernels
from engine.config.engine_config import BFLOAT16
from kernels.metadata import AttentionMeta, LoraLinear, LoraStep

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("needs Triton's compiler", allow_module_level=True)

from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from kernels.attention.decode import attention_decode  # noqa: E402
from kernels.attention.decode_plan import plan  # noqa: E402
from kernels.attention.inputs import AttentionInputs  # noqa: E402
from kernels.attention.prefill import attention_prefill  # noqa: E402
from kernels.attention.quantized_decode import quantized_decode  # noqa: E402
from kernels.attention.quantized_prefill import quantized_prefill  # noqa: E402
from kernels.experts import few_packed as few_packed_module  # noqa: E402
from kernels.experts import packed as packed_experts_module  # noqa: E402
from kernels.gemm.packed import dot as dot_module  # noqa: E402
from kernels.gemm.packed import gemv4 as gemv4_module  # noqa: E402
from kernels.gemm.packed import gemv8 as gemv8_module  # noqa: E402
from kernels.gemm.packed.codes import code_of, four_bytes, four_nibbles  # noqa: E402
from kernels.gemm.packed.dot import expand, packed_dot  # noqa: E402
from kernels.gemm.packed.gemv import packed_gemv  # noqa: E402
from kernels.gemm.packed.int8 import int8_linear  # noqa: E402
from kernels.gemm.packed.mma4 import MmaTile, mma4  # noqa: E402
from kernels.gemm.packed.round_rows import round_rows  # noqa: E402
from kernels.kv.format import FORMATS  # noqa: E402
from kernels.kv.inputs import RopeInputs  # noqa: E402
from kernels.kv.quantized import QuantizedKV  # noqa: E402
from kernels.kv.write import rope_kv_write  # noqa: E402
from kernels.launch import device as device_module  # noqa: E402
from kernels.launch.device import SHARED_MEMORY as ROOMS  # noqa: E402
from kernels.lora import lora_add, lora_gated, tile_rows  # noqa: E402
from kernels.packed import E2M1, Format, PackedWeight  # noqa: E402
from kernels.recurrent import delta_chunks_cuda  # noqa: E402
from kernels.recurrent.chunks_cuda import PassLaunch  # noqa: E402
from tests.kernels import launches as launch_modules  # noqa: E402
from tests.kernels.hopper import Hopper, Older  # noqa: E402
from tests.kernels.launches import PARTS  # noqa: E402
from tests.kernels.launches.attention import latent  # noqa: E402
from tests.kernels.launches.experts import (  # noqa: E402
    experts,
    experts_in_fewer_bits,
    experts_in_floats,
    experts_in_fragments,
)
from tests.kernels.launches.recurrent import delta  # noqa: E402
from tests.kernels.launches.sizes import EPS, MODELS, NUM_BLOCKS, bf16, int32, int64  # noqa: E402

SHARED_MEMORY = 227 * 1024  # bytes that one program may have on sm_90
HOPPERS = ("experts_in_floats", "experts_in_fragments")
# The parts that are compiled for other devices. 8.6 has the least memory of those with bfloat16.
DEVICES: dict[tuple[int, int], tuple[str, ...]] = {
    (7, 5): ("layers", "attention", "sampling", "assembly"),  # in float16
    (8, 0): ("attention", "quantized_attention", "latent", "delta"),
    (8, 6): tuple(part for part in PARTS if part not in HOPPERS),
    (8, 9): ("packed", "quantized_attention"),
    (10, 0): ("attention", "latent"),
    (12, 0): ("layers", "attention", "latent"),
}
# These read tiles of bfloat16, 16 bytes at once: element by element they are hundreds of loads.
WIDE = {
    *("_conv_kernel", "_delta_convolve_kernel", "_delta_norm_kernel"),
    *("_latent_decode_kernel", "_latent_prefill_kernel"),
}
# But for OLMo Hybrid's, 17,340 to a row: 16 bytes at once want 16 elements to divide that.
NARROW = ("smollm2-135m", "delta")


@dataclass
class Launches:
    """The recorded launches, as (kernel, compiled) pairs.

    compile: whether kernels are compiled; else only their names are recorded.
    """

    seen: list[tuple[str, Any]]
    compile: bool = True


def modules() -> Iterator[ModuleType]:
    for module in pkgutil.walk_packages(kernels.__path__, "kernels."):
        yield importlib.import_module(module.name)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    actual = Launches([])
    run: Callable[..., Any] = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = None
        # `kernels.launch.compiling` sends structs of constants to other processes.
        for struct in (value for value in options.values() if hasattr(value, "_fields")):
            sent = json.loads(json.dumps(struct))
            assert tuple(tuple(x) if isinstance(x, list) else x for x in sent) == struct
            # From Triton 3.8 on these are attributes of its own tuple.
            assert not {"values", "type"} & {*struct._fields}, struct
        if actual.compile:
            compiled = run(self, *args, grid=grid, warmup=True, **options)
        actual.seen.append((self.__name__, compiled))
        return compiled

    monkeypatch.setattr(driver, "_active", Hopper())
    monkeypatch.setattr(JITFunction, "run", compile_only)
    for module in modules():
        for name, value in (
            ("pdl", lambda device: {"PDL": True, "launch_pdl": True}),
            ("num_sms", lambda device: 132),
        ):
            if hasattr(module, name) and module.__name__ != "kernels.launch.pdl":
                monkeypatch.setattr(module, name, value)
    return actual


def cases() -> Iterator[Any]:
    """Yield every part at the sizes of every model; most are nightly, and a few are only slow."""
    for model, part in itertools.product(MODELS, PARTS):
        smoke = (model, part) in (("smollm2-135m", "layers"), ("smollm2-135m", "attention"))
        mark = pytest.mark.slow if smoke else pytest.mark.nightly
        yield pytest.param(model, part, marks=mark)


@pytest.mark.nightly
def test_scores_of_latents_are_made_once(launches: Launches) -> None:
    """Bug: all eight warps are given to the 64 heads of a tile, of which four have their rows: half
    of them computes what the others do, scores and exponentials, in decodes and in chunks."""
    latent("llama-8b")
    seen = [launch for launch in launches.seen if launch[0].startswith("_latent_")]
    eight = [(name, launch) for name, launch in seen if launch.metadata.num_warps == 8]
    assert {name for name, _ in eight} >= {"_latent_decode_kernel", "_latent_prefill_kernel"}
    for name, compiled in eight:
        if name != "_latent_expanded_kernel":  # 128 rows
            assert "warpsPerCTA = [8, 1], instrShape" not in compiled.asm["ttgir"], name


@pytest.mark.parametrize(("model", "part"), list(cases()))
def test_compiles_for_hopper(model: str, part: str, launches: Launches) -> None:
    """A kernel that only the interpreter has run fails on its first step on a GPU."""
    PARTS[part](model)
    assert launches.seen
    for name, compiled in launches.seen:
        assert compiled.asm["cubin"], name
        assert compiled.metadata.shared <= SHARED_MEMORY, name
        if name in WIDE and (model, part) != NARROW:
            assert compiled.asm["ptx"].count("ld.global.b16") < 64, name


@pytest.mark.nightly
def test_hopper_acts_as_an_older_device(
    launches: Launches, of_device: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a switch that changes the choice of kernels, and leaves the compiler at Hopper's
    instructions; or code that Hopper cannot load."""

    class Fresh(Hopper):
        def get_current_device(self) -> str:
            return "acts as 8.0"  # other tests may have compiled for Hopper's own

    of_device((8, 0))
    monkeypatch.setattr(driver, "_active", Fresh())
    with triton.knobs.runtime.scope():
        device_module.act_as((8, 0))
        PARTS["attention"]("smollm2-135m")
    assert launches.seen
    for name, compiled in launches.seen:
        ptx = compiled.asm["ptx"]
        assert ".target sm_90" in ptx, name
        assert not re.search(r"wgmma|cp\.async\.bulk|griddepcontrol", ptx), name
        assert compiled.metadata.shared <= ROOMS[8, 0], name


def unwritten(cubin: bytes, path: Path) -> list[str]:
    """Return the additions of machine code to a register that no earlier line has written."""
    path.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    text = subprocess.run([tool, "-c", path], capture_output=True, text=True, check=True).stdout
    seen: set[str] = set()
    actual = []
    for line in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?) ;", text):
        added = re.match(r"IADD3\S* (R\d+), (?:P\d, )?\1,", line)
        if added and added[1] not in seen:
            actual.append(line)
        width = 4 if ".128" in line or ".M88.4" in line else 2 if re.search("64|WIDE", line) else 1
        width = 128 if "GMMA" in line else width
        for number in map(int, re.findall(r"\bR(\d+)", line)):
            seen.update(f"R{launch}" for launch in range(number, number + width))
    return actual


@pytest.mark.nightly
def test_places_that_two_operands_share(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Bug: ptxas 12.8 makes descriptors of registers that nothing has written where operands of
    two swizzles lie at one place, which launches of one stage have: an illegal address, by what
    ran before. `kernels.launch.assembler` takes another one."""
    monkeypatch.setattr(delta_chunks_cuda, "pass_launch", lambda *_: PassLaunch(32, 4, 1))
    delta("llama-8b")
    seen = [launch for name, launch in launches.seen if name == "_delta_pass_kernel"]
    swizzles = re.findall(r"swizzlingByteWidth = (\d+)", seen[0].asm["ttgir"])
    assert len(set(swizzles)) > 1
    assert not unwritten(seen[0].asm["cubin"], tmp_path / "cubin")


@pytest.mark.nightly
def test_decodes_of_delta_read_all_at_once(launches: Launches) -> None:
    """Bug: a piece of a state is asked for once the last one is stored, or once convolutions are
    made; a state that is read by less than 16 bytes."""
    delta("qwen3-0.6b")
    seen = [launch for name, launch in launches.seen if name == "_delta_decode_kernel"]
    assert len(seen) == 6  # with states written late and not; beside runs of drafts, too
    verified = [launch for name, launch in launches.seen if name == "_delta_verify_kernel"]
    assert len(verified) == 8  # few runs and many, and what settles them
    for compiled in (*seen, *verified):
        ptx = compiled.asm["ptx"]
        _, late = ptx.split("griddepcontrol.wait")
        first = late.split("bar.sync")[0]
        assert first.count("ld.global.v4.b32") >= 8  # of 128 x 32 elements, 32 a thread


@pytest.fixture
def of_device(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Yield a function that switches to another compute capability, for launchers too."""

    def become(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(device_module, "_acting", [capability])
        device_module.forget()
        monkeypatch.setattr(driver, "_active", Older(capability))
        dependent = capability >= (9, 0)
        options = {"PDL": dependent} | ({"launch_pdl": True} if dependent else {})
        for module in modules():
            if hasattr(module, "pdl") and module.__name__ != "kernels.launch.pdl":
                monkeypatch.setattr(module, "pdl", lambda device: options)
        if capability < BFLOAT16:
            for info in pkgutil.iter_modules(launch_modules.__path__, "tests.kernels.launches."):
                module = importlib.import_module(info.name)
                if hasattr(module, "bf16"):
                    monkeypatch.setattr(module, "bf16", fp16)

    yield become
    monkeypatch.undo()
    device_module.forget()


def fp16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float16)


def other_devices() -> Iterator[Any]:
    """Yield pytest parameters (capability, part) of DEVICES. CI runs one of them, the nightly run
    all."""
    for capability, parts in DEVICES.items():
        for part in parts:
            smoke = (capability, part) == ((12, 0), "layers")
            mark = pytest.mark.slow if smoke else pytest.mark.nightly
            name = f"{capability[0]}.{capability[1]}-{part}"
            yield pytest.param(capability, part, marks=mark, id=name)


@pytest.mark.parametrize(("capability", "part"), list(other_devices()))
def test_compiles_for_other_devices(
    capability: tuple[int, int], part: str, launches: Launches, of_device: Callable[..., None]
) -> None:
    """Bug: tiles for Hopper's memory, which an L40S or an RTX 4090 does not have; instructions
    that begin with a later device."""
    of_device(capability)
    small = part in ("layers", "plain") or capability < BFLOAT16
    PARTS[part]("smollm2-135m" if small else "llama-8b")
    assert launches.seen
    for name, compiled in launches.seen:
        assert compiled.asm["cubin"], name
        assert compiled.metadata.shared <= ROOMS[capability], name


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_numbers_of_codes_are_read_once(name: str, launches: Launches) -> None:
    """Bug: each thread of a tile of scores reads and unpacks the numbers of a quarter of the keys,
    191 and 399 loads for 40; codes of keys that are stored a byte at a time, or pass shared memory
    for each of six sums of Hadamard's."""
    form = replace(FORMATS[name], hadamard=64 if name == "int4" else 0)
    caches = [QuantizedKV.empty(form, (NUM_BLOCKS, 8, 16, 128)) for _ in range(2)]
    meta = AttentionMeta(
        int32(300), int64(300), int32(3), int32(2), int32(2, 40), 0, 600, counts=int32(2)
    )
    qkv, table = bf16(300, 48 * 128), torch.empty(1024, 128)
    q = rope_kv_write(RopeInputs(qkv, table, None, None, EPS, *caches, 32), meta)
    quantized_prefill(AttentionInputs(q, *caches, 128**-0.5), meta, torch.empty_like(q))
    actual = {kernel: compiled.asm["ptx"] for kernel, compiled in launches.seen}
    written, attended = actual["_rope_kv_write_kernel"], actual["_quantized_prefill_kernel"]
    assert attended.count("ld.global") < 64
    assert "cp.async.cg" in attended and "wgmma.mma_async" in attended
    assert "st.global.b8" not in written
    assert written.count("bar.sync") <= 2


@pytest.mark.nightly
def test_products_compile_for_ampere(launches: Launches, of_device: Callable[..., None]) -> None:
    """8-bit floats, which it does not convert, and products of 8-bit integers in tiles for
    Hopper."""
    of_device((8, 0))
    device = torch.device("cpu")
    for form in (
        Format(8, 4096, torch.float32, code="e4m3", activations=8),
        Format(8, 128, torch.float32, code="e4m3", rows=128),
    ):
        weight = PackedWeight(form, 6144, 4096, None, device)
        packed_gemv(bf16(1, 4096), weight)
        packed_dot(bf16(64, 4096), weight)
        expand(weight, bf16(1, 4096))
    whole = PackedWeight(Format(8, 4096, torch.float32, zero=128), 6144, 4096, None, device)
    for tokens in (64, 2048):
        rows, scales = round_rows(bf16(tokens, 4096), to=torch.int8)
        int8_linear(rows, scales, whole, torch.bfloat16)
    for part in (None, "silu"):
        round_rows(bf16(300, 4096), gate=part, to=torch.int8, group=128)
    for name, compiled in launches.seen:
        assert compiled.metadata.shared <= 163 * 1024, name


@pytest.mark.nightly
@pytest.mark.parametrize(
    "form",
    [
        Format(4, 128, zero=8),
        Format(4, 128, offset="add"),
        Format(8, 4096, torch.float32, zero=128),
        Format(8, 128, zero=128),
        Format(8, 128, torch.float32, code="e4m3", rows=128),
    ],
    ids=["int4", "int4-add", "int8", "int8-128", "fp8-block"],
)
def test_pairs_of_codes_compile(
    form: Format, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PTX, which the interpreter does not know: for a few tokens, and for many."""
    weight = PackedWeight(form, 6144, 4096, None, torch.device("cpu"))
    how = four_nibbles(weight)
    if form.bits == 8:
        how = [four_bytes(code_of(weight)), "", "", ""]
    monkeypatch.setattr(dot_module, "pair_ptx", lambda x, weight, width: how)
    for tokens in (16, 64, 128, 256):
        packed_dot(bf16(tokens, 4096), weight)
    expand(weight, bf16(1, 4096))
    for name, compiled in launches.seen:
        assert compiled.metadata.shared <= SHARED_MEMORY, name
        assert compiled.asm["cubin"], name


@pytest.mark.nightly
def test_pairs_of_floats_compile(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """PTX for experts in MXFP4, each tile; words that are decoded one code at a time after all."""
    monkeypatch.setattr(
        packed_experts_module, "_floats_fit", lambda x, weight: weight.form.table == E2M1
    )
    experts_in_fewer_bits("llama-8b")
    actual = 0
    for name, compiled in launches.seen:
        assert compiled.metadata.shared <= SHARED_MEMORY, name
        assert compiled.asm["cubin"], name
        actual += "0x01c001c0" in compiled.asm["ptx"]
    assert actual >= 8


@pytest.mark.nightly
def test_packed_experts_are_read_wide(launches: Launches) -> None:
    """Words of codes, or of x, that are read one by one, as where a thread's do not belong
    together; numbers that change threads on their way to each other."""
    experts_in_fewer_bits("llama-8b")
    seen = [launch for launch in launches.seen if launch[0].startswith("_few_packed_")]
    assert len(seen) >= 6
    for name, compiled in seen:
        codes = [line for line in compiled.asm["ptx"].split("\n") if "evict_first" in line]
        codes = [line for line in codes if "ld." in line]
        assert codes, name
        assert all(".v4.b32" in line or ".v2.b32" in line for line in codes), name
        assert compiled.metadata.shared <= 1024, name  # of sums alone


def spilled(cubin: bytes, path: Path) -> int:
    """Return the bytes of local memory of each thread."""
    path.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    command = [tool, "-res-usage", path]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"STACK:(\d+)", text)[0])


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["llama-8b", "qwen3-0.6b"])
def test_experts_multiply_floats_of_eight_bits(
    model: str, launches: Launches, tmp_path: Path
) -> None:
    """Codes that become 16-bit numbers on their way to the matrix units, or pass registers; sums
    for which these have no room."""
    experts_in_floats(model)
    seen = [launch for launch in launches.seen if launch[0].startswith("_grouped_")]
    assert len(seen) >= 10
    for name, compiled in seen:
        ptx = compiled.asm["ptx"]
        products = re.findall(r"wgmma.mma_async\S*", ptx)
        assert products and all("f32.e4m3.e4m3" in launch for launch in products), name
        assert "cp.async.cg" in ptx or "cp.async.bulk.tensor" in ptx, name
        assert "cp.async.ca" not in ptx, name
        assert compiled.metadata.shared <= SHARED_MEMORY, name
        assert spilled(compiled.asm["cubin"], tmp_path / "cubin") <= 16, name  # an address or two


@pytest.mark.nightly
def test_floats_that_the_device_converts(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PTX, which the interpreter does not know; words of codes or of x that are read in parts."""
    monkeypatch.setattr(few_packed_module, "decoder", lambda device: gemv8_module._FOUR)
    tile = few_packed_module.PairTile(2, 32, 1, 4, converts=True)
    monkeypatch.setattr(few_packed_module, "UP8", tile)
    monkeypatch.setattr(few_packed_module, "DOWN8", ((float("inf"), tile),))
    experts_in_fewer_bits("llama-8b")
    seen = [launch for launch in launches.seen if launch[0].startswith("_few_packed_")]
    actual = [compiled.asm["ptx"] for _, compiled in seen if "e4m3x2" in compiled.asm["ptx"]]
    assert len(actual) >= 4
    for ptx in actual:
        codes = [line for line in ptx.split("\n") if "evict_first" in line and "ld." in line]
        assert codes and all(".v4.b32" in line for line in codes)


@pytest.mark.nightly
def test_fragments_go_from_memory_to_matrix_units(launches: Launches) -> None:
    """Codes that are read by less than 16 bytes, or take another way than through a thread's own
    registers; a pair of codes that costs more than nine logical operations in four; spills."""
    experts_in_fragments("llama-8b")
    seen = [launch for launch in launches.seen if launch[0].startswith("_fragments_")]
    assert len({name for name, _ in seen}) == 3
    for name, compiled in seen:
        ptx = compiled.asm["ptx"]
        codes = [line for line in ptx.split("\n") if "evict_first" in line and "ld." in line]
        assert codes, name
        assert all(".v4.b32" in line for line in codes), name
        assert "cp.async" not in ptx, name
        assert compiled.metadata.shared <= 8192, name  # of sums, and of the expert that is found
        decoded = ptx.count("0x81c081c0")
        assert decoded and decoded % 3 == 0, name
        assert ptx.count("lop3.b32 t, l") == ptx.count("0x81808180") == decoded // 3, name
        assert ".local" not in ptx, name


@pytest.mark.nightly
def test_words_of_codes_compile(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """PTX again: a token's products with 8-bit floats and 4-bit integers, each tile that there
    is."""
    monkeypatch.setattr(gemv8_module, "decoder", lambda device: gemv8_module._FOUR)
    monkeypatch.setattr(gemv4_module, "decoder", lambda device: gemv4_module._SIXTEEN)
    device, x, norm = torch.device("cpu"), bf16(1, 4096), bf16(4096)
    for form, product in (
        (Format(8, 4096, torch.float32, code="e4m3", activations=8), gemv8_module.gemv8),
        (Format(8, 128, torch.float32, code="e4m3", rows=128), gemv8_module.gemv8),
        (Format(4, 128, zero=8), gemv4_module.gemv4),
    ):
        up, qkv, out = (
            PackedWeight(form, rows, 4096, None, device) for rows in (28672, 6144, 4096)
        )
        product(x, up, norm=norm, eps=1e-5, gate="silu")
        product(x, qkv, norm=norm, eps=1e-5)
        product(x, out, residual=bf16(1, 4096))
    assert len(launches.seen) == 9
    for name, compiled in launches.seen:
        assert compiled.asm["cubin"], name


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "form",
    [Format(4, 128, zero=8), Format(4, 128, torch.float32, offset="shift")],
    ids=["int4", "int4-zero"],
)
def test_integers_go_from_memory_to_matrix_units(
    form: Format, dtype: torch.dtype, launches: Launches
) -> None:
    """Codes that are read by less than 16 bytes, or pass shared memory; spills; a pair of codes
    that costs more than a shift, a logical operation and, in float16, a subtraction."""
    device, x = torch.device("cpu"), torch.empty(4, 4096, dtype=dtype)
    up, out = (PackedWeight(form, rows, 4096, None, device) for rows in (28672, 4096))
    for tile in (MmaTile(8, 1, 4), MmaTile(16, 1, 1), MmaTile(4, 1, 1), MmaTile(4, 2, 2)):
        mma4(x, up, gate="silu", config=tile)
        mma4(x, out, residual=x, config=tile)
        for _, compiled in launches.seen[-2:]:
            ptx, spans = compiled.asm["ptx"], tile.ahead * tile.tiles
            codes = [line for line in ptx.split("\n") if "evict_first" in line and "ld." in line]
            assert codes and len(codes) % (2 * spans) == 0
            assert all(".v4.b32" in line for line in codes)
            decoded = ptx.count("lop3.b32 a")
            assert decoded and decoded % (32 * spans) == 0
            shifts = 3 if dtype == torch.bfloat16 else 2  # of four pairs
            assert 4 * ptx.count("shr.u32 t") == shifts * decoded
            lean = dtype == torch.bfloat16
            assert (ptx.count("x2 a0, a0") == 0) is lean
            assert ".local" not in ptx
            assert compiled.metadata.shared <= 8192  # of sums


@pytest.mark.nightly
def test_heads_of_512_fit(launches: Launches) -> None:
    """Tiles of keys that leave no room for each other: Gemma 4's full layers."""
    k_cache, v_cache, q = (
        bf16(NUM_BLOCKS, 4, 16, 512),
        bf16(NUM_BLOCKS, 4, 16, 512),
        bf16(20, 32, 512),
    )
    meta = AttentionMeta(
        int32(20), int64(20), int32(3), int32(2), int32(2, 40), 0, 600, counts=int32(2)
    )
    rope_kv_write(
        RopeInputs(
            bf16(20, 40 * 512), torch.empty(1024, 512), None, None, EPS, k_cache, v_cache, 32
        ),
        meta,
    )
    inputs = AttentionInputs(q, k_cache, v_cache, 1.0)
    attention_prefill(inputs, meta, torch.empty_like(q))
    decodes = replace(meta, block_table=int32(20, 512))
    decodes.plan = plan(int32(20), 32, k_cache, 8192, int32(1))
    attention_decode(inputs, decodes, torch.empty_like(q))
    for form in FORMATS.values():
        form = replace(form, hadamard=256) if form.name == "int4" else form
        codes = [QuantizedKV.empty(form, (NUM_BLOCKS, 4, 16, 512)) for _ in range(2)]
        qkv, table = bf16(20, 40 * 512), torch.empty(1024, 512)
        rope_kv_write(RopeInputs(qkv, table, None, None, EPS, *codes, 32), meta)
        inputs = AttentionInputs(q, *codes, 1.0)
        quantized_prefill(inputs, meta, torch.empty_like(q))
        decodes.plan = plan(int32(20), 32, codes[0], 8192, int32(1))
        quantized_decode(inputs, decodes, torch.empty_like(q))
    for name, compiled in launches.seen:
        assert compiled.metadata.shared <= SHARED_MEMORY, name


@pytest.mark.nightly
def test_adapters_are_read_wide(launches: Launches) -> None:
    """A rank that the compiler does not know to be a multiple of 16 makes it read B two bytes at a
    time, which costs more than everything else."""
    step = LoraStep(
        int32(64), int32(5, 3), tile_rows(64, 2), bf16(2, 1024), int32(2, 7, 4), torch.empty(1), 16
    )
    lora_add(bf16(64, 6144), bf16(64, 4096), LoraLinear(0, 4096, (4096, 1024, 1024)), step)
    lora_gated(bf16(64, 28672), bf16(64, 4096), LoraLinear(4, 4096, (14336,) * 2), step, "silu")
    for name, compiled in launches.seen:
        assert "ld.global.b16" not in compiled.asm["ptx"], name
        assert "ld.global.v4" in compiled.asm["ptx"] or "cp.async.cg" in compiled.asm["ptx"], name


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["llama-8b", "qwen3-0.6b"])
def test_experts_are_read_wide(model: str, launches: Launches) -> None:
    """A mask or a stride that the compiler knows too little of makes it read weights two bytes at a
    time."""
    experts(model)
    for name, compiled in launches.seen:
        ptx = compiled.asm["ptx"]
        if name in ("_few_up_kernel", "_few_down_kernel"):
            weights = [line for line in ptx.split("\n") if "evict_first" in line and "ld." in line]
            assert weights, name
            assert all(".v4.b32" in line for line in weights), name
        if name.startswith("_grouped_"):
            assert "cp.async.cg" in ptx or "cp.async.bulk.tensor" in ptx, name
            assert "cp.async.ca" not in ptx, name


@pytest.mark.nightly
def test_whole_numbers_take_the_matrix_units(launches: Launches) -> None:
    """8-bit integers that are multiplied one by one, or read a byte at a time."""
    form = Format(8, 4096, torch.float32, zero=128, activations=8)
    weight = PackedWeight(form, 6144, 4096, None, torch.device("cpu"))
    for tokens in (64, 256, 2048):
        rows = torch.empty(tokens, 4096, dtype=torch.int8)
        int8_linear(rows, torch.empty(tokens, 1), weight, torch.bfloat16)
    products = [compiled for name, compiled in launches.seen if name == "_int8_dot_kernel"]
    assert len(products) == 3
    for compiled in products:
        assert re.search(r"wgmma\.mma_async[.\w]*\.s32\.s8\.s8", compiled.asm["ptx"])
        assert "cp.async.cg" in compiled.asm["ptx"]
        assert "ld.global.b8" not in compiled.asm["ptx"]
        assert compiled.metadata.shared <= SHARED_MEMORY


@pytest.mark.nightly
def test_expand_waits_for_memory_once(launches: Launches) -> None:
    """Splits that are added up as they come are waited for one after the other, each with two
    barriers: most of what adapters cost a small step. And B, which nobody writes, is fetched while
    shrink still runs."""
    for rank in (16, 64):
        tiles, table = int32(5, 3), int32(2, 7, 4)
        rows, slab = tile_rows(64, 2), bf16(2, 1024)
        step = LoraStep(int32(64), tiles, rows, slab, table, torch.empty(1), rank)
        lora_add(bf16(64, 4096), bf16(64, 14336), LoraLinear(0, 14336, (4096,)), step)
    for name, compiled in launches.seen:
        if name == "_expand_kernel":
            early, late = compiled.asm["ptx"].split("griddepcontrol.wait")
            assert "ld.global.v4" in early
            first, *others = late.split("bar.sync")
            assert first.count("ld.global.v4") >= 6
            if compiled is launches.seen[1][1]:  # all ranks at once
                assert not any("ld.global" in part for part in others)


def test_no_kernel_is_left_out(launches: Launches) -> None:
    """A new kernel that nothing above launches."""
    launches.compile = False
    for part in PARTS.values():
        part("qwen3-0.6b")
    every = {
        value.__name__
        for module in modules()
        for value in vars(module).values()
        if isinstance(value, JITFunction) and value.__name__.endswith("_kernel")
    }
    assert {name for name, _ in launches.seen} == every
