"""TowerFile: the vision encoder (tower) of a multimodal model, in a separate GGUF file as for
llama.cpp."""

import logging
import re
from collections.abc import Iterator
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deployments.checkpoints.gguf_file import TOWER, GGUFContainer, GGUFFile
from deployments.checkpoints.weights_file import WrittenTensor, cast
from engine.architectures.mmproj import MMPROJS, Mmproj
from engine.config.quantized import KEY

logger = logging.getLogger("manta.checkpoints")

_LAYER = re.compile(r"v\.(blk|deepstack)\.(\d+)\.")
_BLOCK = "v.blk.{i}."
# GGUF types that tensors of a vision encoder keep; others become bfloat16.
_KEPT = {"F32": "float32", "F16": "float16"}
# Keys of the text model's config.json that move to the top level, outside text_config.
_OUTSIDE = ("dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", KEY)


def towers_of(model: Path) -> list[Path]:
    """Return the GGUF files with vision encoders in the folder of a model's file, sorted by
    name."""
    files = sorted(model.parent.glob("*.gguf"))
    return [file for file in files if file != model and is_tower(file)]


def is_tower(file: Path) -> bool:
    """Return whether a GGUF file has a vision encoder, according to the file's name."""
    return "mmproj" in file.name.lower()


def tower_beside(model: GGUFFile) -> "TowerFile | None":
    """Return the vision encoder in the folder of a model's file; None if there is none for the
    model.

    Of several matching files, the largest is returned. Files with an unsupported projector are
    ignored, as are those of other models in a folder of several models. Raises ConfigError for a
    damaged file, and for a file that does not match the only model of its folder.
    """
    towers = [TowerFile(path, model) for path in towers_of(model.path)]
    fitting = [tower for tower in towers if tower.supported and not tower.misfit()]
    if fitting:
        return max(fitting, key=lambda tower: tower.path.stat().st_size)
    alone = sum(not is_tower(path) for path in model.path.parent.glob("*.gguf")) == 1
    for tower in towers:
        why = tower.misfit() if tower.supported else f"{tower.projector!r} is not supported"
        if tower.supported and alone:
            raise tower.error(
                f"{why}; put the mmproj file of {model.path.name} in its place, or move this one "
                "to another folder to take text alone"
            )
        logger.warning("%s: %s: %s takes text alone", tower.path.name, why, model.path.name)
    return None


