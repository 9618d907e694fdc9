"""Servers of other make behind the `Engines` port (vLLM, SGLang): one adapter over a dialect each, and what keeps versions on them.

requests   engines.ServerEngines ─▶ a Dialect (vllm.Vllm, sglang.Sglang): paths, bodies, streams, refusals
versions   residency ─▶ a Control (vllm_control, sglang_control): load, replace, label, score
"""
