"""Generates pages from the code: `python docs/generate.py`.

It writes docs/configuration.md from the configuration models, docs/models.md from the records of
architectures and kernels/README.md from the tables of kernels. `--modules [FOLDER]` prints each
module with its first sentence instead, `--fields` the fields of all request bodies.
"""

import ast
import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import torch
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from deployments.api.fields.schema import Body
from deployments.api.openapi.page import TAKEN, rows
from deployments.api.routes import ROUTES
from deployments.config.load import MantaConfig, PoolConfig
from deployments.config.models import ModelLimitsConfig, ServedModelConfig
from engine.architectures import ARCHITECTURES, GGUFS, WRAPPERS
from engine.config.engine_config import EngineConfig
from engine.config.quant_formats import QUANT_FORMATS
from kernels.attention.candidates import (
    CHUNK_ATTENTION,
    DECODE_ATTENTION,
    FIXED_ATTENTION,
    LATENT_CHUNKS,
    LATENT_DECODE,
)
from kernels.attention.inputs import AttentionForm, LatentForm
from kernels.candidates import Candidate
from kernels.experts.candidates import (
    EXPERTS,
    FIXED_EXPERTS,
    FIXED_PACKED_EXPERTS,
    PACKED_EXPERTS,
)
from kernels.gemm.packed.candidates import FIXED_LINEAR, PACKED_LINEAR
from kernels.kv.format import FORMATS as KV_FORMATS
from kernels.packed import E2M1, Format
from kernels.reference import Kernels as ReferenceKernels

ROOT = Path(__file__).parents[1]
TARGET = Path(__file__).with_name("configuration.md")
MODELS = Path(__file__).with_name("models.md")
KERNELS = ROOT / "kernels" / "README.md"
DEVICES = {"cpu": "CPU", "cuda": "CUDA"}
PACKAGES = ("deployments", "engine", "kernels", "loadtest", "bench")

HEAD = """# Configuration

One YAML file describes one served model, or [several](several-models.md). `manta serve` and `manta
plan` refuse a misspelt key, a wrong value or a missing model folder before Ray or a model is
touched, with exit code 2. The error names the file, the line and the nearest right name.

```yaml
model: default            # a folder, a .gguf file, a hub name, or a small model out of a package
replicas: 2
engine:
  max_model_len: 4096
http:
  port: 8000
```

All keys are optional; `{}` serves the default model. Environment variables override single values:
`MANTA_HTTP_PORT=9000`, `MANTA_ENGINE_MAX_MODEL_LEN=2048` (MANTA_, section, key). `MANTA_CACHE` is
the folder of converted models, by default `~/.cache/manta`.

`python docs/generate.py` writes this page from `deployments/config/` (`models.py`, `endpoint.py`,
`adapters.py`) and `engine/config/engine_config.py`.
"""


def render() -> str:
    """Return the text of docs/configuration.md."""
    parts = [HEAD, "## Top level\n", _table(MantaConfig)]
    for name, field in MantaConfig.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            parts += _section(name, section)
    keys = ", ".join(f"`{key}`" for key in ServedModelConfig.model_fields)
    limits = ", ".join(f"`{key}`" for key in ModelLimitsConfig.model_fields)
    parts += [
        "## `models.NAME`\n",
        f"{inspect.getdoc(ServedModelConfig)}\n",
        f"Keys, as at the [top level](#top-level): {keys}.\n",
        "## `models.NAME.limits`\n",
        f"{inspect.getdoc(ModelLimitsConfig)}\n",
        f"Keys, as in [`limits`](#limits): {limits}.\n",
        "## `pools.gpu` and `pools.cpu`\n",
        f"{inspect.getdoc(PoolConfig)}\n",
        _table(PoolConfig),
        "## `engine`\n",
        "For all pools at the top level, for a model under `models.NAME.engine`, for one pool "
        "under `pools.<kind>.engine`.\n",
        _engine_table(),
        "## Formats of `engine.quantization`\n",
        "These values quantise 16-bit weights while they are loaded; [quantization](quantization.md"
        "#on-a-gpu) has their activations. `manta convert` writes some of these formats as "
        "checkpoints ([convert.md](convert.md#fewer-bits)).\n",
        _formats_table(),
    ]
    return "\n".join(parts)


