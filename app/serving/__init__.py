"""Engines: the embedded torch engine behind HTTP, the client the gateway uses, the vLLM adapter and what keeps versions on vLLM servers
(`vllm`, `vllm_residency`); hot swap by digest.

Fed by the deployment pointer and releases / feeds the gateway with tokens and log-probabilities.
"""
