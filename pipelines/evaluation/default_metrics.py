"""The metrics of whoever configures none (`facts/gates.md`, section 4.4)."""

import msgspec

from pipelines.evaluation.metrics import Good, MetricClass, MetricConfig, Missing


def default_metrics() -> tuple[MetricConfig, ...]:
    k, m = MetricClass, MetricConfig
    return (
        m(name="fault", source="fault", kind=k.HARD, good=Good.DOWN, window_s=0.0, prior=0.01),
        m(name="invalid_tool_call", source="invalid_tool_call", kind=k.HARD, good=Good.DOWN, window_s=0.0, prior=0.01),
        m(name="task_success", source="observation:task_success", kind=k.GOLD, abort_margin=0.0075, margin=0.015),
        m(name="failed_turns", source="observation:task_success", kind=k.GOLD, by_turns=True),
        m(name="reward", source="reward", kind=k.PROXY, low=-1.0, high=1.0, margin=0.02),
        m(name="acts", source="acts", kind=k.BEHAVIOUR, good=Good.SAME, abort_margin=0.03),
        m(name="asks", source="asks", kind=k.BEHAVIOUR, good=Good.SAME, abort_margin=0.03),
        m(name="refuses", source="refuses", kind=k.BEHAVIOUR, good=Good.SAME, abort_margin=0.03, prior=0.02),
        m(name="length_over_p95", source="length", kind=k.BEHAVIOUR, good=Good.SAME, abort_margin=0.03, prior=0.05),
        m(name="tools_per_turn", source="tools", kind=k.BEHAVIOUR, good=Good.SAME, high=4.0, abort_margin=0.03),
        m(name="abandoned", source="abandoned", kind=k.BEHAVIOUR, good=Good.SAME, abort_margin=0.03),
        m(name="excluded", source="excluded", kind=k.BEHAVIOUR, good=Good.SAME, abort_margin=0.03, prior=0.02),
        m(name="dissatisfied", source="term:follow_up", kind=k.USER_HARM, threshold=-0.2, low=-1.0, missing=Missing.BEST, prior=0.9),
        m(name="regenerated", source="has:regenerate", kind=k.USER_HARM, good=Good.DOWN, prior=0.05),
        m(name="undone", source="has:undo", kind=k.USER_HARM, good=Good.DOWN, prior=0.05),
        *_default_costs(),
    )


def _default_costs() -> tuple[MetricConfig, ...]:
    """Guards against what everybody would notice: a typical answer a quarter slower or dearer, or three times as many slow or dear ones."""
    typical = MetricConfig(
        name="total_time", source="total_time", kind=MetricClass.COST, good=Good.DOWN, missing=Missing.BEST, relative=True,
        abort_margin=0.06, prior=0.5,
    )  # fmt: skip
    tail = msgspec.structs.replace(typical, name="total_time_over_p95", relative=False, quantile=0.95, abort_margin=0.10, prior=0.05)
    return (
        typical,
        tail,
        msgspec.structs.replace(typical, name="time_to_first_token", source="time_to_first_token"),
        msgspec.structs.replace(tail, name="first_token_over_p95", source="time_to_first_token"),
        msgspec.structs.replace(typical, name="tokens", source="length"),
        msgspec.structs.replace(tail, name="tokens_over_p95", source="length"),
        msgspec.structs.replace(typical, name="price", source="price"),
        msgspec.structs.replace(tail, name="price_over_p95", source="price"),
    )
