"""The offline gate: tasks asked of champion and candidate, answers graded (in boxes where they are programs), scores compared in pairs."""
