"""DispatchLimits: what a router's dispatcher takes in, and how long it lets it wait."""

from dataclasses import dataclass, field

from deployments.router.admission.fair_queue import AdmissionLimits
from deployments.transport.channel import ChannelLimits


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """wait_seconds: how long a request waits for a replica at most. in_flight: requests at most.
    waiting: choices that may wait while no replica is ready. losses: replicas, killed from outside,
    that a request may lose in a row without a token from any. admission: while replicas are
    ready."""

    wait_seconds: float = 30.0
    in_flight: int = 4096
    waiting: int = 1024
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    losses: int = 1
    channel: ChannelLimits = field(default_factory=ChannelLimits)
