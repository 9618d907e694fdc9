"""The only room that speaks Kafka (kafka-python): topics, codec, producer, consumer, and the embedded broker.

Fed by the relay (inbox and outbox rows) / feeds ingestion with records.
"""
