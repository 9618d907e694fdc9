"""Programs that run inside boxes: read as text, never imported by us.

Fed by `pipelines.evaluation.suites.execution`; feeds it what they say.
"""
