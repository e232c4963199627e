"""A trainer in its own process. Each version of its weights produces a different token, so that
tokens show the version that produced them.

The trainer's model has Llama's tensors with random numbers, except for one residual channel that
layers hardly change. Column 0 of the embedding is large, and column 0 of the head is zero except
for one token. So greedy outputs consist of that token, which differs between versions. The columns'
sign alternates between versions. So the embedding of one version with the head of the next gives
the token of neither.
"""

import base64
import json
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from engine import WeightSender

FIRST = 3  # the token of version 0
_CARRIED = 1000.0  # value of the embedding's column 0, large against what layers add to it
Pairs = list[tuple[str, Tensor]]


def token_of(version: int, vocab: int) -> int:
    """Return the token that a version's greedy outputs consist of."""
    return FIRST + version % (vocab - FIRST)


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a Llama with an untied head, by its checkpoint name."""
    width, inner, heads = (
        config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    head = config.get("head_dim", width // heads)
    queries, keys = head * heads, head * config["num_key_value_heads"]
    layer = {
        "input_layernorm": (width,),
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "post_attention_layernorm": (width,),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    vocab = (config["vocab_size"], width)
    tensors = {"model.embed_tokens.weight": vocab, "model.norm.weight": (width,)}
    for index in range(config["num_hidden_layers"]):
        for name, shape in layer.items():
            tensors[f"model.layers.{index}.{name}.weight"] = shape
    return {**tensors, "lm_head.weight": vocab}


class _Weights:
    """The trainer's tensors, on the device or in a segment of shared memory.

    shared: whether engines on the CPU read them from shared memory.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: str, shared: bool) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.vocab, self._device, self._shared = config["vocab_size"], device, shared
        wanted = shapes(config)
        sizes = [torch.Size(shape).numel() * dtype.itemsize for shape in wanted.values()]
        self._segment = SharedMemory(create=True, size=sum(sizes)) if shared else None
        if self._segment is None:
            raw = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        else:
            whole = torch.frombuffer(self._segment.buf, dtype=torch.uint8, count=sum(sizes))
            raw = list(whole.split(sizes))
        self.pairs: Pairs = [
            (name, part.view(dtype).view(shape))
            for part, (name, shape) in zip(raw, wanted.items(), strict=True)
        ]
        self._generator = torch.Generator(device)

    def make(self, version: int) -> None:
        """Write the weights of a version."""
        self._generator.manual_seed(version)
        sign = 1 - 2 * (version % 2)
        for name, tensor in self.pairs:
            if name.endswith("norm.weight"):
                tensor.fill_(1.0)
                continue
            tensor.normal_(0.0, 0.02, generator=self._generator)
            if name.startswith("model.embed"):
                tensor[:, 0] = sign * _CARRIED
            elif name == "lm_head.weight":
                tensor.zero_()
                tensor[token_of(version, self.vocab), 0] = sign
        if self._device != "cpu":
            torch.cuda.synchronize(self._device)

    def update_info(self) -> dict[str, Any]:
        """Return the update message with which engines on this device open the tensors."""
        info: dict[str, Any] = {
            "names": [name for name, _ in self.pairs],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in self.pairs],
            "shapes": [list(tensor.shape) for _, tensor in self.pairs],
        }
        if self._segment is not None:
            at, places = 0, []
            for _, tensor in self.pairs:
                places.append({"cpu": {"name": self._segment.name, "offset": at}})
                at += tensor.nbytes
            return info | {"ipc_handles": places}
        uuid = str(torch.cuda.get_device_properties(self._device).uuid)
        handles = [{uuid: reduce_tensor(tensor)} for _, tensor in self.pairs]
        encoded = base64.b64encode(ForkingPickler.dumps(handles)).decode()
        return info | {"ipc_handles_pickled": encoded}

    def close(self) -> None:
        self.pairs.clear()
        if self._segment is not None:
            self._segment.unlink()  # the process's end closes it, as tensors may still use it


def _serve(pipe: Connection, folder: str, dtype: str, device: str, shared: bool) -> None:
    """Make a trainer's tensors, and execute orders (name, argument) from the pipe until "end".

    "make" writes the weights of a version. "share" returns the handles of the tensors. "join" opens
    a sender to a port; "announce" and "send" use the latest sender. Each order except "end" is
    answered with (error or "", result). ("", None) is sent first, once the tensors exist.

    folder: a folder with config.json. dtype: name of torch's dtype.
    shared: whether the tensors are in shared memory.
    """
    torch.set_num_threads(1)
    weights = _Weights(Path(folder), getattr(torch, dtype), device, shared)
    senders: list[WeightSender] = []

    def join(port: int) -> dict[str, Any]:
        senders.append(WeightSender("127.0.0.1", port, 1, device, seconds=60))
        return senders[-1].init_info

    orders: dict[str, Callable[[Any], Any]] = {
        "make": weights.make,
        "share": lambda _: weights.update_info(),
        "join": join,
        "announce": lambda _: senders[-1].update_info(weights.pairs),
        "send": lambda _: senders[-1].send(weights.pairs),
    }
    pipe.send(("", None))
    try:
        while (order := pipe.recv())[0] != "end":
            try:
                pipe.send(("", orders[order[0]](order[1])))
            except Exception as error:
                pipe.send((repr(error), None))
    except EOFError:  # the bench's process has died
        pass
    finally:
        for sender in senders:
            sender.close()
        weights.close()


class TrainerProcess:
    """The trainer's process, to which `order` sends orders (see `_serve`).

    dtype, device: name of the tensors' dtype, and their device.
    shared: whether tensors are in shared memory, for engines on the CPU.
    """

    def __init__(self, folder: Path, dtype: str, device: str, *, shared: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        arguments = (other, str(folder), dtype, device, shared)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        other.close()
        self._answer()

    def order(self, name: str, argument: Any = None) -> Any:
        """Send an order, wait for its answer and return it. Raises RuntimeError if it failed."""
        self._pipe.send((name, argument))
        return self._answer()

    def _answer(self) -> Any:
        try:
            failure, value = self._pipe.recv()
        except EOFError:
            raise RuntimeError("the trainer's process has died") from None
        if failure:
            raise RuntimeError(f"the trainer: {failure}")
        return value

    def close(self) -> None:
        """End the process; further calls do nothing."""
        if self._process.is_alive():
            self._pipe.send(("end", None))
            self._process.join(20)
            self._process.kill()
