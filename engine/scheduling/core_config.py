"""CoreConfig: the settings of the scheduling code, all of them resolved."""

from bisect import bisect_right
from dataclasses import dataclass, replace

from engine.config.kv_groups import Full, KVKind, blocks_for
from engine.pooling import PoolingHead
from engine.scheduling.memory.image_plan import ImagePlan
from engine.scheduling.memory.snapshots import SnapshotPlan


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """The resolved settings of an engine core.

    max_num_seqs: maximum number of running requests, each in one row of the device tables.
    max_num_batched_tokens: the maximum number of tokens in a step.
    max_model_len: the maximum of a request's tokens, prompt and output; the core lowers it to what
        num_blocks can hold.
    num_blocks, block_size: blocks of the KV cache, and tokens of a block.
    kv_ranks: ranks that each have num_blocks blocks, for different requests.
    async_scheduling: launch a micro-batch's next step before the tokens of its last one are known.
    micro_batches: number of groups into which requests are divided, equal to the number of pipeline
        stages. Each step computes one group, and stages compute different groups at the same time.
    target_tpot: the TPOT target in seconds, for the pace of steps; 0 = none.
    admission, batching: names in engine.scheduling.admission.ADMISSION and BATCHING.
    kinds: for each KV group, which tokens keep their KV; a request's block tables have this order.
    snapshots: the plan for snapshots of recurrent states; None = no layer is recurrent.
    model_key: distinguishes models (and weights) in the keys of the prefix cache.
    pooling: how texts become embeddings; None = requests for embeddings are refused.
    generates: whether the model generates text; False = all other requests are refused.
    whole_texts: whether a text must be computed in a single step.
    images: how the model takes images; None = requests with images are refused.
    no_routes: why requests that ask for the chosen experts are refused; "" = they are accepted.
    encodes_ahead: whether a step with decodes also encodes images for later steps, in parallel.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int
    kv_ranks: int = 1
    kinds: tuple[KVKind, ...] = (Full(),)
    snapshots: SnapshotPlan | None = None
    prefix_caching: bool = True
    async_scheduling: bool = True
    micro_batches: int = 1
    target_tpot: float = 0.0
    admission: str = "optimistic"
    batching: str = "mixed"
    eos_token_ids: tuple[int, ...] = ()
    vocab_size: int = 2**31
    model_key: str = ""
    pooling: PoolingHead | None = None
    generates: bool = True
    whole_texts: bool = False
    images: ImagePlan | None = None
    no_routes: str = "this model has no experts"
    encodes_ahead: bool = False

    @property
    def depth(self) -> int:
        """The number of steps in flight at once.

        It includes the newest step, which is launched before the oldest result is waited for.
        """
        return self.micro_batches + self.async_scheduling

    def bounded(self) -> "CoreConfig":
        """Return the settings with max_model_len lowered to what the blocks can hold."""
        num_blocks, images = self.num_blocks, self.images
        if images is not None and images.bidirectional:
            # A step computes all tokens of an image at once, which also read the window before it.
            windows = sum(not kind.whole for kind in self.kinds)
            num_blocks = max(0, num_blocks - windows * -(-images.largest // self.block_size))
        lengths = range(self.max_model_len + 1)
        past = bisect_right(
            lengths, num_blocks, key=lambda tokens: blocks_for(self.kinds, tokens, self.block_size)
        )
        return replace(self, max_model_len=past - 1)