def _section(name: str, section: type[BaseModel]) -> list[str]:
    """Return the lines of a configuration section: its heading and table, then those of its
    subsections."""
    parts = [f"## `{name}`\n", f"{inspect.getdoc(section)}\n", _table(section, name)]
    for inner, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            parts += _section(f"{name}.{inner}", field.annotation)
    return parts


def _table(section: type[BaseModel], within: str = "") -> str:
    """Return the table of a section's keys. within: the section's name, which begins anchors."""
    rows = [
        (name, _kind(field), _default(field), field.description)
        for name, field in section.model_fields.items()
        if field.description
    ]
    sections = [
        f"[`{name}`](#{within}{name})"
        for name, field in section.model_fields.items()
        if not field.description
    ]
    return _markdown(rows) + (f"\nSections: {', '.join(sections)}.\n" if sections else "")


def _kind(field: FieldInfo) -> str:
    section = field.annotation
    if isinstance(section, type) and issubclass(section, BaseModel):
        return "section"
    return _type(section)


def _type(annotation: Any) -> str:
    if isinstance(annotation, type):
        return annotation.__name__
    text = str(annotation).replace("typing.", "").replace("deployments.config.load.", "")
    text = text.removesuffix(" | None")
    text = re.sub(r"Literal\[(.*?)\]", lambda m: m[1].replace("'", ""), text)
    return "mapping" if text.startswith(("dict", "Annotated")) else text


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return ""
    return "" if field.default is None else str(field.default)


def _engine_table() -> str:
    """Return the table of EngineConfig's fields, whose texts are in its docstring as `name:
    text`."""
    text = inspect.getdoc(EngineConfig) or ""
    parts = re.split(r"^(\w+): ", text, flags=re.MULTILINE)
    wording = {
        name: " ".join(meaning.split())
        for name, meaning in zip(parts[1::2], parts[2::2], strict=True)
    }
    hints = get_type_hints(EngineConfig)
    rows = []
    for field in msgspec.structs.fields(EngineConfig):
        if field.name in ("model", "revision", "log_level"):
            continue
        default = "" if field.default in (None, msgspec.NODEFAULT, ()) else str(field.default)
        rows.append((field.name, _type(hints[field.name]), default, wording.get(field.name, "")))
    return _markdown(rows)


def _formats_table() -> str:
    """Return the table of quantisation formats; formats that differ only in groups share a row."""
    names: dict[str, list[str]] = {}
    for quant in QUANT_FORMATS.values():
        devices = " and ".join(DEVICES[device] for device in quant.devices)
        size = quant.name.rpartition("-")[2]
        meaning = quant.describe.replace(
            f"for {size} inputs", "for as many inputs as the name says"
        )
        columns = f"{devices} | {quant.checkpoint or '-'} | {meaning}"
        names.setdefault(columns, []).append(f"`{quant.name}`")
    lines = ["| `quantization` | devices | `convert` | what it is |", "| --- | --- | --- | --- |"]
    lines += [f"| {', '.join(name)} | {columns} |" for columns, name in names.items()]
    return "\n".join(lines) + "\n"


def _markdown(rows: list[tuple[str, str, str, str]]) -> str:
    lines = ["| key | type, default | meaning |", "| --- | --- | --- |"]
    for key, kind, default, meaning in rows:
        linked = re.sub(r"docs/([\w-]+)\.md", r"[\1](\1.md)", meaning)
        cells = (f"`{key}`", f"{kind}: `{default}`" if default else kind, linked)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


