"""The spans of a request that has ended: its time in the router, at replicas and in the engine, as
its RequestTrace has them. Pure."""

from deployments.observe.otlp import (
    SERVER,
    Span,
    TraceContext,
    TracingSettings,
    new_context,
    read_context,
)
from deployments.router.request_trace import RequestTrace


def context_of(traceparent: str, tracestate: str, settings: TracingSettings) -> TraceContext | None:
    """The caller's trace, or a new one; None: it is not sampled. A caller's decision holds."""
    context = read_context(traceparent, tracestate) or new_context(settings.sample)
    return context if context.sampled else None


def spans_of(trace: RequestTrace, context: TraceContext, router: str) -> list[Span]:
    """The request's span first. Names and attributes beginning with gen_ai are OpenTelemetry's
    conventions for generative models."""
    shift = trace.received_at - trace.arrived  # from monotonic to Unix seconds
    end = trace.ended + shift
    root = Span(
        "manta.request",
        context,
        trace.received_at,
        end,
        kind=SERVER,
        attributes={
            "gen_ai.request.model": trace.model,
            "gen_ai.request.choice.count": trace.choices,
            "gen_ai.usage.input_tokens": trace.prompt_tokens,
            "gen_ai.usage.output_tokens": trace.output_tokens,
            "gen_ai.response.finish_reasons": list(trace.finish),
            "manta.request_id": trace.id,
            "manta.router": router,
            "manta.cached_tokens": trace.cached,
        },
        error=trace.error,
    )
    if trace.max_tokens is not None:
        root.attributes["gen_ai.request.max_tokens"] = trace.max_tokens
    if trace.first:
        root.attributes["gen_ai.server.time_to_first_token"] = trace.first - trace.arrived
    placed = trace.placed + shift if trace.placed else end
    found = [root, root.child("router.queue", trace.received_at, placed)]
    visits = trace.visits()
    began = max((i for i, (at, *_) in enumerate(visits) if at <= trace.first), default=-1)
    for i, (at, until, decision, emitted, why) in enumerate(visits):
        visit = root.child("replica", at + shift, until + shift)
        visit.attributes = {
            "manta.replica": decision.replica,
            "manta.route.reason": decision.reason,
            "manta.route.expected_seconds": decision.seconds,
            "manta.route.expected_cached_tokens": decision.cached,
            "manta.emitted_tokens": emitted,
        }
        visit.error = why
        found.append(visit)
        if trace.first and i == began:
            started = min(max(trace.started, at), trace.first) + shift
            first = trace.first + shift
            found.append(visit.child("engine.queue", at + shift, started))
            found.append(
                visit.child(
                    "engine.prefill",
                    started,
                    first,
                    manta__tokens=trace.prompt_tokens - trace.cached,
                )
            )
            found.append(visit.child("engine.decode", first, max(until + shift, first)))
    return found
