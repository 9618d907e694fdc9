-- PostgreSQL runs this once, on an empty data folder: MLflow keeps its tables in a database of its own.
CREATE DATABASE mlflow OWNER ratchet;
