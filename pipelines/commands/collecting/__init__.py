"""How edits in a working tree are followed: fed by editors (`door`, or files in the spool), feeds `ratchet collect`."""