MODELS_HEAD = """# Models

`architectures` in a model's config.json decides what runs. A name that this page lacks is refused,
and the error has the nearest name; code of a model folder is never run. Weights are read from
safetensors, without these from pickled shards (`pytorch_model*.bin`; nothing in them is run), and
from GGUF files. [adding-a-model.md](adding-a-model.md) says how to add an architecture, and
[tokenizers.md](tokenizers.md) which tokenizer files are read.

- **GGUF files** are computed as llama.cpp does, which ignores the sliding windows of Mistral 7B
  0.1, Qwen 2 and StarCoder 2. Their tokenizers are SentencePiece's BPE, and byte-level BPE with the
  splits in `deployments/checkpoints/gguf_tokenizer.py`.
  [`engine.quantization`](configuration.md#engine) says where their matrices stay quantised.
- **`longrope`** (Phi 3 and 4 with long contexts) has two sets of factors, and all texts use the
  same one: the long set if `max_model_len` exceeds `original_max_position_embeddings`, else the
  short set. transformers takes the short set for each text up to that length.
- **A key that config.json leaves out** has the default of the config class of its `model_type` in
  the pinned transformers (`engine/architectures/class_defaults.json`). End tokens come from the
  folder's files alone.
- **MiMo-V2**'s values are narrower than its keys; the KV cache pads them with zeros, which takes
  1.2 times the memory.
- **Orion, EXAONE 3 and DeciLM** (Nemotron Super) have no class in transformers; tests compare them
  with classes there that compute the same.

`python docs/generate.py` writes this page from `engine/architectures/`. Brackets have
names in GGUF files.
"""
MODELS_OF_SEVERAL = """## Text models inside others

Of these models the text model runs, which `text_config` describes, and the vision tower of those
that see [images](images.md). Other towers are left out, and their tensors are not read. If the
file does not say whether the head is the embedding (`tie_word_embeddings`), its `text_config` does.
"""


def _in_brackets(names: list[str]) -> str:
    return f" ({', '.join(names)})" if names else ""


def render_models() -> str:
    """Return the text of docs/models.md."""
    names: dict[str, list[str]] = {}
    for gguf in GGUFS:
        mine = names.setdefault(gguf.record, [])
        mine += [] if f"`{gguf.name}`" in mine else [f"`{gguf.name}`"]
    rows = [
        f"- {record.models}: `{record.name.split(',')[0]}`"
        f"{_in_brackets(names.get(record.name, []))}"
        for record in ARCHITECTURES.values()
        if record.models
    ]
    around = [
        f"- {wrapper.models}: `{wrapper.name}`{', sees images' if wrapper.images else ''}"
        for wrapper in WRAPPERS.values()
    ]
    return "\n".join(
        [
            MODELS_HEAD,
            *rows,
            "",
            MODELS_OF_SEVERAL,
            *around,
            "",
        ]
    )


