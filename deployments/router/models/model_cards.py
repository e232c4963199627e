"""ModelCards: a router's cards of a model and its adapters, by the names that requests use."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from deployments.adapters.record_store import AdapterRecord
from deployments.backend import ModelCard
from deployments.router.replicas.replica_client import ReplicaEndpoint


class ModelCards:
    """The cards of a model and its adapters (context, vocabulary, end tokens), by name.

    base: the model's card; its limits are replaced by those that replicas report.
    by_name: the cards of the model and its adapters, by name.
    on_change: called without arguments when cards have changed.
    """

    def __init__(self, card: ModelCard) -> None:
        self.base = card
        self.on_change: Callable[[], None] = lambda: None
        self.by_name: dict[str, ModelCard] = {card.id: card}
        self._records: Mapping[str, AdapterRecord] = {}
        self._known = False  # whether a replica has reported its limits

    def learn(self, endpoint: ReplicaEndpoint) -> None:
        """Update the cards with a replica's vocabulary, end tokens, context length and largest
        image; the shortest context and the largest image of all replicas count."""
        known = self.base.max_model_len if self._known else endpoint.max_model_len
        self._known = True
        self.base = replace(
            self.base,
            max_model_len=min(known, endpoint.max_model_len),
            vocab_size=endpoint.vocab_size,
            eos_token_ids=endpoint.eos_token_ids,
            image_tokens=max(self.base.image_tokens, endpoint.image_tokens),
        )
        self.set_adapters(self._records)

    def set_adapters(self, records: Mapping[str, AdapterRecord]) -> None:
        """Set the adapters that have cards. records: the adapters by name."""
        card = self.base
        self._records = records
        self.by_name = {card.id: card}
        for name, record in records.items():
            self.by_name[name] = replace(
                card,
                id=name,
                max_model_len=max(0, card.max_model_len - record.virtual_tokens),
                root=record.key if record.revision else name,
                parent=card.id,
                created=record.version // 10**9 or card.created,
            )
        self.on_change()
