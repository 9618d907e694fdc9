"""The only room that speaks Parquet (pyarrow): token payloads in immutable segments, in a local folder or S3.

Fed by ingestion / feeds batching, training and off-policy evaluation with tokens and log-probabilities.
"""
