"""The gateway: OpenAI's chat completions in front of versioned policies.

Fed by products / feeds the inbox (exposure before, turn after sampling) and asks the engines.
"""