KERNELS_HEAD = """# Kernels on CUDA

Several kernels do one operation. A step runs the first of a table that fits, in
[deterministic mode](../docs/deterministic.md) the first of those that end in `_fixed`. The back
end, `manta plan` and `manta doctor` read the same tuples (`kernels/candidates.py`), and
`python docs/generate.py` writes this page from them.

"GPU" has the compute capabilities, out of those of a T4, A100, L40, H100 and B200, on which a
kernel serves the formats of its row. "Tokens" is the number of tokens, of a step or of a request in
it, for which the kernel runs. "Fuses" names arguments of the call that the kernel also applies.
"""
OPERATIONS_HEAD = """## Operations

A step is made of these operations. `kernels/reference.py` has each in plain torch, with shapes,
units and errors; it is the oracle of its kernels.

| operation | |
| --- | --- |
"""
# Compute capabilities: T4, A100, L40, H100, B200.
CAPABILITIES = ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0))
WEIGHTS = {
    "4-bit integers": Format(4, 128, zero=8),
    "4-bit integers with offsets": Format(4, 128, offset="add"),
    "MXFP4": Format(4, 32, torch.bfloat16, zero=12, table=E2M1),
    "8-bit integers": Format(8, 128, zero=128),
    "W8A8": Format(8, 4096, torch.float32, zero=128, activations=8),
    "FP8": Format(8, 4096, torch.float32, code="e4m3", activations=8),
    "FP8 in blocks of 128 x 128": Format(
        8, 128, torch.float32, code="e4m3", rows=128, activations=8
    ),
}
PLAIN = {"16 and 32 bits": Format(8, 128)}  # tables of plain weights read no format
HEADS_OF_128 = AttentionForm("", 2, 128, 4, 16)
HEADS = {
    **{f"heads of {dim}": HEADS_OF_128._replace(head_dim=dim) for dim in (64, 128, 256, 512)},
    **{f"groups of {n}": HEADS_OF_128._replace(group=n) for n in (1, 3, 5, 7, 8, 16)},
    "soft caps": HEADS_OF_128._replace(softcap=True),
    "slopes": HEADS_OF_128._replace(slopes=True),
    "pages of 1": HEADS_OF_128._replace(block_size=1),
    "32 bits": HEADS_OF_128._replace(element_size=4),
    **{f"`{kv}` keys": HEADS_OF_128._replace(kv=kv) for kv in KV_FORMATS},
}
LATENTS = {
    f"{heads} heads": LatentForm(heads, 512, 64, 2, 16) for heads in (16, 20, 40, 64, 96, 128)
}
KERNEL_TABLES: tuple[tuple[str, str, Mapping[str, Any], tuple[Candidate[Any], ...]], ...] = (
    ("Packed linear layers", "tokens (step)", WEIGHTS, PACKED_LINEAR + FIXED_LINEAR),
    ("Experts in 16 and 32 bits", "tokens (step)", PLAIN, EXPERTS + FIXED_EXPERTS),
    ("Packed experts", "tokens (step)", WEIGHTS, PACKED_EXPERTS + FIXED_PACKED_EXPERTS),
    ("Attention of decodes", "tokens (request)", HEADS, DECODE_ATTENTION),
    ("Attention of prompts", "tokens (request)", HEADS, CHUNK_ATTENTION + FIXED_ATTENTION),
    ("Latents, decodes", "tokens (request)", LATENTS, LATENT_DECODE),
    ("Latents, prompts", "tokens (request)", LATENTS, LATENT_CHUNKS),
)


def render_kernels() -> str:
    """Return the text of kernels/README.md: a table for each tuple of candidates."""
    parts = [KERNELS_HEAD]
    for title, tokens, forms, candidates in KERNEL_TABLES:
        head = ["kernel", "multiplies", "serves", "GPU", tokens, "fuses"]
        rows = [_kernel_row(kernel, forms) for kernel in candidates]
        if not any(kernel.fuses for kernel in candidates):
            head, rows = head[:-1], [row[:-1] for row in rows]
        lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
        parts.append(f"## {title}\n\n" + "\n".join(lines) + "\n")
    parts.append(OPERATIONS_HEAD + "\n".join(_operations()) + "\n")
    return "\n".join(parts)


def _operations() -> Iterator[str]:
    """Yield a table row for each operation: name, arguments and its docstring's first sentence."""
    for name, method in vars(ReferenceKernels).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            arguments = ", ".join(list(inspect.signature(method).parameters)[1:])
            text = inspect.getdoc(method)
            assert text is not None, f"{name} has no docstring"
            first = " ".join(text.split("\n\n")[0].split()).replace("|", "\\|")
            yield f"| `{name}({arguments})` | {first} |"


def _kernel_row(kernel: Candidate[Any], forms: Mapping[str, Any]) -> list[str]:
    """Return the cells of a candidate kernel's row. forms: the forms of weights or attention that
    the table's kernels may serve, by name."""
    served = {
        name: tuple(capability for capability in CAPABILITIES if kernel.takes(form, capability))
        for name, form in forms.items()
    }
    names = [name for name, capabilities in served.items() if capabilities]
    others = [name for name in forms if name not in names]
    serves = ", ".join(names)
    if len(others) < len(names):
        serves = f"all but {', '.join(others)}" if others else "all"
    tokens = dict.fromkeys(kernel.tokens(forms[name]) for name in names)
    return [
        f"`{kernel.name}`",
        kernel.operands,
        serves,
        " or ".join(map(_devices, dict.fromkeys(served[name] for name in names))),
        " or ".join(_range(*span) for span in tokens),
        ", ".join(sorted(kernel.fuses)),
    ]


