"""The only room that speaks MLflow: versions, aliases, metrics and model cards as a projection of SQL, reconciled, never followed.

Fed by the loop and the release outbox / feeds people who look at MLflow.
"""
