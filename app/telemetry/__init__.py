"""What a deployment says about itself to a Prometheus: one catalogue of names, and the way each process shows its own.

Fed by every process, and by the readings of the database / feeds `/metrics`, the alert rules and the dashboards of infra/.
"""
