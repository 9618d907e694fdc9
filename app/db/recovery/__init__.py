"""After a restore or a failover: what the database forgot, told by what did not. Fed by the database and its surroundings; feeds people."""
