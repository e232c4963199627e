"""CoreConfig: the resolved numbers that the scheduling code works with. No optional values left."""

from dataclasses import dataclass

from engine.config.kv_groups import Full, KVKind
from engine.pooling import PoolingHead
from engine.scheduling.snapshots import SnapshotPlan


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """What an engine core may use.

    max_num_seqs: device rows. max_num_batched_tokens: tokens a step. max_model_len: tokens of a
        request, prompt and output; the core lowers it to what num_blocks can hold.
    num_blocks, block_size: the KV cache, and tokens a block.
    kv_ranks: that have so many blocks each, for other requests than the others.
    async_scheduling: launch a lane's next step before the tokens of its last one are known.
    lanes: groups of requests that take turns, each in a step of its own; as many as a model has
        stages, which compute steps of different lanes at once.
    target_tpot: seconds between a request's tokens that steps are kept within; 0 = any.
    admission, batching: names in engine.scheduling.admission.ADMISSION and BATCHING.
    kinds: what each group of layers keeps, the order of a request's tables.
    snapshots: of the states that layers keep in requests' rows; None: no layer does.
    model_key: distinguishes models (and weights) in the keys of the prefix cache.
    pooling: how texts become vectors; None: requests for these are refused.
    generates: False: all others are.
    whole_texts: a text is computed in one step or not at all.
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
    lanes: int = 1
    target_tpot: float = 0.0
    admission: str = "optimistic"
    batching: str = "mixed"
    eos_token_ids: tuple[int, ...] = ()
    vocab_size: int = 2**31
    model_key: str = ""
    pooling: PoolingHead | None = None
    generates: bool = True
    whole_texts: bool = False

    @property
    def depth(self) -> int:
        """Steps in flight at once, the one included that is launched before the oldest one's result
        is waited for."""
        return self.lanes + self.async_scheduling