def _devices(capabilities: tuple[tuple[int, int], ...]) -> str:
    if capabilities == CAPABILITIES:
        return "all"
    return ", ".join(f"{major}.{minor}" for major, minor in capabilities)


def _range(first: int, last: float) -> str:
    if last == float("inf"):
        return "any" if first == 1 else f"from {first}"
    return str(first) if first == last else f"{first} to {last:.0f}"


def modules(folder: str = "") -> list[tuple[str, str]]:
    """Return (path, first sentence) of each module of the repository, or of one folder."""
    if folder and not (ROOT / folder).is_dir():
        raise SystemExit(f"{folder}: no folder of {ROOT}")
    places = [ROOT / folder] if folder else [ROOT / package for package in PACKAGES]
    paths = [path for place in places for path in sorted(place.rglob("*.py"))]
    lines = [(path.relative_to(ROOT).as_posix(), sentence(path)) for path in paths]
    return [line for line in lines if line[1] or not line[0].endswith("__init__.py")]


FIELDS_HEAD = """# Fields of requests

docs/http.md says what the fields mean. /openapi.json has the complete schemas, and /docs shows them
as a page. "Ignored, and named": the field is listed in the header `x-ignored-fields`, unless
`http.strict` refuses it. So is every unknown field. Null counts as left out. A route lists the
fields that it adds to the common fields, and the common fields that it does not know.
"""
COMMON = "## Common fields\n"


def render_fields() -> str:
    """Return the text of `--fields`: the fields that most routes share, then those of each
    route."""
    paths: dict[int, list[str]] = {}
    bodies: dict[int, Body] = {}
    for route in ROUTES:
        post = route.operations.get("POST")
        if post is not None and (body := post.body) is not None:
            paths.setdefault(id(body), []).append(f"`{route.path}`")
            bodies[id(body)] = body
    fields = {key: list(rows(body)) for key, body in bodies.items()}
    counts = Counter(row for table in fields.values() for row in table)
    common = {row: "" for row, count in counts.items() if 2 * count > len(bodies)}
    parts = [FIELDS_HEAD, COMMON, _fields_table(common)]
    origin: dict[tuple[str, str, str], str] = {}
    for key, table in fields.items():
        names = {name for name, _, _ in table}
        absent = [f"`{name}`" for name, _, _ in common if name not in names]
        own = {row: origin.get(row, "") for row in table if row not in common}
        parts.append(f"## {', '.join(paths[key])}\n")
        if absent:
            unknown = "all common fields" if len(absent) == len(common) else ", ".join(absent)
            parts.append(f"Not known here: {unknown}.\n")
        parts.append(_fields_table(own))
        origin |= {row: paths[key][0] for row in table if row not in origin}
    return "\n".join(parts)


def _fields_table(origins: dict[tuple[str, str, str], str]) -> str:
    """Return a table of the fields in `origins`.

    origins: (name, fate, values) of a field -> the earlier route that has the same, or "". A fate
        is whether the field is taken, ignored or refused.
    """
    cells: dict[str, list[str]] = {}
    for (name, fate, values), origin in origins.items():
        text = f"as in {origin}" if origin and fate == TAKEN else values.replace("|", "\\|")
        cell = text if fate == TAKEN else ", ".join(filter(None, (fate, text)))
        cells.setdefault(cell, []).append(f"`{name}`")
    lines = ["| field | what is taken |", "| --- | --- |"]
    lines += [f"| {', '.join(names)} | {cell} |" for cell, names in cells.items()]
    return "\n".join(lines) + "\n"


def sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring; "" without one."""
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    text = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z`(])", text)[0]


if __name__ == "__main__":
    if "--modules" in sys.argv:
        for path, text in modules(*sys.argv[2:3]):
            print(f"{path}  {text}")
    elif "--fields" in sys.argv:
        print(render_fields())
    else:
        TARGET.write_text(render(), "utf-8")
        MODELS.write_text(render_models(), "utf-8")
        KERNELS.write_text(render_kernels(), "utf-8")