class TowerFile(GGUFContainer):
    """An open GGUF file with a vision encoder (tower), in the folder of a text model.

    projector: type of the projector, as named in the file.
    supported: whether MMPROJS has this type of projector.
    """

    def __init__(self, path: Path, model: GGUFFile) -> None:
        super().__init__(path)
        self._model = model
        self.projector = str(self.own("projector_type") or self.own("vision.projector_type"))
        self._layouts = [layout for layout in MMPROJS if layout.projector == self.projector]
        self.supported = self.architecture == TOWER and bool(self._layouts)

    @property
    def layout(self) -> Mmproj:
        """The entry of MMPROJS for this vision encoder, which must be supported.

        An entry for the text model's architecture has precedence.
        """
        layouts = [layout for layout in self._layouts if layout.when(self)]
        mine = (layout for layout in layouts if self._model.architecture in layout.text)
        return next(mine, layouts[0])

    def misfit(self) -> str:
        """Return the reason why the vision encoder cannot belong to the text model; "" if it
        can."""
        layout, model = self.layout, self._model
        if model.architecture not in layout.text:
            texts = dict.fromkeys(text for layout in self._layouts for text in layout.text)
            return (
                f"it is the tower of a {' or '.join(texts)} model (projector "
                f"{self.projector}), and {model.path.name} is of {model.architecture}"
            )
        tensor, axis = layout.out
        size, wanted = self.shape(tensor)[axis], int(model.need("embedding_length"))
        if size != wanted:
            return (
                f"its embeddings have {size} numbers, and those of {model.path.name} {wanted}: "
                "they are of two models"
            )
        of_pictures = next(iter(layout.tokens.values()))
        if self._token(of_pictures) is None:
            return f"the vocabulary of {model.path.name} has no token {of_pictures[0]} for pictures"
        return ""

    # ---- Settings

    def around(self, text: dict[str, Any]) -> dict[str, Any]:
        """Return the contents of the multimodal model's config.json.

        text: contents of the text model's config.json.
        """
        layout = self.layout
        outside = {key: text[key] for key in _OUTSIDE if key in text}
        inner = {key: value for key, value in text.items() if key not in outside}
        sections = self._model.get(f"{self._model.architecture}.rope.dimension_sections")
        if layout.sections and sections is not None:
            section = [int(size) for size in sections][:3]
            inner["rope_parameters"] = {**inner["rope_parameters"], "mrope_section": section}
        tokens = {key: self._token(texts) for key, texts in layout.tokens.items()}
        return {
            "architectures": [layout.wrapper],
            "text_config": inner,
            "vision_config": layout.vision(self),
            **layout.outer(self),
            **{key: token for key, token in tokens.items() if token is not None},
            **outside,
        }

    def settings(self) -> dict[str, Any]:
        """Return the contents of preprocessor_config.json."""
        return {
            **self.layout.settings(self),
            "image_mean": self._colours("vision.image_mean"),
            "image_std": self._colours("vision.image_std"),
        }

    def _colours(self, key: str) -> list[float]:
        return [float(str(np.float32(value))) for value in self.need(key)]

    def _token(self, texts: tuple[str, ...]) -> int | None:
        """Return the token id of the first of several texts that is a token of the model; None if
        none is."""
        tokens = self._model.get("tokenizer.ggml.tokens") or []
        return next((tokens.index(text) for text in texts if text in tokens), None)

    # ---- Tensors

    def tensors(self) -> list[WrittenTensor]:
        """Return the vision encoder's tensors to write, in float32 or float16 if stored in these
        types, otherwise in bfloat16.

        Raises ConfigError for an extra or a missing tensor.
        """
        return [self._written(name, sources) for name, sources in self._sources().items()]

    def _sources(self) -> dict[str, list[str]]:
        """Return {name of a tensor to write: names of the file's tensors of which it consists}.

        Raises the errors of `tensors`.
        """
        layout, table = self.layout, self.layout.tensors
        levels, order = layout.levels(self), list(table)
        pieces: dict[str, list[tuple[int, str]]] = {}
        # In older files the names ffn_up and ffn_down are interchanged.
        right = self.shape("v.blk.0.ffn_down.weight")[0] == self.need("vision.embedding_length")
        halves = ("up", "down") if right else ("down", "up")
        swapped = {"up": f"ffn_{halves[0]}", "down": f"ffn_{halves[1]}"}
        for name in self.names:
            if name in layout.ignored:
                continue
            match = _LAYER.match(name)
            stem = name if match is None else f"v.{match[1]}.{{i}}.{name[match.end() :]}"
            stem = re.sub(r"ffn_(up|down)", lambda half: swapped[half[1]], stem)
            ours, kind = table.get(stem), ""
            if ours is None:
                stem, _, kind = stem.rpartition(".")
                ours = table.get(stem) if kind in ("weight", "bias") else None
            number = None if match is None else int(match[2])
            if match is not None and match[1] == "deepstack":
                number = levels.index(int(match[2])) if int(match[2]) in levels else None
            if ours is None or (number is None and "{i}" in ours):
                raise self.error(f"unknown tensor {name!r}")
            target = ours.replace("{i}", str(number)) + (f".{kind}" if kind else "")
            pieces.setdefault(target, []).append((order.index(stem), name))
        sources = {target: [name for _, name in sorted(names)] for target, names in pieces.items()}
        self._check_all(sources, levels)
        return sources

    def _check_all(self, sources: dict[str, list[str]], levels: list[int]) -> None:
        """Check that no tensor is missing. Raises ConfigError.

        sources: as in `_sources`. levels: layers whose outputs also go to the text model.
        """
        layers = range(int(self.need("vision.block_count")))
        fused = self.has("v.blk.0.attn_qkv.weight")
        absent = {f"{_BLOCK}attn_{part}" for part in (("q", "k", "v") if fused else ("qkv",))}
        absent.update(self.layout.optional)
        present = {name for names in sources.values() for name in names}
        for stem in self.layout.tensors.keys() - absent:
            numbers = layers if stem.startswith(_BLOCK) else levels
            for name in [stem.format(i=i) for i in numbers] if "{i}" in stem else [stem]:
                if not present & {name, f"{name}.weight"}:
                    raise self.error(f"tensor {name!r} is missing")

    def _written(self, target: str, sources: list[str]) -> WrittenTensor:
        shapes = [self.shape(name) for name in sources]
        kinds = {self.kind(name) for name in sources}
        dtype = _KEPT.get(next(iter(kinds)), "bfloat16") if len(kinds) == 1 else "bfloat16"
        shape = list(shapes[0])
        frames = len(shape) == 4 and len(sources) > 1
        if any(other[1:] != shapes[0][1:] for other in shapes):
            raise self.error(f"tensors {', '.join(sources)} have rows of different sizes")
        if frames:
            shape.insert(2, len(sources))
        elif sources == [f"{self.layout.grid}.weight"]:
            side = isqrt(shape[0])
            if side**2 != shape[0]:
                raise self.error(f"tensor {sources[0]!r} has {shape[0]} rows, no square")
            shape[:1] = [side, side]
        else:
            shape[0] = sum(size for size, *_ in shapes)

        def data() -> Iterator[bytes | memoryview]:
            parts = [self._values(name) for name in sources]
            values = np.stack(parts, 2) if frames else np.concatenate(parts)
            yield cast(np.ascontiguousarray(values), dtype).data.cast("B")

        return WrittenTensor.of(target, dtype, shape, data)

    def _values(self, name: str) -> NDArray[np.float32]:
        """Return the values of a file's tensor as in a checkpoint, by undoing GGUF's changes of row
        order and norms.
        """
        layout, data = self.layout, self.data(name)
        values = self.unpacked(name, data).reshape(self.shape(name))
        self.give_back(data)
        stem = re.sub(r"\.\d+\.", ".{i}.", name.rpartition(".")[0])
        if (ordered := layout.permuted.get(stem)) is not None:
            values = values[ordered(int(self.need("vision.attention.head_count")), len(values))]
        return values - 1 if stem == layout.plus_one else values
